"""Worker processes that are killed, stopped, or never get ready: no client is lost by it, and no bit changes."""

import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from coterie.core.errors import RunError
from coterie.core.events import EventKind
from coterie.core.run_config import RunConfig
from coterie.simulations import process_channel, simulate

from ..commands import wait_for


def workers():
    """Pids of this process's worker processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"worker_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return sorted(found)


def at(kind, round, do):
    """A listener that acts once, in the middle of a run."""

    def listener(event):
        if event.kind is kind and event.round == round:
            do()

    return listener


@pytest.fixture
def sha(home, tiny_task):
    """The weights of a run in which something happens, and the clients that failed."""

    def start(*listeners):
        task = {"name": tiny_task, "model": "batch_norm"}
        settings = {"task": task, "rounds": 3, "simulation.workers": 2, "evaluation.clients_every": 1}
        failed = []

        def note(event):
            if event.kind is EventKind.CLIENT_FAILED or event.data.get("failed"):
                failed.append(event)

        result = simulate(RunConfig.load(overrides=settings), home, [note, *listeners])
        assert not failed
        return result.outcome.model.sha256()

    return start


@pytest.mark.parametrize("kind", [EventKind.ROUND_STARTED, EventKind.ROUND_FINISHED, EventKind.EVALUATED])
def test_killed_workers_cost_no_client_and_change_no_bit(sha, kind):
    def kill():
        for pid in workers():
            os.kill(pid, signal.SIGKILL)

    assert sha(at(kind, 2, kill)) == sha()


def test_a_worker_that_is_killed_before_it_is_ready_is_replaced_again(sha):
    killed = []

    def kill_the_next_two():
        known = set(workers())
        for _ in range(2):
            fresh = wait_for(lambda: set(workers()) - known, "a fresh worker").pop()
            known.add(fresh)
            os.kill(fresh, signal.SIGKILL)
            killed.append(fresh)

    def kill():
        thread = threading.Thread(target=kill_the_next_two)
        thread.start()
        os.kill(workers()[0], signal.SIGKILL)

    assert sha(at(EventKind.ROUND_STARTED, 2, kill)) == sha()
    assert len(killed) == 2


def test_a_worker_that_something_stopped_is_named(sha, monkeypatch, caplog):
    monkeypatch.setattr(process_channel, "SILENT_SECONDS", 0.05)
    caplog.set_level(logging.WARNING)
    stopped = []

    def stop():
        stopped.append(workers()[0])
        os.kill(stopped[0], signal.SIGSTOP)
        threading.Thread(target=go_on).start()

    def go_on():
        wait_for(lambda: caplog.records, "a warning")
        os.kill(stopped[0], signal.SIGCONT)

    assert sha(at(EventKind.ROUND_STARTED, 2, stop)) == sha()
    assert [record.getMessage() for record in caplog.records] == [
        f"worker process {stopped[0]} is stopped: `kill -CONT {stopped[0]}` lets it go on"
    ]


def test_a_worker_that_cannot_start_is_told_with_its_last_words(sha, monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "cloudpickle.py").write_text("raise ImportError('built for another machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.setattr(process_channel, "MAX_DEAD_STARTS", 0)
    (tmp_path / "broken" / "torch.py").write_text("raise SystemExit('no such instruction set')")
    with pytest.raises(RunError, match=r"ended .*: exit status 1, 'no such instruction set' \(see .*workers\.log\)"):
        sha()


def test_files_in_the_working_directory_stand_in_for_no_module_of_pythons_own(sha, tmp_path):
    for name in ("random.py", "socket.py", "coterie.py"):
        (tmp_path / "work" / name).write_text("raise RuntimeError('shadowed')")
    assert sha()
