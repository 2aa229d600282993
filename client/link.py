"""A node's end of the server's own HTTP interface: sessions, the wake-up, models down and updates up.

Requests fail with httpx's errors, and with RefusedError where the server says no.
"""

import base64
import contextlib
import hashlib
import importlib.metadata
import json
import os
import ssl
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.client.node_config import public_pem
from coterie.core import protocol
from coterie.core.errors import CoterieError
from coterie.core.protocol import HOLD_SECONDS

CHUNK = 1 << 20


class RefusedError(CoterieError):
    """The server answers and says no. status: as HTTP has it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Link:
    """Requests of one node. Call `open` first and after every 401."""

    def __init__(self, server: str, ca: Path | None, key: ec.EllipticCurvePrivateKey) -> None:
        """server: the URL. ca: the certificate authority to trust; None without TLS. Proxies of the environment are
        used."""
        verify = ssl.create_default_context(cafile=str(ca)) if ca else True
        timeout = httpx.Timeout(10.0, read=HOLD_SECONDS + 15.0, write=60.0)
        # Shorter than the server keeps a connection, so that a request never meets one that is being closed.
        limits = httpx.Limits(keepalive_expiry=60.0)
        self._client = httpx.Client(base_url=server, verify=verify, timeout=timeout, limits=limits)
        self._key = key
        self._instance = f"{os.getpid()}-{os.urandom(8).hex()}"

    def enrol(self, secret: str) -> str:
        """Trade a one-time token's secret for a place in the federation; the node's name."""
        body = {"secret": secret, "public_key": public_pem(self._key).decode()}
        return str(self._json(self._client.post("/api/v1/nodes/enrol", json=body))["name"])

    def open(self, offers: Mapping[str, int]) -> str:
        """A new session; the node's name."""
        body = json.dumps({
            "public_key": public_pem(self._key).decode(),
            "timestamp": time.time(),
            "instance": self._instance,
            "offers": dict(offers),
            "version": importlib.metadata.version("coterie"),
            "protocol": protocol.VERSION,
        }).encode()  # fmt: skip
        signature = base64.b64encode(self._key.sign(body, ec.ECDSA(hashes.SHA256()))).decode()
        headers = {"x-coterie-signature": signature, "content-type": "application/json"}
        answer = self._json(self._client.post("/api/v1/nodes/session", content=body, headers=headers))
        self._client.headers["authorization"] = f"Bearer {answer['token']}"
        return str(answer["name"])

    def leave(self) -> None:
        """Say goodbye, if the server is there to hear it."""
        with contextlib.suppress(httpx.HTTPError, RefusedError):
            self._client.post("/api/v1/nodes/leave", timeout=2.0)

    def wake(self, seen: int) -> int:
        """Wait until the server has called more than `seen` times, or for a while; how often it has by then."""
        return int(self._json(self._client.get("/api/v1/nodes/wake", params={"seen": seen}))["calls"])

    def download(self, digest: str, path: Path) -> None:
        """A model into a file: what is there already is gone on from, and the whole is checked by its hash."""
        part = path.with_name(f"{path.name}.part")
        have = part.stat().st_size if part.exists() else 0
        headers = {"range": f"bytes={have}-"} if have else {}
        with self._client.stream("GET", f"/api/v1/models/{digest}", headers=headers) as response:
            if response.status_code == 416:  # all of it is there
                response.read()
            else:
                if response.is_error:
                    response.read()
                _raise(response)
                with part.open("ab" if response.status_code == 206 else "wb") as file:
                    for chunk in response.iter_bytes(CHUNK):
                        file.write(chunk)
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            part.unlink()
            raise OSError(f"the model has sha256 {found}, announced was {digest}: downloading it again")
        part.replace(path)

    def upload(self, message_id: str, path: Path, start: int = 0) -> str:
        """An update out of a file, from byte `start` on; the hash of the whole as the server has it."""

        def chunks() -> Generator[bytes]:
            with path.open("rb") as file:
                file.seek(start)
                while chunk := file.read(CHUNK):
                    yield chunk

        url, headers = f"/api/v1/updates/{message_id}", {"content-length": str(path.stat().st_size - start)}
        answer = self._client.put(url, params={"start": start}, content=chunks(), headers=headers)
        return str(self._json(answer)["sha256"])

    def received(self, message_id: str) -> int:
        """How many bytes of a message's update the server has. Raises RefusedError (410) when nobody waits for it."""
        return int(self._json(self._client.get(f"/api/v1/answers/{message_id}"))["received"])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        _raise(response)
        return dict(response.json())


def _raise(response: httpx.Response) -> None:
    """RefusedError with the server's words for an answer that says no; httpx's error for a proxy's or a broken one."""
    if response.status_code in (502, 503, 504):
        response.raise_for_status()
    if response.is_error:
        try:
            text = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            text = f"the server answers {response.status_code}: {response.text[:200]}"
        raise RefusedError(response.status_code, text)
