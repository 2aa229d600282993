"""The run store: what is committed is there, whoever wrote it; the migrations make exactly the tables of the schema."""

import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from coterie.core.errors import ConfigError, RunError, RunNotFoundError, StorageError
from coterie.core.events import Event, EventKind
from coterie.server import schema
from coterie.server import store as store_module
from coterie.server.journal import Journal
from coterie.server.store import RunStatus, Store, effective


@pytest.fixture
def store(where):
    store = Store(where)
    yield store
    store.close()


def create(store, run_id="20260101-101010-aaaa", **more):
    store.create_run(run_id, name="n", task="mnist", strategy="fedavg", rounds=5, config="rounds = 5\n", **more)
    return run_id


def event(seq, kind=EventKind.ROUND_FINISHED, round=1, **data):
    return Event(seq, 1000.0 + seq, kind, round, data)


def test_the_migrations_make_the_tables_of_the_schema(store):
    with store.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []


def test_events_come_back_as_they_were_written(store):
    run = create(store)
    written = [event(1, EventKind.RUN_STARTED, 0, num_clients=3), event(2, metrics={"loss": 0.25}, empty="")]
    store.append(run, written)
    assert store.events(run) == written


def test_the_row_of_a_run_follows_its_events(store):
    run = create(store)
    assert store.find(run).status is RunStatus.RUNNING
    store.append(run, [event(1, round=1), event(2, round=2)])
    assert store.find(run).rounds_done == 2
    store.append(run, [event(3, EventKind.RUN_INTERRUPTED, 2)])
    assert store.find(run).status is RunStatus.INTERRUPTED
    store.append(run, [event(4, EventKind.RUN_RESUMED, 1, from_round=1)])
    assert (store.find(run).status, store.find(run).rounds_done) == (RunStatus.RUNNING, 1)
    store.append(run, [event(5, EventKind.RUN_FINISHED, 5, sha256="ab")])
    assert (store.find(run).status, store.find(run).result) == (RunStatus.FINISHED, {"sha256": "ab"})


def test_numbers_that_json_cannot_hold_become_null(store):
    run = create(store)
    store.append(run, [event(1, metrics={"auc": float("nan"), "loss": float("inf")})])
    assert store.events(run)[0].data == {"metrics": {"auc": None, "loss": None}}


def test_a_run_is_found_by_the_beginning_of_its_id_and_as_the_last(store):
    first, second = create(store), create(store, "20260102-101010-bbbb")
    assert store.find("20260101").id == first
    assert store.find("last").id == second
    with pytest.raises(RunNotFoundError, match="'2026' is ambiguous: 20260102-101010-bbbb, 20260101-101010-aaaa"):
        store.find("2026")
    with pytest.raises(RunNotFoundError, match=r"there is no run 'x' .*`coterie runs list` shows"):
        store.find("x")


def test_an_empty_store_has_no_last_run(store):
    with pytest.raises(RunNotFoundError, match="there is no run 'last'"):
        store.find("last")


def test_several_processes_may_open_a_new_store_and_write_at_once(where):
    script = """
import sys
from pathlib import Path
from coterie.core.events import Event, EventKind
from coterie.server.store import Store
where = sys.argv[1]
store = Store(where if where.startswith("postgresql:") else Path(where))
store.create_run(sys.argv[2], name="", task="", strategy="", rounds=1, config="")
for seq in range(1, 51):
    store.append(sys.argv[2], [Event(seq, 0.0, EventKind.ROUND_FINISHED, seq, {})])
"""
    started = [subprocess.Popen([sys.executable, "-c", script, str(where), f"run{i}"]) for i in range(4)]
    assert [process.wait(timeout=60) for process in started] == [0, 0, 0, 0]
    store = Store(where)
    assert sorted(run.id for run in store.runs()) == ["run0", "run1", "run2", "run3"]
    assert all(len(store.events(run.id)) == 50 for run in store.runs())


def test_a_file_that_is_no_store_is_named(tmp_path):
    (tmp_path / "coterie.db").write_bytes(b"this is not a database, it is a letter" * 100)
    with pytest.raises(StorageError, match=r"cannot open the run store .*coterie\.db: file is not a database"):
        Store(tmp_path / "coterie.db")


def test_a_home_that_is_a_file_is_named(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(StorageError, match=r"cannot make the directory .*home"):
        Store(tmp_path / "home" / "coterie.db")


def test_what_a_resume_did_again_counts_once():
    events = [
        event(1, EventKind.RUN_STARTED, 0),
        event(2, round=1),
        event(3, round=2),
        event(4, EventKind.RUN_RESUMED, 1, from_round=1),
        event(5, round=2),
    ]
    assert [e.seq for e in effective(events)] == [1, 2, 4, 5]


def test_a_store_of_a_newer_version_is_named(where):
    store = Store(where)
    with store.connect() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(StorageError, match=r"the run store .* is of a newer Coterie .*: upgrade"):
        Store(where)


def test_any_path_will_do_as_a_home(tmp_path):
    store = Store(tmp_path / "what? 100%#1" / "coterie.db")
    create(store)
    assert [path.name for path in tmp_path.iterdir()] == ["what? 100%#1"]


def test_what_could_not_be_stored_is_stored_with_the_next_commit(store):
    run = create(store)
    journal = Journal(store, run)
    journal.emit(EventKind.ROUND_STARTED, 1, cohort=["a"])
    with store.connect() as connection:
        connection.execute(sa.text("ALTER TABLE events RENAME TO elsewhere"))
    with pytest.raises(StorageError):
        journal.commit()
    with store.connect() as connection:
        connection.execute(sa.text("ALTER TABLE elsewhere RENAME TO events"))
    journal.emit(EventKind.ROUND_STARTED, 2, cohort=["b"])
    journal.commit()
    assert [event.round for event in store.events(run)] == [1, 2]


def test_a_commit_that_was_interrupted_after_it_was_stored_can_be_done_again(store):
    run = create(store)
    written = [event(1, EventKind.RUN_STARTED, 0), event(2)]
    store.append(run, written)
    store.append(run, [*written, event(3, EventKind.RUN_INTERRUPTED)])
    assert [one.seq for one in store.events(run)] == [1, 2, 3]
    assert store.find(run).status == "interrupted"


def test_any_number_of_events_at_once(store):
    run = create(store)
    store.append(run, [event(seq) for seq in range(1, 20_001)])
    assert len(store.events(run)) == 20_000


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://a:secret@h/db", "mysql is not offered: write postgresql://USER:PASSWORD@HOST:PORT/NAME"),
        ("postgresql+asyncpg://a:secret@h/db", "is not offered"),
        ("secret", "no such URL: write postgresql://"),
    ],
)
def test_a_database_that_is_none_of_the_two_is_refused_and_the_password_is_not_shown(url, said):
    with pytest.raises(ConfigError, match=said) as refused:
        Store(url)
    assert "secret" not in str(refused.value)


def test_a_postgresql_that_does_not_let_in_is_named_without_the_password(postgres):
    with pytest.raises(
        StorageError, match=r"cannot open the run store postgresql\+psycopg://coterie:\*\*\*@"
    ) as refused:
        Store(postgres.url().replace(postgres.password, "hunter2"))
    assert "hunter2" not in str(refused.value)


def test_a_postgresql_that_is_away_for_a_while_is_waited_for(postgres):
    store = Store(postgres.new())
    run = create(store)
    store.append(run, [event(1)])
    postgres.stop()
    appending = threading.Thread(target=store.append, args=(run, [event(1), event(2, round=2)]))
    appending.start()
    with pytest.raises(StorageError, match="cannot read the run store"):
        store.runs()
    postgres.start()
    appending.join(timeout=60)
    assert [event.seq for event in store.events(run)] == [1, 2]
    store.close()


def test_a_postgresql_that_stays_away_is_named_with_what_to_do(postgres, monkeypatch):
    monkeypatch.setattr(store_module, "PATIENCE", 1.0)
    store = Store(postgres.new())
    run = create(store)
    postgres.stop()
    try:
        with pytest.raises(StorageError, match="see to the database, then go on with"):
            store.append(run, [event(1)])
    finally:
        postgres.start()
    assert store.events(run) == []


def test_one_server_works_with_a_postgresql_at_a_time(postgres):
    url = postgres.new()
    first, second = Store(url), Store(url)
    refused = pytest.raises(RunError, match="is in use by another server")
    with first.database.served(), refused, second.database.served():
        pass
    with second.database.served():
        pass
