"""Migrations: a store of an older version is brought up with all it holds, and back down."""

import json
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


def engine_of(where):
    return sa.create_engine(f"sqlite:///{where}" if isinstance(where, Path) else where.replace(":", "+psycopg:", 1))


def migrate(config, where, direction, revision):
    engine = engine_of(where)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        direction(config, revision)
    engine.dispose()


def tables(where):
    engine = engine_of(where)
    names = set(sa.inspect(engine).get_table_names())
    engine.dispose()
    return names


def rows(where, table):
    engine = engine_of(where)
    with engine.connect() as connection:
        # JSON comes as text from SQLite and decoded from PostgreSQL.
        found = [
            tuple(json.dumps(value) if isinstance(value, dict) else value for value in row)
            for row in connection.execute(sa.text(f"SELECT * FROM {table}"))
        ]
    engine.dispose()
    return found


@pytest.fixture
def old(where, config):
    """A database of revision 0001 with a run and an event."""
    migrate(config, where, command.upgrade, "0001")
    engine = engine_of(where)
    with engine.begin() as connection:
        for table, row in (("runs", RUN), ("events", EVENT)):
            names = [column.name for column in getattr(schema, table).columns][: len(row)]
            values = ", ".join(f":{name}" for name in names)
            connection.execute(sa.text(f"INSERT INTO {table} VALUES ({values})"), dict(zip(names, row, strict=True)))
    engine.dispose()
    return where


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
    assert rows(old, "runs") == [RUN]
    assert rows(old, "events") == [EVENT]
    assert rows(old, "alembic_version") == [("0001",)]
    store = Store(old)
    assert Enrolment(store, "-").nodes() == []
    store.close()


def test_every_migration_can_be_undone(where, config):
    Store(where).close()
    migrate(config, where, command.downgrade, "base")
    assert tables(where) == {"alembic_version"}


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
