"""Parts of a user's own, and what a client's few records are used for."""

import sys

import pytest

from coterie.core.errors import ConfigError, RunError
from coterie.core.events import EventKind
from coterie.core.run_config import RunConfig
from coterie.server.store import RunKind, Store
from coterie.simulations import resume, simulate

OWN_PARTS = """
import numpy as np
import torch


def nobody(population, num_clients, rng, /):
    return {"a": np.arange(5), "b": np.arange(0)}


def beyond(population, num_clients, rng, /):
    return {"a": [0, 200]}


def twice(population, num_clients, rng, /):
    return {"a": [0, 1], "b": [2, 1]}


def uneven(population, num_clients, rng, /):
    return {"a": [0], "b": [1, 2], "c": range(3, 200)}


def still(num_clients, rng, /):
    return np.zeros(num_clients)


def words(num_clients, rng, /):
    return ["slow"] * num_clients


class Raises:
    def __call__(self, updates, weights=None):
        raise ZeroDivisionError("nobody is left")


class Row:
    def __call__(self, updates, weights=None):
        return updates[:1]


class Double:
    def __call__(self, updates, weights=None):
        return updates.double().mean(0)
"""


@pytest.fixture
def own(tmp_path, run):
    (tmp_path / "work" / "own_parts.py").write_text(OWN_PARTS)
    return run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody", "client 'b' needs at least one record"),
        ("beyond", "client 'a' has records 0 to 200, the task has 0 to 199"),
        ("twice", "client 'b' has a record twice, or one that another client has"),
    ],
)
def test_a_partition_that_leaves_a_client_without_records_of_its_own_is_refused(own, name, message):
    one = own(simulation__partition=f"own_parts:{name}", expect_error=True)
    with pytest.raises(ConfigError, match=message):
        raise one.error


@pytest.mark.parametrize("name", ["still", "words"])
def test_a_slowness_that_is_none_is_refused(own, name):
    one = own(simulation__slowness=f"own_parts:{name}", expect_error=True)
    with pytest.raises(ConfigError, match=f"own_parts:{name}': it must give a finite factor above 0 for each"):
        raise one.error


def test_a_client_with_too_few_records_is_evaluated_on_none_and_says_so(own):
    one = own(simulation__partition="own_parts:uneven", evaluation__client_holdout=0.1, cohort__min_replies=1)
    (evaluated,) = one.of(EventKind.CLIENTS_EVALUATED)
    assert set(evaluated.data["per_client"]) == {"b", "c"}
    assert evaluated.data["failed"] == {"a": "its only record is for training: none is left to evaluate on"}
    assert one.rounds()[0]["examples"] == 1 + 1 + 177


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "aggregator 'own_parts:Raises' raised ZeroDivisionError: nobody is left"),
        ("Row", r"aggregator 'own_parts:Row' gave a Tensor\[1, 10\]: it must be a Tensor\[10\]"),
    ],
)
def test_a_rule_that_raises_or_gives_something_else_is_named(own, name, message):
    one = own(aggregator=f"own_parts:{name}", expect_error=True)
    with pytest.raises(RunError, match=message):
        raise one.error


def test_a_rule_may_compute_in_double_precision(own):
    assert own(aggregator="own_parts:Double").result.outcome.metrics["accuracy"] > 0.8


def test_who_attacks_is_told(run):
    one = run(simulation__attack="sign_flip", simulation__attackers=0.2)
    (started,) = one.of(EventKind.RUN_STARTED)
    assert len(started.data["attackers"]) == 2
    assert set(started.data["attackers"]) < {f"site{i}" for i in range(10)}


def test_the_tasks_options_are_in_the_run_file(run):
    one = run()
    assert one.result.config.task.options == {
        "model": "logistic", "n": 200, "sites": 10, "marked": 0, "action": "complain"
    }  # fmt: skip
    short = RunConfig.load(one.result.directory / "run.toml", {"task.name": "heart"})
    assert short.task.name == "heart"


@pytest.mark.parametrize("steps", [3, 7])
def test_the_virtual_clock_counts_the_records_that_steps_really_use(run, steps):
    one = run(rounds=1, local__steps=steps, local__batch_size=64)
    assert one.rounds()[0]["clock"] == pytest.approx(steps * 20 * 0.001)


def test_a_run_that_failed_for_want_of_replies_never_finishes_by_resuming(run, home):
    one = run(rounds=2, simulation__dropout=1.0, expect_error=True)
    assert "2 rounds in a row had too few usable replies" in str(one.error)
    record = Store(home / "coterie.db").find("last")
    with pytest.raises(RunError, match="2 rounds in a row had too few usable replies"):
        resume(record.id, home)
    assert Store(home / "coterie.db").find("last").status == "failed"


def test_a_changed_model_is_refused_at_a_resume(run, home, tmp_path):
    def stop(event):
        if event.kind is EventKind.ROUND_FINISHED and event.round == 2:
            raise KeyboardInterrupt

    config = run(rounds=1).result.config
    settings = {"task": config.task.model_dump(), "rounds": 4, "simulation.workers": 1}
    with pytest.raises(KeyboardInterrupt):
        simulate(RunConfig.load(overrides=settings), home, [stop])
    source = tmp_path / "work" / "tiny_task.py"
    source.write_text(source.read_text().replace("return nn.Linear(4, 2)", "return nn.Sequential(nn.Linear(4, 2))"))
    del sys.modules["tiny_task"]
    with pytest.raises(RunError, match=r"is not the one that run .* started with: parameters: expected 0\.weight"):
        resume("last", home)


def test_a_run_interrupted_at_its_first_event_is_known_by_its_id(run, home):
    def stop(event):
        if event.kind is EventKind.RUN_STARTED:
            raise KeyboardInterrupt

    config = run(rounds=1).result.config
    with pytest.raises(KeyboardInterrupt) as raised:
        simulate(RunConfig.load(overrides={"task": config.task.model_dump(), "rounds": 2}), home, [stop])
    assert raised.value.run_id == Store(home / "coterie.db").find("last").id


def test_a_run_on_nodes_is_not_gone_on_with_as_a_simulation(home):
    store = Store(home / "coterie.db")
    store.create_run("r", name="", task="t", strategy="fedavg", rounds=1, config="", kind=RunKind.FEDERATION)
    with pytest.raises(RunError, match="run r is carried out on nodes: `coterie server` goes on with it"):
        resume("r", home)
