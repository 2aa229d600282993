"""Checkpoints: complete at every moment, whatever happens while one is written; one process per run directory."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from coterie.core.errors import RunError, RunInUseError, StorageError
from coterie.core.model_state import ModelState
from coterie.server.checkpoint import Checkpoint, CheckpointWriter, write_safely
from coterie.server.run_directory import RunDirectory, is_in_use


def checkpoint(round=3, size=4):
    torch.manual_seed(round)
    model = ModelState.from_module(nn.Sequential(nn.Linear(size, 2), nn.BatchNorm1d(2)))
    return Checkpoint(round, model, {"momentum": torch.randn(size)}, clock=1.25, empty_rounds=1)


def test_a_checkpoint_comes_back_whole(tmp_path):
    writer = CheckpointWriter(tmp_path / "c")
    writer.put(checkpoint())
    writer.close()
    back, before = Checkpoint.load(tmp_path / "c"), checkpoint()
    assert (back.round, back.clock, back.empty_rounds) == (3, 1.25, 1)
    assert back.model.sha256() == before.model.sha256()
    assert torch.equal(back.optimizer["momentum"], before.optimizer["momentum"])


def test_before_the_first_there_is_none(tmp_path):
    assert Checkpoint.load(tmp_path / "c") is None


def test_closing_waits_for_the_newest(tmp_path):
    writer = CheckpointWriter(tmp_path / "c")
    for round in range(1, 30):
        writer.put(checkpoint(round))
    writer.close()
    assert Checkpoint.load(tmp_path / "c").round == 29


def test_a_failed_write_keeps_the_old_one_and_is_raised(tmp_path):
    path = tmp_path / "c"
    write_safely(path, checkpoint(1).save)
    (tmp_path / "c.part").mkdir()
    writer = CheckpointWriter(path)
    writer.put(checkpoint(2))
    with pytest.raises(StorageError, match=r"cannot write .*c: Is a directory: free space or mend permissions"):
        writer.close()
    assert Checkpoint.load(path).round == 1


def test_a_damaged_checkpoint_is_refused(tmp_path):
    checkpoint().save(tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(data[: len(data) // 2])
    with pytest.raises(RunError, match=r"the checkpoint .*c is damaged: not a model state"):
        Checkpoint.load(tmp_path / "c")
    (tmp_path / "c").write_bytes(data.replace(b"empty_rounds", b"empty_round5"))
    with pytest.raises(RunError, match="is damaged: 'empty_rounds'"):
        Checkpoint.load(tmp_path / "c")


WRITER = """
import sys, itertools
from pathlib import Path
from coterie.server.checkpoint import write_safely
for i in itertools.count():
    write_safely(Path(sys.argv[1]), lambda part: part.write_bytes((b"%08d" % i) * 50_000))
"""


def test_killed_at_any_moment_there_is_a_complete_file(tmp_path):
    path = tmp_path / "c"
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        before = path.read_bytes()[:8] if path.exists() else None
        while not path.exists() or path.read_bytes()[:8] in (before, b"%08d" % 0):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        data = path.read_bytes()
        assert data == data[:8] * 50_000


def test_one_process_holds_a_run_directory(tmp_path):
    held = RunDirectory(tmp_path / "run")
    assert is_in_use(tmp_path / "run")
    with pytest.raises(RunInUseError, match=f"is in use by process {os.getpid()}: wait for it or stop it"):
        RunDirectory(tmp_path / "run")
    held.close()
    assert not is_in_use(tmp_path / "run")
    RunDirectory(tmp_path / "run").close()


def test_a_directory_that_was_never_made_is_not_in_use(tmp_path):
    assert not is_in_use(tmp_path / "absent")
