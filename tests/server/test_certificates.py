"""The server's certificates: made once, renewed in time, trusted by those who pin the CA and by nobody else."""

import contextlib
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from coterie.core.errors import ConfigError, StorageError
from coterie.server import certificates
from coterie.server.certificates import ensure, operators


def handshake(server, ca, name, address="127.0.0.1"):
    """What a client that trusts `ca` says to a server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)

    def answer():
        with listening, listening.accept()[0] as plain, contextlib.suppress(OSError):
            context.wrap_socket(plain, server_side=True).close()

    thread = threading.Thread(target=answer)
    thread.start()
    client = ssl.create_default_context(cafile=str(ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    try:
        with socket.create_connection(listening.getsockname()[:2]) as plain:
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


def loaded(path):
    return x509.load_pem_x509_certificates(Path(path).read_bytes())


def later(monkeypatch, **time):
    monkeypatch.setattr(certificates, "_now", lambda: datetime.now(UTC) + timedelta(**time))


def private_pem(key, encryption=None):
    return key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, encryption or pem.NoEncryption())


def remove_ca(directory):
    for name in ("ca.pem", "ca.key"):
        (directory / name).unlink()


def test_a_server_on_ipv6_is_trusted(tmp_path):
    made = ensure(tmp_path / "tls", ["2001:db8::1"])
    try:
        handshake(made, made.ca, "2001:db8::1", "::1")
    except OSError as error:
        if isinstance(error, ssl.SSLError):
            raise
        pytest.skip(f"no IPv6 here: {error}")
    handshake(made, made.ca, "::1", "::1")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        handshake(made, made.ca, "2001:db8::2", "::1")


def test_the_certificates_are_as_promised(tmp_path):
    made = ensure(tmp_path / "tls", ["A.example.org.", "10.0.0.1", "fe80::1%eth0"])
    (ca,), chain = loaded(made.ca), loaded(made.certificate)
    server, now = chain[0], datetime.now(UTC)
    assert chain[1:] == [ca]
    assert made.fingerprint == sha256(ca.public_bytes(pem.Encoding.DER)).hexdigest()
    constraints, usage = (ca.extensions.get_extension_for_class(c) for c in (x509.BasicConstraints, x509.KeyUsage))
    assert (constraints.value.ca, constraints.value.path_length, constraints.critical) == (True, 0, True)
    assert (usage.value.key_cert_sign, usage.value.digital_signature, usage.critical) == (True, False, True)
    for certificate, days in ((ca, 3652), (server, 398)):
        assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(days)
        assert abs(now - timedelta(hours=1) - certificate.not_valid_before_utc) < timedelta(minutes=1)
        assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "a.example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.1", "fe80::1"]
    issuer = server.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert issuer.key_identifier == own.digest


@pytest.mark.parametrize("host", ["", "a b", "http://a", "a:80", "[::1]", "é.org", "a..b", "-a", "1.2.3", "a" * 64])
def test_what_is_no_host_is_named(tmp_path, host):
    with pytest.raises(ConfigError, match=f"{re.escape(repr(host))} is no host name or IP address: write it without"):
        ensure(tmp_path / "tls", [host])


@pytest.mark.parametrize("host", ["my_server", "*.example.org", "xn--bcher-kva.example", "a" * 63, "0.0.0.0"])
def test_a_host_that_is_there_makes_nothing_new(tmp_path, host):
    before = ensure(tmp_path / "tls", [host]).certificate.read_bytes()
    assert ensure(tmp_path / "tls", [host]).certificate.read_bytes() == before
    assert ensure(tmp_path / "tls", []).certificate.read_bytes() == before


def test_a_key_is_at_no_moment_open_to_others(tmp_path, monkeypatch):
    seen, sync = {}, os.fsync

    def look(file):
        seen.update({path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").glob("*.new")})
        sync(file)

    monkeypatch.setattr(certificates.os, "fsync", look)
    before = os.umask(0)
    try:
        ensure(tmp_path / "tls", [])
    finally:
        os.umask(before)
    assert (seen["ca.key.new"], seen["server.key.new"]) == (0o600, 0o600)


def test_a_directory_open_to_others_is_closed(tmp_path):
    (tmp_path / "tls").mkdir(mode=0o755)
    ensure(tmp_path / "tls", [])
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700


def test_a_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "tls").write_text("")
    with pytest.raises(StorageError, match=r"cannot use the directory .*tls for certificates: File exists"):
        ensure(tmp_path / "tls", [])


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(certificates.os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*tls: No space left|cannot write .*pem: No space left"):
        ensure(tmp_path / "tls", [])


def test_processes_that_start_at_once_agree(tmp_path):
    script = """
import sys
from pathlib import Path
from coterie.server.certificates import ensure
print("ready", flush=True)
sys.stdin.readline()
made = ensure(Path(sys.argv[1]), ["a.example.org"])
print(made.fingerprint, made.certificate.read_text().count("BEGIN"), len(made.key.read_bytes()) > 0)
"""
    command, pipe = [sys.executable, "-c", script, str(tmp_path / "tls")], subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = {process.communicate(timeout=60)[0].strip() for process in started}
    made = ensure(tmp_path / "tls", [])
    assert said == {f"{made.fingerprint} 2 True"}
    handshake(made, made.ca, "a.example.org")


class Killed(BaseException):
    """Ends a start where SIGKILL would."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("state", ["new", "without a CA"])
def test_a_start_that_was_killed_is_made_good(tmp_path, monkeypatch, state, step, after):
    directory, steps, replace = tmp_path / "tls", [], Path.replace
    if state == "without a CA":
        ensure(directory, [])
        remove_ca(directory)
        (directory / "server.key").unlink()

    def killed(path, target):
        steps.append(target.name)
        if len(steps) > step:
            if after:
                replace(path, target)
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            ensure(directory, [])
    assert steps == ["ca.key", "ca.pem", "server.key", "server.pem"][: step + 1]
    seen = (directory / "ca.pem").read_bytes() if (directory / "ca.pem").exists() else None
    made = ensure(directory, [])
    assert seen in (None, made.ca.read_bytes())
    assert list(directory.glob("*.new")) == []
    handshake(made, made.ca, "localhost")


def test_a_server_certificate_is_renewed_with_its_key_at_thirty_days(tmp_path, monkeypatch):
    made = ensure(tmp_path / "tls", [])
    key, certificate = made.key.read_bytes(), made.certificate.read_bytes()
    later(monkeypatch, days=367, hours=22)
    assert ensure(tmp_path / "tls", []).certificate.read_bytes() == certificate
    later(monkeypatch, days=368)
    renewed = ensure(tmp_path / "tls", [])
    assert renewed.certificate.read_bytes() != certificate
    assert (renewed.key.read_bytes(), renewed.fingerprint) == (key, made.fingerprint)


def test_a_server_certificate_never_outlives_its_ca(tmp_path, monkeypatch):
    ensure(tmp_path / "tls", [])
    later(monkeypatch, days=3600)
    server, ca = loaded(ensure(tmp_path / "tls", []).certificate)
    assert server.not_valid_after_utc == ca.not_valid_after_utc


def test_a_server_certificate_from_the_future_is_made_anew(tmp_path, monkeypatch):
    made = ensure(tmp_path / "tls", [])
    with monkeypatch.context() as patched:
        later(patched, days=300)
        ensure(tmp_path / "tls", ["a.example.org"])
    ensure(tmp_path / "tls", ["a.example.org"])
    handshake(made, made.ca, "a.example.org")


@pytest.mark.parametrize("lost", ["server.pem", "server.key"])
def test_a_lost_server_file_is_made_anew(tmp_path, lost):
    made = ensure(tmp_path / "tls", [])
    (tmp_path / "tls" / lost).unlink()
    assert ensure(tmp_path / "tls", []).fingerprint == made.fingerprint
    handshake(made, made.ca, "localhost")


def test_a_server_certificate_of_another_ca_is_made_anew(tmp_path):
    made, other = ensure(tmp_path / "tls", []), ensure(tmp_path / "other", [])
    made.certificate.write_bytes(other.certificate.read_bytes())
    made.key.write_bytes(other.key.read_bytes())
    assert ensure(tmp_path / "tls", []).fingerprint == made.fingerprint != other.fingerprint
    handshake(made, made.ca, "localhost")


def test_who_removes_the_ca_gets_a_new_one(tmp_path):
    made = ensure(tmp_path / "tls", [])
    remove_ca(tmp_path / "tls")
    again = ensure(tmp_path / "tls", [])
    assert again.fingerprint != made.fingerprint
    handshake(again, again.ca, "localhost")


@pytest.mark.parametrize("lost", ["ca.pem", "ca.key"])
def test_half_a_ca_is_never_replaced(tmp_path, lost):
    ensure(tmp_path / "tls", [])
    (tmp_path / "tls" / lost).unlink()
    with pytest.raises(ConfigError, match=rf"tls/{lost}.*: restore it from a backup, or remove .*: every site must en"):
        ensure(tmp_path / "tls", [])


@pytest.mark.parametrize("days", [3623, 4000])
def test_a_ca_near_its_end_or_past_it_is_named_with_the_remedy(tmp_path, monkeypatch, days):
    ensure(tmp_path / "tls", [])
    later(monkeypatch, days=days)
    with pytest.raises(ConfigError, match=r"the CA .*ca\.pem ends at .* UTC, in fewer than 30 days: remove .*ca\.key"):
        ensure(tmp_path / "tls", [])


def test_a_ca_from_the_future_is_named(tmp_path, monkeypatch):
    ensure(tmp_path / "tls", [])
    later(monkeypatch, hours=-2)
    with pytest.raises(ConfigError, match=r"ca\.pem is not valid before .* UTC: set this machine's clock right"):
        ensure(tmp_path / "tls", [])


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----"])
@pytest.mark.parametrize("name", ["ca.pem", "ca.key", "server.pem", "server.key"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    ensure(tmp_path / "tls", [])
    (tmp_path / "tls" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"tls/{name} is damaged or holds no .* in PEM: (restore|remove) it"):
        ensure(tmp_path / "tls", [])


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    made = ensure(tmp_path / "tls", [])
    made.certificate.unlink()
    made.certificate.mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*server\.pem: Is a directory: remove it"):
        ensure(tmp_path / "tls", [])

    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(ConfigError, match=r"may not read .*ca\.pem: give this user the right to"):
        ensure(tmp_path / "tls", [])


def test_a_ca_with_the_wrong_parts_is_named(tmp_path):
    made, other = ensure(tmp_path / "tls", []), ensure(tmp_path / "other", [])
    key = made.ca.with_name("ca.key")
    right = key.read_bytes()
    key.write_bytes(other.ca.with_name("ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key is not the key of .*ca\.pem: restore"):
        ensure(tmp_path / "tls", [])
    key.write_bytes(private_pem(rsa.generate_private_key(65537, 2048)))
    with pytest.raises(ConfigError, match=r"ca\.key holds no EC key: restore"):
        ensure(tmp_path / "tls", [])
    key.write_bytes(private_pem(pem.load_pem_private_key(right, None), pem.BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match=r"ca\.key is locked with a passphrase: write the key without one"):
        ensure(tmp_path / "tls", [])
    key.write_bytes(made.key.read_bytes())
    made.ca.write_bytes(made.certificate.read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.pem is not the certificate of a CA: restore"):
        ensure(tmp_path / "tls", [])


def test_the_operators_files_must_belong_together_and_be_in_force(tmp_path, monkeypatch):
    one, other = ensure(tmp_path / "one", []), ensure(tmp_path / "other", [])
    with pytest.raises(ConfigError, match=r"other/ca\.pem is not the CA of .*one/server\.pem: name the CA that issued"):
        operators(one.certificate, one.key, other.ca)
    with pytest.raises(ConfigError, match=r"server\.pem is not self-signed: name the file of its CA's certificate too"):
        operators(one.certificate, one.key, None)
    with pytest.raises(ConfigError, match=r"one/server\.pem holds 2 certificates: leave only the one that sites shall"):
        operators(one.certificate, one.key, one.certificate)
    with pytest.raises(ConfigError, match=r"server\.pem is damaged or holds no private key in PEM: name a readable"):
        operators(one.certificate, one.certificate, one.ca)
    later(monkeypatch, hours=-2)
    with pytest.raises(
        ConfigError, match=r"one/server\.pem is not valid before .* UTC: set this machine's clock right"
    ):
        operators(one.certificate, one.key, one.ca)
    later(monkeypatch, days=399)
    with pytest.raises(ConfigError, match=r"one/server\.pem expired at .* UTC: replace it by a new one"):
        operators(one.certificate, one.key, one.ca)


def test_a_self_signed_certificate_of_the_operators_is_its_own_ca(tmp_path):
    made = ensure(tmp_path / "tls", [])
    own = operators(made.ca, made.ca.with_name("ca.key"), None)
    assert (own.ca, own.certificate, own.fingerprint) == (made.ca, made.ca, made.fingerprint)
