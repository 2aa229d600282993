"""What an operator steers: who is asked, which run goes first, which one ends; and what is shown of failures."""

import signal

import pytest

from coterie.server.store import Store

from ..commands import wait_for
from .test_federation import TASK


def events(fed, run="last"):
    store = Store(fed.cli.home / "coterie.db")
    found = store.events(store.find(run).id)
    store.close()
    return found


def shown(fed, run):
    return next(one for one in fed.status()["runs"] if one["run"] == run)


def test_a_run_with_a_tag_asks_only_the_nodes_that_have_it(fed):
    fed.start("--insecure")
    fed.site("site0", TASK.format("site0"), tags=["eu", "gpu"])
    fed.site("site1", TASK.format("site1"))
    wait_for(lambda: sum(node["here"] for node in fed.status()["nodes"]) == 2, "both", 60)
    fed.run(rounds=1, task__sites=2, federation__tags='["eu"]')
    started = next(event for event in events(fed) if event.kind == "run.started")
    assert started.data["clients"] == {"site0": 100}
    refused = fed.submit(rounds=1, task__sites=2, federation__tags='["eu", "us"]', federation__wait=1)
    _, err = refused.communicate(timeout=60)
    assert "0 of 1 nodes with records for task 'tiny_task:make' and tags eu, us are here" in err


def test_the_queued_run_of_the_highest_priority_goes_first_and_any_can_be_cancelled(fed):
    fed.start("--insecure")

    def submit(priority):
        known = {run["run"] for run in fed.status()["runs"]}
        fed.submit(rounds=1, federation__priority=priority, federation__wait=600)
        fresh = wait_for(lambda: [r["run"] for r in fed.status()["runs"] if r["run"] not in known], "the run", 60)
        return fresh[0]

    def waits(run):
        return "0 of 1 nodes" in str(shown(fed, run)["reason"])

    first = submit(0)
    wait_for(lambda: waits(first), "the first run to wait for nodes", 60)
    low, high, never = submit(0), submit(5), submit(-1)
    fed.cli("cancel", never)
    assert shown(fed, never)["status"] == "failed"
    assert shown(fed, never)["reason"] == "cancelled before it began"
    fed.cli("cancel", first)
    wait_for(lambda: waits(high), "the run of high priority", 60)
    assert not waits(low)
    assert "cancelled" in shown(fed, first)["reason"]
    fed.cli("cancel", high)
    wait_for(lambda: waits(low), "the other run", 60)
    assert "is neither queued nor running" in fed.cli("cancel", high, code=1).stderr


@pytest.mark.chaos
def test_a_running_run_that_is_cancelled_ends_and_the_next_one_runs(fed):
    fed.start("--insecure")
    fed.site("site0", TASK.format("site0"))
    watching = fed.submit(rounds=100_000, task__sites=2)
    wait_for(lambda: fed.rounds_done() >= 3, "3 rounds", 120)
    fed.cli("cancel", "last")
    _, err = watching.communicate(timeout=60)
    assert (watching.returncode, "cancelled" in err) == (1, True)
    assert fed.run(rounds=2, task__sites=2)["rounds"] == 2


@pytest.mark.chaos
def test_with_over_selection_a_stopped_node_holds_nobody_up(fed):
    fed.start("--insecure")
    sites = [fed.site(f"site{i}", f"tiny_task:make,sites=3,client=site{i}") for i in range(3)]
    wait_for(lambda: sum(node["here"] for node in fed.status()["nodes"]) == 3, "all", 60)
    watching = fed.submit(
        rounds=40, task__sites=3, federation__min_clients=3, cohort__size=2, cohort__over_selection=0.5
    )
    wait_for(lambda: fed.rounds_done() >= 3, "3 rounds", 120)
    sites[2].process.send_signal(signal.SIGSTOP)
    wait_for(lambda: fed.rounds_done() >= 15, "15 rounds", 120)
    sites[2].process.send_signal(signal.SIGCONT)
    fed.result(watching)
    closed = [event.data for event in events(fed) if event.kind == "round.finished"]
    assert all(data["used"] == 2 for data in closed)
    assert sum("site2" in data["surplus"] for data in closed) >= 10


@pytest.mark.chaos
def test_a_stopped_node_misses_its_round_by_name_and_is_back_for_the_next(fed):
    fed.start("--insecure")
    sites = [fed.site(name, TASK.format(name)) for name in ("site0", "site1")]
    wait_for(lambda: sum(node["here"] for node in fed.status()["nodes"]) == 2, "both", 60)
    watching = fed.submit(
        rounds=30, task__sites=2, federation__min_clients=2, cohort__deadline=3, cohort__min_replies=1
    )
    wait_for(lambda: fed.rounds_done() >= 3, "3 rounds", 120)
    sites[1].process.send_signal(signal.SIGSTOP)
    late = wait_for(lambda: [e for e in events(fed) if e.kind == "client.failed"], "the deadline", 60)
    sites[1].process.send_signal(signal.SIGCONT)
    fed.result(watching)
    assert (late[0].data["client_id"], late[0].data["kind"]) == ("site1", "late")
    assert late[0].data["reason"] == "no answer within 3 s"
    closed = [event for event in events(fed) if event.kind == "round.finished"]
    assert [event.data["used"] for event in closed if event.round == late[0].round] == [1]
    assert closed[-1].data["used"] == 2
    said = fed.cli("status", "last").stdout
    assert "failures of" in said
    assert "no answer within 3 s" in said
