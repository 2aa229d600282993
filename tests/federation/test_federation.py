"""A real federation: the bits of the simulation, whoever is killed; who may not take part is told why."""

import json
import signal

import pytest

from coterie.server.store import Store

from ..commands import wait_for

SITES = ("site0", "site1")
TASK = "tiny_task:make,sites=2,client={}"
SETTINGS = {"task__sites": 2, "federation__min_clients": 2}


def join_all(fed, *options):
    fed.start(*options)
    return [fed.site(name, TASK.format(name)) for name in SITES]


def reasons(fed, kind="client.failed"):
    store = Store(fed.cli.home / "coterie.db")
    return [event.data["reason"] for event in store.events(store.find("last").id) if event.kind == kind]


def test_a_run_on_nodes_ends_with_the_bits_of_the_simulation(fed, simulated):
    join_all(fed)
    assert fed.url.startswith("https://")
    done = fed.run(rounds=4, evaluation__client_holdout=0.2, **SETTINGS)
    assert done["model"]["sha256"] == simulated(4, 2, "--set", "evaluation.client_holdout=0.2")
    assert reasons(fed) == []
    again = fed.run(rounds=2, strategy="fedprox", **SETTINGS)
    assert again["model"]["sha256"] == simulated(2, 2, "--strategy", "fedprox")
    nodes = json.loads(fed.cli("enroll", "list", "--json").stdout)
    assert [(node["name"], node["here"], node["offers"]) for node in nodes] == [
        (name, True, {"tiny_task:make": 100}) for name in SITES
    ]
    assert fed.stop(signal.SIGTERM) == 0
    assert "Traceback" not in fed.log.read_text()


@pytest.mark.chaos
def test_killed_and_started_again_the_server_goes_on_to_the_same_bits(fed, simulated):
    join_all(fed, "--insecure")
    watching = fed.submit(rounds=40, **SETTINGS)
    for done in (5, 15):
        wait_for(lambda done=done: fed.rounds_done() >= done, f"{done} rounds", 120)
        fed.stop()
        fed.start("--insecure")
    result = fed.result(watching)
    assert result["rounds"] == 40
    assert result["model"]["sha256"] == simulated(40, 2)


@pytest.mark.chaos
def test_a_drained_server_takes_the_run_up_again(fed, simulated):
    join_all(fed, "--insecure")
    watching = fed.submit(rounds=25, **SETTINGS)
    wait_for(lambda: fed.rounds_done() >= 5, "5 rounds", 120)
    fed.stop(signal.SIGTERM)
    assert Store(fed.cli.home / "coterie.db").find("last").status == "interrupted"
    fed.start("--insecure")
    assert fed.status()["runs"][0]["status"] in ("running", "interrupted")
    assert json.loads(fed.cli("status", "--json").stdout)["runs"][0]["rounds"] == 25
    wait_for(lambda: fed.rounds_done() == 25, "the last round", 120)
    watching.kill()
    wait_for(lambda: Store(fed.cli.home / "coterie.db").find("last").status == "finished", "the end", 60)
    assert Store(fed.cli.home / "coterie.db").find("last").result["sha256"] == simulated(25, 2)


@pytest.mark.chaos
def test_a_killed_node_is_named_and_gets_work_again(fed):
    first, second = join_all(fed, "--insecure")
    watching = fed.submit(rounds=60, cohort__min_replies=1, **SETTINGS)
    wait_for(lambda: fed.rounds_done() >= 3, "3 rounds", 120)
    second.stop()
    wait_for(lambda: any("node" in reason for reason in reasons(fed)), "a named failure", 60)
    second.start()
    result = fed.result(watching)
    assert result["rounds"] == 60
    store = Store(fed.cli.home / "coterie.db")
    rounds = [event for event in store.events(store.find("last").id) if event.kind == "round.finished"]
    assert rounds[-1].data["used"] == 2
    assert first.process.poll() is None


@pytest.mark.chaos
def test_a_client_that_takes_its_worker_down_is_a_named_failure(fed):
    fed.start("--insecure")
    fed.site("site0", "tiny_task:make,sites=2,client=site0,model=marked,marked=1,action=die")
    fed.site("site1", "tiny_task:make,sites=2,client=site1,model=marked")
    result = fed.run(rounds=3, cohort__min_replies=1, task__model="marked", **SETTINGS)
    assert result["rounds"] == 3
    assert all("the worker process ended: killed by SIGKILL" in reason for reason in reasons(fed))
    assert len(reasons(fed)) == 3


@pytest.mark.chaos
def test_a_second_process_with_the_same_key_waits(fed):
    first, _ = join_all(fed, "--insecure")
    wait_for(lambda: "is connected" in first.said(), "the first", 60)
    first.process, running = None, first.process
    first.start()
    wait_for(lambda: "is here already with another process" in first.said(), "the refusal", 60)
    assert running.poll() is None
    running.kill()
    wait_for(lambda: first.said().count("is connected") == 2, "its turn", 90)


def test_who_may_not_take_part_is_told_why(fed, tmp_path):
    fed.start()
    used = fed.token("site0")
    one = fed.site("site0", TASK.format("site0"))
    refused = fed.cli("client", "join", fed.url, used, "-d", tmp_path / "x", code=1)
    assert "revoked" in refused.stderr or "replaced" in refused.stderr
    refused = fed.cli("client", "join", fed.url, f"{'0' * 48}.{used.partition('.')[2]}", "-d", tmp_path / "x", code=1)
    assert "token" in refused.stderr
    foreign = f"{used.partition('.')[0]}.{'0' * 64}"
    refused = fed.cli("client", "join", fed.url, foreign, "-d", tmp_path / "y", code=1)
    assert "does not show the CA that the token names" in refused.stderr
    wait_for(lambda: "is connected" in one.said(), "the node", 60)
    fed.cli("enroll", "revoke", "site0")
    assert one.process.wait(timeout=60) == 1
    assert "revoked" in one.said().splitlines()[-1]


def test_without_tls_a_server_listens_on_loopback_only(cli):
    refused = cli("server", "--insecure", "--host", "0.0.0.0", code=2)
    assert "without TLS a server listens on loopback only" in refused.stderr


def test_a_run_waits_for_its_nodes_and_says_so(fed):
    fed.start("--insecure")
    watching = fed.submit(rounds=1, federation__wait=3, **SETTINGS)
    wait_for(lambda: fed.status()["runs"], "the run", 30)
    wait_for(lambda: "0 of 2 nodes" in str(fed.status()["runs"][0]["reason"]), "the reason", 30)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 1
    assert "0 of 2 nodes with records for task 'tiny_task:make' are here after 3 s: start more" in err
