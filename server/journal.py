"""The one stream of a run's events: numbered, given to the listeners at once, stored in one transaction per round."""

import time
from collections.abc import Sequence
from typing import Any

from coterie.core.events import Event, EventKind, Listener
from coterie.server.store import Store

COMMIT_SECONDS = 1.0
"""A long round's events reach the store at least this often."""


class Journal:
    """Writes one run's events.

    last_seq: number of the last event that the store already has. last_round: the round of the last event.
    """

    def __init__(self, store: Store, run_id: str, listeners: Sequence[Listener] = (), last_seq: int = 0) -> None:
        self._store = store
        self._run_id = run_id
        self._listeners = listeners
        self._seq = last_seq
        self.last_round = 0
        self._pending: list[Event] = []
        self._committed = time.monotonic()

    def emit(self, kind: EventKind, round: int, /, **data: Any) -> None:
        """Add an event."""
        self._seq += 1
        self.last_round = round
        event = Event(self._seq, time.time(), kind, round, data)
        self._pending.append(event)
        for listener in self._listeners:
            listener(event)
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Make everything so far safe against the death of this process. Raises StorageError."""
        self._committed = time.monotonic()
        self._store.append(self._run_id, self._pending)
        self._pending = []
