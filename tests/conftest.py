"""What several packages' tests need: a small task of a user's own, and simulations of it."""

import sys
from pathlib import Path

import pytest

from .commands import Cli
from .postgres import start as start_postgres

TINY_TASK = '''
"""A small problem with every way to go wrong that a client may have."""

import os
import signal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from coterie.tasks import Records, Task
from coterie.tasks.metrics import accuracy


def records(n, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator)
    targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
    return inputs, targets


def logistic():
    return nn.Linear(4, 2)


def wide():
    """250,000 parameters, a checkpoint of 1 MB."""
    return nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 125_000))


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


class Marked(nn.Module):
    """Acts up when it sees a record that carries a mark in its first column, in training only."""

    def __init__(self, action):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.action = action

    def forward(self, x):
        if self.training and (x[:, 0] > 90).any():
            self.action()
        return self.layer(x)


def complain():
    raise ValueError("the scanner was off that day")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def make(model="logistic", n=200, sites=10, marked=0, action="complain"):
    """Records of `sites` clients; the first `marked` of them hold a record with a mark."""
    inputs, targets = records(n, 1)
    keys = np.array([f"site{i % sites}" for i in range(n)])
    for site in range(marked):
        inputs[site, 0] = 99.0
    action = complain if action == "complain" else die
    factories = {"logistic": logistic, "batch_norm": with_batch_norm, "wide": wide, "marked": lambda: Marked(action)}
    test = records(100, 2)
    return Task("tiny", factories[model], Records(inputs, targets, keys), Records(*test), F.cross_entropy,
                {"accuracy": accuracy}, num_classes=2)


def fails():
    raise RuntimeError("the archive is locked")


def forgets():
    return {"model": logistic}
'''


@pytest.fixture
def tiny_task(tmp_path, monkeypatch) -> str:
    """A module `tiny_task` in the working directory, as a user would have it; the value is its name for `task.name`."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "tiny_task.py").write_text(TINY_TASK)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "tiny_task", raising=False)
    return "tiny_task:make"


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def cli(home) -> Cli:
    return Cli(home)


@pytest.fixture(scope="session")
def postgres():
    server = start_postgres()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, tmp_path) -> Path | str:
    """What `Store` opens: a new database of each kind."""
    return tmp_path / "coterie.db" if request.param == "sqlite" else request.getfixturevalue("postgres").new()
