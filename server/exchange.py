"""Files that travel beside messages: the global model to the nodes, updates back. Nothing here outlives the server.

Both can be taken up again where they were cut: a download by its range, an upload by the bytes that are here.
"""

import asyncio
import hashlib
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coterie.core.errors import CoterieError

MOST_CLOSED = 10_000
"""So many messages are remembered that nobody waits for any more."""

BLOCK = 4 << 20
"""Bytes that are hashed and written at once, beside the event loop."""


class ExchangeError(CoterieError):
    """A file that nobody asked for, or that is not what it should be. status: as HTTP has it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class _Expected:
    """An update that is awaited. upload: names the newest request that brings it. digest: once it is whole."""

    name: str
    num_bytes: int
    path: Path
    answered: Callable[[str], None]
    upload: str = ""
    digest: str = ""


class Exchange:
    """A directory of models (by hash) and updates (by message)."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._models, self._updates = directory / "models", directory / "updates"
        for folder in (self._models, self._updates):
            folder.mkdir(parents=True, mode=0o700)
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}
        self._closed: OrderedDict[str, tuple[str, Callable[[], None]]] = OrderedDict()

    def publish(self, write: Callable[[Path], object]) -> str:
        """Offer the model that `write` writes into a file; its hash."""
        part = self._models / f"{secrets.token_hex(8)}.part"
        try:
            write(part)
            with part.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            part.replace(self._models / digest)
        finally:
            part.unlink(missing_ok=True)
        return digest

    def withdraw(self, digest: str) -> None:
        """Offer it no longer; who is reading it reads on."""
        (self._models / digest).unlink(missing_ok=True)

    def model(self, digest: str) -> Path:
        """Where a model lies. Raises ExchangeError when it is not offered."""
        path = self._models / digest
        if not (len(digest) == 64 and digest.isalnum() and path.exists()):
            raise ExchangeError(410, "that model is not offered any more: its round is over")
        return path

    def expect(
        self, message_id: str, name: str, num_bytes: int, answered: Callable[[str], None], instead_of: str = ""
    ) -> None:
        """Take a node's answer to a message. answered: called with the message's id when it has come.

        instead_of: an earlier message that asked the same; what has come of its update is kept.
        """
        with self._lock:
            earlier = self._expected.pop(instead_of, None)
            path = earlier.path if earlier else self._updates / secrets.token_hex(16)
            self._expected[message_id] = _Expected(name, num_bytes, path, answered)

    def drop(self, message_id: str, late: Callable[[], None] | None = None) -> None:
        """Take no answer any more. late: called when one comes nevertheless, once."""
        with self._lock:
            expected = self._expected.pop(message_id, None)
            if expected and late:
                self._closed[message_id] = expected.name, late
                if len(self._closed) > MOST_CLOSED:
                    self._closed.popitem(last=False)
        if expected:
            expected.path.unlink(missing_ok=True)

    def received(self, message_id: str, name: str) -> int:
        """How many bytes of an update are here. Raises ExchangeError when nobody waits for a node's answer to it."""
        path = self._asked(message_id, name).path
        return path.stat().st_size if path.exists() else 0

    async def receive(self, message_id: str, name: str, chunks: AsyncIterator[bytes], start: int = 0) -> str:
        """Write an update to disk, from byte `start` on; its hash.

        Raises ExchangeError for one that nobody waits for, of a wrong size, or that another request brings anew.
        """
        expected, upload = self._asked(message_id, name), secrets.token_hex(8)
        expected.upload, expected.digest = upload, ""
        digest, count, block = hashlib.sha256(), start, bytearray()

        def put(data: bytes) -> None:
            with self._lock:
                if expected.upload != upload:
                    raise ExchangeError(409, "another request brings this update")
            digest.update(data)
            file.write(data)
            file.flush()

        with await asyncio.to_thread(_opened, expected.path, start, digest) as file:
            async for chunk in chunks:
                count += len(chunk)
                if count > expected.num_bytes:
                    break
                block += chunk
                if len(block) >= BLOCK:
                    await asyncio.to_thread(put, bytes(block))
                    block.clear()
            await asyncio.to_thread(put, bytes(block))
        if count != expected.num_bytes:
            await asyncio.to_thread(expected.path.unlink, missing_ok=True)
            raise ExchangeError(400, f"the update has {count} bytes, the model asks for {expected.num_bytes}")
        self._asked(message_id, name)
        expected.digest = digest.hexdigest()
        return expected.digest

    def answered(self, message_id: str) -> None:
        """A reply to a message has come, which somebody may wait for."""
        with self._lock:
            expected = self._expected.get(message_id)
        if expected:
            expected.answered(message_id)

    def update(self, message_id: str, digest: str) -> Path:
        """Where the update of an answer lies. Raises ExchangeError when it has another hash, or never came."""
        with self._lock:
            expected = self._expected.get(message_id)
        if expected is None or not expected.digest:
            raise ExchangeError(400, "the update did not come")
        if expected.digest != digest:
            raise ExchangeError(400, f"the update has sha256 {expected.digest}, the node says {digest[:64]}")
        return expected.path

    def _asked(self, message_id: str, name: str) -> _Expected:
        with self._lock:
            expected = self._expected.get(message_id)
            owner, late = self._closed.get(message_id, ("", None))
            if late and owner == name:
                del self._closed[message_id]
        if late and owner == name:
            late()
        if expected is None or expected.name != name:
            raise ExchangeError(410, "nobody waits for this answer: its round is over")
        return expected


def _opened(path: Path, start: int, digest: Any) -> IO[bytes]:
    """The file, to be written from byte `start` on, after hashing what lies before. Raises ExchangeError."""
    file = path.open("r+b" if path.exists() else "w+b")
    left = start
    while left > 0 and (data := file.read(min(left, BLOCK))):
        digest.update(data)
        left -= len(data)
    if left:
        file.close()
        raise ExchangeError(409, f"byte {start} cannot be next: {start - left} bytes of this update are here")
    file.truncate(start)
    return file
