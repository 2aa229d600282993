"""Everything that happens in a run, append-only, numbered. The store, the progress bar and the report read this one
stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """What happened. `data` holds, by kind, the keys named here."""

    # num_clients, num_parameters, rounds, partition (sizes, labels, counts), attackers (ids), records (their hashes)
    RUN_STARTED = "run.started"
    RUN_WAITING = "run.waiting"  # reason: what a run on real nodes waits for
    RUN_RESUMED = "run.resumed"  # from_round
    ROUND_STARTED = "round.started"  # cohort: list of client ids
    CLIENT_FAILED = "client.failed"  # client_id, kind, reason
    UPDATE_REFUSED = "update.refused"  # client_id, kind, reason
    # used, examples, failed, refused, surplus (ids of clients asked in case others fail), empty (why the model was
    # kept, or ""), metrics, clock (virtual), seconds by phase
    ROUND_FINISHED = "round.finished"
    EVALUATED = "evaluated"  # metrics on the held-out global set, seconds
    # metrics (weighted mean), per_client: {id: metrics}, failed: {id: reason}, on: which records, seconds
    CLIENTS_EVALUATED = "clients.evaluated"
    RUN_FINISHED = "run.finished"  # metrics, sha256, rounds, clock, seconds
    RUN_FAILED = "run.failed"  # reason
    RUN_INTERRUPTED = "run.interrupted"  # nothing: `round` is the last one begun


@dataclass(frozen=True)
class Event:
    """One event. seq: 1, 2, 3 ... within the run; time: seconds since the epoch; round: 0 before the first."""

    seq: int
    time: float
    kind: EventKind
    round: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


Listener = Callable[[Event], None]
