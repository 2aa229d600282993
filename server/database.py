"""What differs between the databases that hold the store: SQLite, a file under the home, and PostgreSQL, by its URL.

PostgreSQL 13 or newer, through psycopg 3 (extra ``postgres``). One server works with a database at a time.
"""

import importlib.util
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.event import listen
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from coterie.core.errors import ConfigError, RunError, StorageError

_MIGRATING, _SERVING = 7_365_001, 7_365_002
"""Advisory locks of PostgreSQL: any numbers that are always the same."""


class Database:
    """An engine, and what is done differently per kind. name: to show, without a password."""

    def __init__(self, where: Path | str) -> None:
        """where: the file of an SQLite database, or ``postgresql://USER:PASSWORD@HOST/NAME``. Raises ConfigError."""
        if isinstance(where, Path):
            self.name = str(where)
            self.engine = sa.create_engine(sa.URL.create("sqlite", database=self.name), connect_args={"timeout": 30})
            listen(self.engine, "connect", _configure)
        else:
            url = _postgres(where)
            self.name = url.render_as_string(hide_password=True)
            # A connection that was cut is replaced before it is used.
            self.engine = sa.create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
        self._is_postgres = self.engine.dialect.name == "postgresql"

    @property
    def remedy(self) -> str:
        """What helps when a write fails."""
        return "see to the database" if self._is_postgres else "free space or mend permissions"

    def may_return(self, error: BaseException | None) -> bool:
        """Whether it is a server that is away, which may be back soon."""
        return self._is_postgres and isinstance(error, OperationalError)

    def lock(self, connection: sa.Connection) -> None:
        """Wait until nobody else is in a transaction with this lock; to its end."""
        if self._is_postgres:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATING)))
        else:
            connection.execute(sa.text("BEGIN IMMEDIATE"))

    def flush(self, connection: sa.Connection) -> None:
        """Have this transaction on disk when it is committed, power cut or not; call it first in the transaction."""
        if not self._is_postgres:  # PostgreSQL does so always
            connection.execute(sa.text("PRAGMA synchronous=FULL"))

    @contextmanager
    def served(self) -> Generator[None]:
        """Be the one server of this database. Raises RunError when another one is. An SQLite file is guarded by the
        lock of its home."""
        if not self._is_postgres:
            yield
            return
        try:
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.detach()  # the lock ends with the connection: it must not go back to the pool
                if not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_SERVING))):
                    raise RunError(f"{self.name} is in use by another server: stop it, or name another --database")
                yield
        except DBAPIError as error:
            raise StorageError(f"cannot reach {self.name}: {error.orig}") from error


def _postgres(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
    except ArgumentError:
        raise ConfigError("--database: no such URL: write postgresql://USER:PASSWORD@HOST:PORT/NAME") from None
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise ConfigError(
            f"--database: {url.drivername} is not offered: write postgresql://USER:PASSWORD@HOST:PORT/NAME, "
            "or leave it out for SQLite under --home"
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ConfigError("--database: PostgreSQL needs one more package: pip install 'coterie[postgres]'")
    return url.set(drivername="postgresql+psycopg")


def _configure(connection: Any, _: Any) -> None:
    """Write-ahead mode: readers never wait, a commit needs no disk flush of its own and survives a killed process."""
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
