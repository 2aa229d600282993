"""Which nodes are here, and how they are woken.

A node opens a session with a signed request and then holds a request open that ends when there is work: an idle node
costs one request in half a minute, and a message is seen at once. Everything here is safe to call from any thread.
"""

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coterie.core.errors import RunError

AWAY_SECONDS = 20.0
"""A node that has not been heard for so long is not here: time for a cut, or a restart of either side."""


class NodeBusyError(RunError):
    """Another process is here with the same key."""


@dataclass
class Session:
    """One process of a node. offers: records that it holds, by task. calls: how often it was woken."""

    token: str
    name: str
    node_id: int
    instance: str
    offers: Mapping[str, int]
    tags: Sequence[str]
    version: str
    calls: int = 0
    waiting: int = 0
    heard: float = field(default_factory=time.monotonic)
    called: asyncio.Event = field(default_factory=asyncio.Event)

    def away(self) -> float:
        """Seconds since it was heard; 0 while it holds a request open."""
        return 0.0 if self.waiting > 0 else time.monotonic() - self.heard


class Roster:
    """The sessions, by node and by token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._began = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(
        self, name: str, node_id: int, instance: str, offers: Mapping[str, int], tags: Sequence[str], version: str
    ) -> Session:
        """A session for a process that has proved its key. instance: the same for every session of one process.

        Raises NodeBusyError while another process holds a session with a request open.
        """
        self._loop = asyncio.get_running_loop()
        with self._lock:
            old = self._sessions.get(name)
            if old and old.instance != instance and old.waiting > 0:
                raise NodeBusyError(f"node {name!r} is here already with another process: stop one of the two")
            session = Session(secrets.token_urlsafe(24), name, node_id, instance, dict(offers), tuple(tags), version)
            self._sessions[name] = session
            if old:
                old.called.set()
            return session

    def find(self, token: str) -> Session | None:
        """The session with that token."""
        with self._lock:
            for session in self._sessions.values():
                if hmac.compare_digest(session.token.encode(), token.encode()):
                    session.heard = time.monotonic()
                    return session
        return None

    def close(self, name: str) -> None:
        """Forget a node's session."""
        with self._lock:
            session = self._sessions.pop(name, None)
        if session:
            self._call(session)

    def close_all(self) -> None:
        """Forget every session, so that no request is held open any more."""
        with self._lock:
            names = list(self._sessions)
        for name in names:
            self.close(name)

    def here(self) -> list[Session]:
        """The nodes that are here, by name."""
        with self._lock:
            present = [session for session in self._sessions.values() if session.away() < AWAY_SECONDS]
        return sorted(present, key=lambda session: session.name)

    def get(self, name: str) -> Session | None:
        """A node's last session, wherever it is now."""
        with self._lock:
            return self._sessions.get(name)

    def is_gone(self, name: str) -> bool:
        """Whether a node has been away too long; one that has not been seen yet has time since the server began."""
        session = self.get(name)
        away = session.away() if session else time.monotonic() - self._began
        return away >= AWAY_SECONDS

    def wake(self, name: str) -> None:
        """Tell a node that there is something for it."""
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                return
            session.calls += 1
        self._call(session)

    def _call(self, session: Session) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(session.called.set)

    async def wait(self, session: Session, seen: int, seconds: float) -> int:
        """Until the node has been woken more than `seen` times, or for so many seconds; how often it was by then."""
        session.waiting += 1
        try:
            end = time.monotonic() + seconds
            while session.calls <= seen and self._is_open(session) and (left := end - time.monotonic()) > 0:
                session.called.clear()
                try:
                    await asyncio.wait_for(session.called.wait(), left)
                except TimeoutError:
                    break
        finally:
            session.waiting -= 1
            session.heard = time.monotonic()
        return session.calls

    def _is_open(self, session: Session) -> bool:
        with self._lock:
            return self._sessions.get(session.name) is session
