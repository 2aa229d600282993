"""The server's TLS certificates: a CA of its own and a certificate signed by it, or the operator's own files."""

import fcntl
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.core.errors import ConfigError, StorageError

_CA_LIFE = timedelta(days=3652)
_SERVER_LIFE = timedelta(days=398)
_SPARE = timedelta(days=30)
_BACKDATED = timedelta(hours=1)  # for clocks that differ
_LOCAL = ("localhost", "127.0.0.1", "::1")
_DNS_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files, and what sites pin.

    ca: one certificate; certificate: the server's, followed by its chain; key: the server's private key;
    fingerprint: SHA-256 of the CA certificate's DER, 64 hex digits.
    """

    ca: Path
    certificate: Path
    key: Path
    fingerprint: str


def ensure(directory: Path, hosts: Sequence[str]) -> Certificates:
    """Make or reuse a CA (10 years) and a server certificate (398 days) for host names and IP addresses.

    localhost, 127.0.0.1 and ::1 always belong to the hosts. The server certificate is renewed, with the same key, when
    it has fewer than 30 days left, lacks a host or is of another CA; the CA is never renewed. Safe when several
    processes start at once, and against being killed. Raises ConfigError for a host that cannot be one, for a damaged
    or unreadable file and for a CA with fewer than 30 days left; StorageError when a file cannot be written.
    """
    names = list(dict.fromkeys(_general_name(host) for host in (*_LOCAL, *hosts)))
    with _locked(directory):
        ca_path, certificate_path, key_path = (directory / name for name in ("ca.pem", "server.pem", "server.key"))
        ca, ca_key = _ca(ca_path, directory / "ca.key", certificate_path)
        key = _make_key(key_path)
        if not _serves(certificate_path, key, ca, names):
            _write(certificate_path, _pem(_server_certificate(key, names, ca, ca_key)) + _pem(ca), 0o644)
        return Certificates(ca_path, certificate_path, key_path, _fingerprint(ca))


def operators(certificate: Path, key: Path, ca: Path | None) -> Certificates:
    """The operator's own files. ca: the one certificate that sites shall pin; None when `certificate` is self-signed.

    Raises ConfigError, naming the file, when one cannot be read, is expired or not valid yet, or when they do not
    belong together.
    """
    remedy = "name a readable PEM file"
    chain = _read_certificates(certificate, remedy)
    _check_in_force(certificate, chain[0])
    if _read_key(key, remedy).public_key() != chain[0].public_key():
        raise ConfigError(f"{key} is not the key of {certificate}: name the two files that were made together")
    if ca is None:
        if len(chain) > 1 or not _issued(chain[0], chain[0]):
            raise ConfigError(f"{certificate} is not self-signed: name the file of its CA's certificate too")
        return Certificates(certificate, certificate, key, _fingerprint(chain[0]))
    authority = _read_certificates(ca, remedy)
    if len(authority) > 1:
        raise ConfigError(f"{ca} holds {len(authority)} certificates: leave only the one that sites shall pin")
    _check_in_force(ca, authority[0])
    if not any(each == authority[0] or _issued(each, authority[0]) for each in chain):
        raise ConfigError(
            f"{ca} is not the CA of {certificate}: name the CA that issued it, or append the intermediate certificates"
        )
    return Certificates(ca, certificate, key, _fingerprint(authority[0]))


def _ca(path: Path, key_path: Path, server: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    restore = f"restore it from a backup, or remove {path} and {key_path} for a new CA: every site must enrol again"
    if not path.exists():
        if not key_path.exists():
            _remove(server)
        elif server.exists():
            raise ConfigError(f"{path} is missing: {restore}")
        # A key alone, without a certificate that it signed, is of a start that was killed here: nobody saw that CA.
        key = _make_key(key_path)
        _write(path, _pem(_ca_certificate(key)), 0o644)
    ca, key = _read_certificates(path, restore)[0], _own_key(key_path, restore)
    if key.public_key() != ca.public_key():
        raise ConfigError(f"{key_path} is not the key of {path}: {restore}")
    if not _is_ca(ca):
        raise ConfigError(f"{path} is not the certificate of a CA: {restore}")
    if ca.not_valid_after_utc - _now() < _SPARE:
        raise ConfigError(
            f"the CA {path} ends at {ca.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, in fewer than {_SPARE.days} days: "
            f"remove {path} and {key_path} for a new CA: every site must enrol again"
        )
    _check_in_force(path, ca)
    return ca, key


def _serves(path: Path, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, names: list[x509.GeneralName]) -> bool:
    """Whether a certificate file is there and will do for the time being."""
    if not path.exists():
        return False
    chain = _read_certificates(path, "remove it, and a new one is made")
    certificate, now = chain[0], _now()
    if chain[1:] != [ca] or not _issued(certificate, ca) or certificate.public_key() != key.public_key():
        return False
    if certificate.not_valid_before_utc > now or certificate.not_valid_after_utc - now < _SPARE:
        return False
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return set(names) <= set(found)


def _ca_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name, start = _name("Coterie CA"), _now() - _BACKDATED
    return (
        _builder(name, name, key, start, start + _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    start = max(_now() - _BACKDATED, ca.not_valid_before_utc)
    issuer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _builder(_name("Coterie server"), ca.subject, key, start, min(start + _SERVER_LIFE, ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        # By way of its bytes: a certificate has no place for a scope such as %eth0.
        return x509.IPAddress(ip_address(ip_address(host).packed))
    except ValueError:
        name = host.lower().removesuffix(".")
    if len(name) > 253 or not _DNS_NAME.fullmatch(name) or name.rpartition(".")[2].isdigit():
        raise ConfigError(
            f"{host!r} is no host name or IP address: write it without scheme, port or brackets, "
            f"a name with other letters in its xn-- form"
        )
    return x509.DNSName(name)


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound):
        return False


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _check_in_force(path: Path, certificate: x509.Certificate) -> None:
    start, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, _now()
    if end < now:
        raise ConfigError(f"the certificate {path} expired at {end:%Y-%m-%d %H:%M} UTC: replace it by a new one")
    if start > now:
        raise ConfigError(
            f"the certificate {path} is not valid before {start:%Y-%m-%d %H:%M} UTC: set this machine's clock right, "
            f"or wait"
        )


def _read_certificates(path: Path, remedy: str) -> list[x509.Certificate]:
    data = _read(path, remedy)
    try:
        certificates = x509.load_pem_x509_certificates(data)
        for certificate in certificates:
            certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is damaged or holds no certificate in PEM: {remedy}") from None
    return certificates


def _read_key(path: Path, remedy: str) -> PrivateKeyTypes:
    data = _read(path, remedy)
    try:
        return serialization.load_pem_private_key(data, None)
    except TypeError:
        raise ConfigError(f"{path} is locked with a passphrase: write the key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is damaged or holds no private key in PEM: {remedy}") from None


def _own_key(path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    key = _read_key(path, remedy)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds no EC key: {remedy}")
    return key


def _make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a file, which is made as needed."""
    if path.exists():
        return _own_key(path, "remove it, and a new one is made")
    key = ec.generate_private_key(ec.SECP256R1())
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(path, key.private_bytes(encoding, kind, serialization.NoEncryption()), 0o600)
    return key


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except PermissionError:
        raise ConfigError(f"may not read {path}: give this user the right to") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: {remedy}") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _now() -> datetime:
    return datetime.now(UTC)


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    """A private directory, held by this process alone."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & 0o777 != 0o700:
            directory.chmod(0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(
            f"cannot use the directory {directory} for certificates: {error.strerror}: mend its permissions, "
            f"or name another one"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all; `_locked` keeps others out, so a file left by a killed process may go."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        _sync(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None


def _sync(directory: Path) -> None:
    entry = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error.strerror}: free space or mend permissions, then start again")
