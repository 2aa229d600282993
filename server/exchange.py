"""Files that travel beside messages: the global model to the nodes, updates back. Nothing here outlives the server."""

import hashlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import CoterieError


class ExchangeError(CoterieError):
    """A file that nobody asked for, or that is not what it should be. status: as HTTP has it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class _Expected:
    name: str
    num_bytes: int
    answered: Callable[[str], None]


class Exchange:
    """A directory of models (by hash) and updates (by message)."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._models, self._updates = directory / "models", directory / "updates"
        for folder in (self._models, self._updates):
            folder.mkdir(parents=True, mode=0o700)
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}
        self._received: dict[str, str] = {}

    def publish(self, data: bytes) -> str:
        """Offer a model; its hash."""
        digest = hashlib.sha256(data).hexdigest()
        part = self._models / f"{digest}.part"
        part.write_bytes(data)
        part.replace(self._models / digest)
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

    def expect(self, message_id: str, name: str, num_bytes: int, answered: Callable[[str], None]) -> None:
        """Take a node's answer to a message. answered: called with the message's id when it has come."""
        with self._lock:
            self._expected[message_id] = _Expected(name, num_bytes, answered)

    def drop(self, message_id: str) -> None:
        """Take no answer any more."""
        with self._lock:
            self._expected.pop(message_id, None)
            self._received.pop(message_id, None)
        (self._updates / message_id).unlink(missing_ok=True)

    async def receive(self, message_id: str, name: str, chunks: AsyncIterator[bytes]) -> str:
        """Write an update to disk; its hash. Raises ExchangeError for one that nobody waits for or of a wrong size."""
        expected = self._asked(message_id, name)
        path, part = self._updates / message_id, self._updates / f"{message_id}.{os.urandom(4).hex()}"
        digest, count = hashlib.sha256(), 0
        try:
            with part.open("wb") as file:
                async for chunk in chunks:
                    count += len(chunk)
                    if count > expected.num_bytes:
                        break
                    digest.update(chunk)
                    file.write(chunk)
            if count != expected.num_bytes:
                raise ExchangeError(400, f"the update has {count} bytes, the model asks for {expected.num_bytes}")
            self._asked(message_id, name)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        with self._lock:
            self._received[message_id] = digest.hexdigest()
        return digest.hexdigest()

    def check_awaited(self, message_id: str, name: str) -> None:
        """Raise ExchangeError when nobody waits for a node's answer to a message."""
        self._asked(message_id, name)

    def answered(self, message_id: str) -> None:
        """A reply to a message has come, which somebody may wait for."""
        with self._lock:
            expected = self._expected.get(message_id)
        if expected:
            expected.answered(message_id)

    def update(self, message_id: str, digest: str) -> Path:
        """Where the update of an answer lies. Raises ExchangeError when it has another hash, or never came."""
        with self._lock:
            received = self._received.get(message_id)
        if received != digest:
            raise ExchangeError(400, f"the update has sha256 {received}, the node says {digest[:64]}")
        return self._updates / message_id

    def _asked(self, message_id: str, name: str) -> _Expected:
        with self._lock:
            expected = self._expected.get(message_id)
        if expected is None or expected.name != name:
            raise ExchangeError(410, "nobody waits for this answer: its round is over")
        return expected
