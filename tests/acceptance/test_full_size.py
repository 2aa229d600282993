"""Runs at full size on real data: what the README promises."""

import json
import re
import signal
from pathlib import Path

import pytest

from coterie.server.store import Store

from ..commands import wait_for

pytestmark = pytest.mark.slow

SIZE = ["--task", "mnist", "--clients", 200, "--cohort", 20, "--rounds", 60]
OPTIONS = ["simulate", *SIZE, "--strategy", "fedavg", "--seed", 7, "--json", "--quiet"]
RESUME = ["runs", "resume", "last", "--json", "--quiet"]


def result(done):
    return json.loads(done.stdout.splitlines()[-1])


def test_200_clients_reach_94_percent_with_the_same_bits_for_any_workers_and_after_a_kill(cli):
    one = result(cli(*OPTIONS, "--workers", 1))
    assert one["metrics"]["accuracy"] >= 0.94
    assert result(cli(*OPTIONS, "--workers", 2))["model"]["sha256"] == one["model"]["sha256"]
    process = cli.start(*OPTIONS, "--workers", 2)
    store = Store(cli.home / "coterie.db")
    wait_for(lambda: store.runs()[0].status == "running" and store.runs()[0].rounds_done >= 25, "25 rounds")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert result(cli(*RESUME))["model"]["sha256"] == one["model"]["sha256"]


def test_the_demo_shows_a_mean_that_falls_and_a_trimmed_mean_that_stands(cli):
    said = cli("demo").stdout
    runs = {run.name: run.result["metrics"]["accuracy"] for run in Store(cli.home / "coterie.db").runs()}
    clean = runs["trimmed mean, no attackers"]
    assert clean > 0.85
    assert runs["trimmed mean, 20 attackers"] > clean - 0.05
    assert runs["FedAvg, 20 attackers"] < 0.3
    page = Path(re.search(r"report: (\S+)", said).group(1)).read_text()
    assert "FedAvg, 20 attackers" in page
    assert "coterie runs compare" in said
