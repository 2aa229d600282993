"""Migrations: a store of an older version is brought up with all it holds, and back down."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import coterie.server.migrations
from coterie.server import schema
from coterie.server.enrolment import Enrolment
from coterie.server.store import NEWEST, RunKind, Store

RUN = ("r1", "n", "mnist", "fedavg", "finished", 1.0, 2.0, 5, 5, "rounds = 5\n", '{"sha256": "ab"}')
EVENT = ("r1", 1, 1.5, "round.finished", 1, '{"metrics": {"loss": 0.25}}')


@pytest.fixture
def config():
    config = Config()
    config.set_main_option("script_location", str(Path(coterie.server.migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    return config


def migrate(config, path, direction, revision):
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        direction(config, revision)
    engine.dispose()


def tables(path):
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return {name for (name,) in names}


@pytest.fixture
def old(tmp_path, config):
    """A database of revision 0001 with a run and an event."""
    path = tmp_path / "coterie.db"
    migrate(config, path, command.upgrade, "0001")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(RUN))})", RUN)
        connection.execute(f"INSERT INTO events VALUES ({', '.join('?' * len(EVENT))})", EVENT)
    return path


def test_the_store_knows_the_newest_migration(config):
    assert ScriptDirectory.from_config(config).get_current_head() == NEWEST


def test_opening_an_old_store_keeps_its_runs_and_adds_the_nodes(old):
    assert tables(old) == {"alembic_version", "runs", "events"}
    store = Store(old)
    (run,), (event,) = store.runs(), store.events("r1")
    assert (run.id, run.rounds_done, run.result, event.data) == ("r1", 5, {"sha256": "ab"}, {"metrics": {"loss": 0.25}})
    assert run.kind is RunKind.SIMULATION
    assert Enrolment(store, "-").nodes() == []
    with store.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    store.close()


def test_a_store_goes_down_again_with_its_runs(old, config):
    store = Store(old)
    Enrolment(store, "-").new("north")
    store.close()
    migrate(config, old, command.downgrade, "0001")
    assert tables(old) == {"alembic_version", "runs", "events"}
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("SELECT * FROM runs").fetchall() == [RUN]
        assert connection.execute("SELECT * FROM events").fetchall() == [EVENT]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001",)]
    store = Store(old)
    assert Enrolment(store, "-").nodes() == []
    store.close()


def test_every_migration_can_be_undone(tmp_path, config):
    path = tmp_path / "coterie.db"
    Store(path).close()
    migrate(config, path, command.downgrade, "base")
    assert tables(path) == {"alembic_version"}


def test_the_schema_is_what_the_migrations_make(tmp_path):
    Store(tmp_path / "migrated.db").close()
    migrated, declared = (sa.create_engine(f"sqlite:///{tmp_path / name}.db") for name in ("migrated", "declared"))
    schema.metadata.create_all(declared)
    for name in schema.metadata.tables:
        one, other = (
            {c["name"]: (str(c["type"]), c["nullable"], bool(c["primary_key"])) for c in columns}
            for columns in (sa.inspect(engine).get_columns(name) for engine in (migrated, declared))
        )
        assert one == other, name
    migrated.dispose()
    declared.dispose()
