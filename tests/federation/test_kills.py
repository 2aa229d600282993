"""kill -9 at seeded random moments, fifty of them: a run ends with the bits of the one that nobody disturbed.

But where a worker was killed while it trained: that is a named failure of its round. COTERIE_CHAOS_SEED gives other
moments.
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from coterie.server.store import Store

from ..commands import wait_for
from .test_federation import SETTINGS, join_all

SEED = int(os.environ.get("COTERIE_CHAOS_SEED", "20261205"))
RUNS, KILLS, ROUNDS = 5, 10, 200


def children(pid):
    """The processes that a daemon has started: its worker."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def rounds_done(fed):
    """Out of the store: the server may be down."""
    store = Store(fed.cli.home / "coterie.db")
    try:
        runs = store.runs()
        return runs[0].rounds_done if runs else 0
    finally:
        store.close()


@pytest.mark.chaos
@pytest.mark.parametrize("run", range(RUNS))
def test_killed_at_any_moment_the_run_ends_with_the_same_bits_and_counts_nobody_twice(fed, simulated, run):
    chance = random.Random(SEED + run)
    sites = join_all(fed, "--insecure")
    watching = fed.submit(rounds=ROUNDS, cohort__min_replies=1, **SETTINGS)
    wait_for(lambda: rounds_done(fed) >= 1, "a round", 120)
    killed = []
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.0, 0.6))  # the moment is the point here
        what = chance.choice(["server", "server", "worker", "node"])
        killed.append(what)
        if what == "server":
            fed.stop()
            fed.start("--insecure")
        elif what == "node":
            site = chance.choice(sites)
            site.stop()
            site.start()
        else:
            for pid in children(chance.choice(sites).process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        before = rounds_done(fed)
        wait_for(lambda before=before: rounds_done(fed) > before, f"a round after {killed} (seed {SEED})", 120)
    result = fed.result(watching)
    store = Store(fed.cli.home / "coterie.db")
    record = store.find("last")
    events = store.events(record.id)
    store.close()
    failures = [event for event in events if event.kind == "client.failed"]
    closed = {event.round: event.data for event in events if event.kind == "round.finished"}
    assert sorted(closed) == list(range(1, ROUNDS + 1))
    assert all(data["used"] <= 2 and data["examples"] <= 200 for data in closed.values()), "somebody counted twice"
    if failures:  # a worker that was killed at work is a named failure of its round, and the weights are others
        assert all("worker process ended" in event.data["reason"] for event in failures), (SEED, killed, failures)
        assert "worker" in killed
    else:
        assert result["model"]["sha256"] == simulated(ROUNDS, 2), (SEED, killed)
