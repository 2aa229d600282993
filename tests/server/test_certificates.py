"""The server's certificates: made once, renewed in time, trusted by those who pin the CA and by nobody else."""

import contextlib
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from coterie.core.errors import ConfigError
from coterie.server import certificates
from coterie.server.certificates import ensure, operators


def handshake(server, ca, name):
    """What a client that trusts `ca` says to a server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listening, listening.accept()[0] as plain, contextlib.suppress(OSError):
            context.wrap_socket(plain, server_side=True).close()

    thread = threading.Thread(target=answer)
    thread.start()
    client = ssl.create_default_context(cafile=str(ca))
    try:
        with socket.create_connection(listening.getsockname()) as plain:
            client.wrap_socket(plain, server_hostname=name).close()
    finally:
        thread.join(10)


def test_keys_are_for_their_owner_only(tmp_path):
    made = ensure(tmp_path / "tls", ["federation.example.org"])
    for path in (made.key, tmp_path / "tls" / "ca.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert len(made.fingerprint) == 64


@pytest.mark.parametrize("name", ["federation.example.org", "localhost", "127.0.0.1", "10.1.2.3"])
def test_who_pins_the_ca_trusts_the_server_under_its_names(tmp_path, name):
    made = ensure(tmp_path / "tls", ["federation.example.org", "10.1.2.3"])
    handshake(made, made.ca, name)


def test_another_name_or_another_ca_is_refused(tmp_path):
    made, other = ensure(tmp_path / "tls", []), ensure(tmp_path / "other", [])
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(made, made.ca, "elsewhere.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        handshake(made, other.ca, "localhost")


def test_certificates_are_made_once_and_renewed_for_a_new_name_or_in_time(tmp_path, monkeypatch):
    first = ensure(tmp_path / "tls", ["a.example.org"])
    before = first.certificate.read_bytes()
    assert ensure(tmp_path / "tls", ["a.example.org"]).certificate.read_bytes() == before
    named = ensure(tmp_path / "tls", ["a.example.org", "b.example.org"])
    assert named.certificate.read_bytes() != before
    assert named.fingerprint == first.fingerprint
    before = named.certificate.read_bytes()
    monkeypatch.setattr(certificates, "_now", lambda: datetime.now(UTC) + timedelta(days=380))
    assert ensure(tmp_path / "tls", ["a.example.org", "b.example.org"]).certificate.read_bytes() != before
    monkeypatch.setattr(certificates, "_now", lambda: datetime.now(UTC) + timedelta(days=3640))
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        ensure(tmp_path / "tls", [])


def test_the_operators_own_are_checked(tmp_path):
    one, other = ensure(tmp_path / "one", []), ensure(tmp_path / "other", [])
    assert operators(one.certificate, one.key, one.ca).fingerprint == one.fingerprint
    with pytest.raises(ConfigError, match=r"server\.key"):
        operators(one.certificate, other.key, one.ca)
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        operators(tmp_path / "absent.pem", one.key, None)


def test_the_server_certificate_is_for_servers_only(tmp_path):
    certificate = x509.load_pem_x509_certificate(ensure(tmp_path / "tls", []).certificate.read_bytes())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    (purpose,) = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert purpose == x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
