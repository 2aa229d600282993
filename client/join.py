"""Enrol a site: a key made here, the server's CA pinned by the fingerprint that the token carries."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.client.link import Link
from coterie.client.node_config import NodeConfig, NodeDirectory, OwnTask
from coterie.core.errors import ConfigError, RunError


def join(url: str, token: str, path: Path, tasks: Mapping[str, Any]) -> str:
    """Enrol with a one-time token; the node's name. tasks: as in ``node.toml``.

    Raises ConfigError for what is no URL or token, RunError when the server is not the one that the token names, and
    RefusedError with the server's words.
    """
    parts = urlsplit(url)
    secret, dot, fingerprint = token.partition(".")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"URL = {url!r}: write it as https://HOST:PORT")
    if not (secret and dot and fingerprint):
        raise ConfigError("TOKEN: it has no '.': take the whole text that `coterie enroll new` printed")
    directory = NodeDirectory(path)
    if (path / "node.toml").exists():
        raise ConfigError(f"{path / 'node.toml'} exists already: choose another --directory")
    key = directory.key()
    if parts.scheme == "https":
        if fingerprint == "-":
            raise ConfigError(f"URL = {url!r}: the token is of a server without TLS: use its http:// URL")
        directory.ca.write_bytes(_pinned_ca(url, fingerprint))
    link = Link(url, directory.ca if parts.scheme == "https" else None, key)
    try:
        name = link.enrol(secret)
    finally:
        link.close()
    directory.write(NodeConfig(name=name, server=url, tasks={n: OwnTask.model_validate(t) for n, t in tasks.items()}))
    return name


def _pinned_ca(url: str, fingerprint: str) -> bytes:
    """The CA certificate (PEM) that a server shows, if it is the one with that fingerprint.

    Read without verifying anything: only the fingerprint, which came with the token, says whom to trust.
    """
    try:
        response = httpx.get(f"{url.rstrip('/')}/api/v1/ca", verify=False, timeout=10)  # noqa: S501
        shown = x509.load_pem_x509_certificate(response.content)
    except httpx.HTTPError as error:
        raise RunError(f"cannot reach {url}: {type(error).__name__}: {error}") from None
    except ValueError:
        raise RunError(f"{url} answers, but it is no Coterie server") from None
    if hashlib.sha256(shown.public_bytes(serialization.Encoding.DER)).hexdigest() != fingerprint:
        raise RunError(f"{url} does not show the CA that the token names: it is another server, or somebody in between")
    return shown.public_bytes(serialization.Encoding.PEM)
