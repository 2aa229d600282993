"""Migrations: the data of the version before is kept on the way up and down; the tables are those of the schema."""

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from coterie.server import schema, store
from coterie.server.store import RunKind, Store


def migrate(path, how, target):
    config = Config()
    config.set_main_option("script_location", str(store.Path(store.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        how(config, target)
    return engine


def test_the_runs_of_the_version_before_are_kept_up_and_down(tmp_path):
    path = tmp_path / "coterie.db"
    engine = migrate(path, command.upgrade, "0001")
    with engine.begin() as connection:
        connection.execute(sa.text(
            "INSERT INTO runs (id, name, task, strategy, status, created, updated, rounds, rounds_done, config) "
            "VALUES ('old', 'first', 'mnist', 'fedavg', 'finished', 1.0, 2.0, 3, 3, 'rounds = 3')"
        ))  # fmt: skip
    opened = Store(path)
    (run,) = opened.runs()
    assert (run.id, run.name, run.kind) == ("old", "first", RunKind.SIMULATION)
    opened.close()
    engine = migrate(path, command.downgrade, "0001")
    assert sa.inspect(engine).get_table_names() == ["alembic_version", "events", "runs"]
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT id, name FROM runs")).all() == [("old", "first")]
    assert [run.id for run in Store(path).runs()] == ["old"]


def test_the_schema_is_what_the_migrations_make(tmp_path):
    migrated = migrate(tmp_path / "migrated.db", command.upgrade, "head")
    declared = sa.create_engine(f"sqlite:///{tmp_path / 'declared.db'}")
    schema.metadata.create_all(declared)
    for name in schema.metadata.tables:
        one, other = (
            {
                c["name"]: (str(c["type"]), c["nullable"], bool(c["primary_key"]))
                for c in sa.inspect(e).get_columns(name)
            }
            for e in (migrated, declared)
        )
        assert one == other, name
