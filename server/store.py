"""The run store: runs and their events in SQLite, one file under the home directory, or in PostgreSQL.

Many processes may use it at once. A commit survives the death of any process.
"""

import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError

from coterie.core.errors import RunNotFoundError, StorageError
from coterie.core.events import Event, EventKind
from coterie.core.importing import require_extra
from coterie.server import schema
from coterie.server.database import Database

NEWEST = "0002"
"""The migration that `schema` describes."""

PATIENCE = 60.0
"""Seconds to wait for a PostgreSQL that is away."""


class RunStatus(StrEnum):
    """Where a run stands. A run that is RUNNING while nobody holds its directory was killed, and can be resumed."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class RunKind(StrEnum):
    """Who carries a run out: this machine alone, a server with its nodes, or stock Flower."""

    SIMULATION = "simulation"
    FEDERATION = "federation"
    FLOWER = "flower"


_STATUS_AFTER: Mapping[EventKind, RunStatus] = {
    EventKind.RUN_STARTED: RunStatus.RUNNING,
    EventKind.RUN_RESUMED: RunStatus.RUNNING,
    EventKind.RUN_FINISHED: RunStatus.FINISHED,
    EventKind.RUN_FAILED: RunStatus.FAILED,
    EventKind.RUN_INTERRUPTED: RunStatus.INTERRUPTED,
}

_RESUME = "go on with `coterie runs resume`"
_NEWEST_FIRST = (schema.runs.c.created.desc(), schema.runs.c.id.desc())


@dataclass(frozen=True)
class RunRecord:
    """A row of the store. created, updated: seconds since the epoch; config: TOML; result: of a finished run."""

    id: str
    name: str
    task: str
    strategy: str
    status: RunStatus
    created: float
    updated: float
    rounds: int
    rounds_done: int
    config: str
    result: Mapping[str, Any] | None
    kind: RunKind


class Store:
    """Runs and events. Raises StorageError when the database does not take a write.

    A PostgreSQL that goes away is waited for: `append` tries for PATIENCE seconds before it gives up.
    """

    def __init__(self, where: Path | str) -> None:
        """Open the database (see `Database`), making or migrating its tables as needed."""
        if isinstance(where, Path):
            try:
                where.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot make the directory {where.parent}: {error.strerror}") from None
        self.database = Database(where)
        self._engine = self.database.engine
        try:
            self._migrate()
        except DatabaseError as error:
            raise StorageError(f"cannot open the run store {self.database.name}: {error.orig}") from error

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def connect(self, remedy: str = "try again") -> Generator[sa.Connection]:
        """A connection in a transaction: committed at the end, rolled back by an error.

        remedy: what to do once the disk takes writes again. Raises StorageError.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except DatabaseError as error:
            what = f"cannot write to the run store {self.database.name}: {error.orig}"
            raise StorageError(f"{what}: {self.database.remedy}, then {remedy}") from error

    def create_run(
        self,
        run_id: str,
        *,
        name: str,
        task: str,
        strategy: str,
        rounds: int,
        config: str,
        kind: RunKind = RunKind.SIMULATION,
        status: RunStatus = RunStatus.RUNNING,
    ) -> None:
        """Add a run that has not started yet."""
        now = time.time()
        row = {"id": run_id, "name": name, "task": task, "strategy": strategy, "rounds": rounds, "config": config}
        row |= {"kind": kind, "status": status, "created": now, "updated": now, "rounds_done": 0, "result": None}
        with self.connect(_RESUME) as connection:
            connection.execute(sa.insert(schema.runs).values(**row))

    def append(self, run_id: str, events: Sequence[Event]) -> None:
        """Add events in one transaction and bring the run's row up to date. Doing it again changes nothing."""
        if not events:
            return
        changes: dict[str, Any] = {"updated": events[-1].time}
        for event in events:
            if event.kind in _STATUS_AFTER:
                changes["status"] = _STATUS_AFTER[event.kind]
            if event.kind is EventKind.ROUND_FINISHED:
                changes["rounds_done"] = event.round
            if event.kind is EventKind.RUN_RESUMED:
                changes["rounds_done"] = event.data["from_round"]
            if event.kind is EventKind.RUN_FINISHED:
                changes["result"] = jsonable(event.data)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return self._append(run_id, events, changes)
            except StorageError as error:
                if not self.database.may_return(error.__cause__) or time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def _append(self, run_id: str, events: Sequence[Event], changes: Mapping[str, Any]) -> None:
        table = schema.events
        with self.connect(_RESUME) as connection:
            # Who was interrupted in the middle of this does it again: what is there already is left alone.
            last = connection.scalar(sa.select(sa.func.max(table.c.seq)).where(table.c.run_id == run_id)) or 0
            rows = [
                {"run_id": run_id, "seq": e.seq, "time": e.time, "kind": e.kind, "round": e.round}
                | {"data": jsonable(e.data)}
                for e in events
                if e.seq > last
            ]
            if rows:
                connection.execute(sa.insert(table), rows)
            connection.execute(sa.update(schema.runs).where(schema.runs.c.id == run_id).values(**changes))

    def runs(self) -> list[RunRecord]:
        """All runs, the newest first."""
        return [_record(row) for row in self._read(sa.select(schema.runs).order_by(*_NEWEST_FIRST))]

    def find(self, reference: str) -> RunRecord:
        """The run whose id starts with `reference` (or the newest one, for "last"). Raises RunNotFoundError."""
        runs = self.runs()
        if reference == "last" and runs:
            return runs[0]
        found = [run for run in runs if run.id.startswith(reference)]
        exact = [run for run in found if run.id == reference]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            raise RunNotFoundError(f"run {reference!r} is ambiguous: {', '.join(run.id for run in found)}")
        raise RunNotFoundError(
            f"there is no run {reference!r} in {self.database.name}: `coterie runs list` shows those there are"
        )

    def events(self, run_id: str, after: int = 0) -> list[Event]:
        """A run's events with seq > `after`, in order."""
        table = schema.events
        rows = self._read(sa.select(table).where(table.c.run_id == run_id, table.c.seq > after).order_by(table.c.seq))
        return [Event(row["seq"], row["time"], EventKind(row["kind"]), row["round"], row["data"]) for row in rows]

    def _read(self, query: sa.Select[Any]) -> Sequence[sa.RowMapping]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).mappings().all()
        except DatabaseError as error:
            raise StorageError(f"cannot read the run store {self.database.name}: {error.orig}") from error

    def _migrate(self) -> None:
        with self._engine.connect() as connection:
            if _version(connection) == NEWEST:
                return
        # Imported only where needed: it costs a third of a second.
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.set_main_option("path_separator", "os")
        with self._engine.begin() as connection:
            # Two processes that both find no tables: the second waits here and then finds them made.
            self.database.lock(connection)
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                what = f"the run store {self.database.name} is of a newer Coterie ({error})"
                raise StorageError(f"{what}: upgrade, or name another --home") from error


def open_store(home: Path, database: str | None = None) -> Store:
    """The store of a home: a PostgreSQL named by URL here or in $COTERIE_DATABASE, otherwise SQLite in the home.

    Whatever runs or shows runs begins here. Raises ConfigError when only a node's part of Coterie is installed.
    """
    require_extra("server")
    return Store(database or os.environ.get("COTERIE_DATABASE") or home / "coterie.db")


def effective(events: Sequence[Event]) -> list[Event]:
    """Events as they count: what a resume did again is kept once, in its last form."""
    kept: list[Event] = []
    for event in events:
        if event.kind is EventKind.RUN_RESUMED:
            kept = [e for e in kept if e.round <= event.data["from_round"]]
        kept.append(event)
    return kept


def jsonable(value: Any) -> Any:
    """A copy that every JSON reader takes: not-a-number and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _record(row: sa.RowMapping) -> RunRecord:
    values: dict[str, Any] = {str(key): value for key, value in row.items()}
    values |= {"status": RunStatus(values["status"]), "kind": RunKind(values["kind"])}
    return RunRecord(**values)


def _version(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
