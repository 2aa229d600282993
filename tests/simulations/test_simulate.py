"""Whole simulations in real worker processes: the same bits however they are spread; no client can spoil a run."""

import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from coterie.core.errors import ConfigError, QuorumError, TaskError
from coterie.core.events import EventKind
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.server.checkpoint import Checkpoint
from coterie.server.store import RunStatus, Store
from coterie.tasks import load_task
from coterie.tasks.task import initial_model


def test_the_number_of_workers_leaves_no_trace(run):
    shas = {run(simulation__workers=workers, cohort__size=6).model.sha256() for workers in (1, 2, 3)}
    assert len(shas) == 1


def test_another_seed_gives_another_model(run):
    assert run(seed=1).model.sha256() != run(seed=2).model.sha256()


def test_fedavg_of_one_client_with_one_step_is_plain_sgd(run):
    one = run(sites=1, rounds=1, local__steps=1, local__batch_size=200, local__lr=0.5)
    task = load_task(one.result.config.task)
    module = task.model()
    initial_model(task, one.config.seed).load_into(module)
    F.cross_entropy(module(task.train.inputs), task.train.targets).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.5 * parameter.grad
    assert torch.allclose(one.model.flat, ModelState.from_module(module).flat, atol=1e-6)


def test_fedprox_with_a_huge_mu_leaves_the_global_model_where_it_was(run):
    one = run(strategy="fedprox", local__algorithm={"name": "fedprox", "mu": 1e6})
    task = load_task(one.result.config.task)
    assert torch.allclose(one.model.flat, initial_model(task, one.config.seed).flat, atol=1e-4)


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "trimmed_mean"])
def test_it_learns_with_every_strategy(run, strategy):
    assert run(strategy=strategy, rounds=5).result.outcome.metrics["accuracy"] > 0.9


@pytest.mark.parametrize("strategy", ["fedavg", "trimmed_mean"])
def test_batch_norm_stays_finite_and_its_counter_keeps_dtype_and_shape(run, strategy):
    model = run("batch_norm", strategy=strategy, server_optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.5}).model
    assert torch.isfinite(model.flat).all()
    assert (model.tensors()["1.running_var"] > 0).all()
    counter = model.tensors()["1.num_batches_tracked"]
    assert (counter.dtype, counter.shape) == (torch.int64, torch.Size([]))


def test_a_client_that_raises_is_named_with_its_words_and_the_rest_goes_on(run):
    one = run("marked", marked=2)
    failures = one.of(EventKind.CLIENT_FAILED)
    assert {event.data["client_id"] for event in failures} == {"site0", "site1"}
    assert all(event.data["kind"] == "raised" for event in failures)
    assert "ValueError: the scanner was off that day (tiny_task.py:" in failures[0].data["reason"]
    assert [data["used"] for data in one.rounds()] == [8, 8, 8]


def test_a_client_that_kills_its_worker_costs_nobody_else_anything(run):
    crashed = run("marked", marked=1, action="die")
    failures = crashed.of(EventKind.CLIENT_FAILED)
    assert [event.data["kind"] for event in failures] == ["crashed"] * 3
    assert "killed by SIGKILL" in failures[0].data["reason"]
    raised = run("marked", marked=1, action="complain")
    assert crashed.model.sha256() == raised.model.sha256()


def test_when_every_client_fails_the_run_fails_with_the_cause(run, home):
    one = run("marked", marked=10, rounds=9, expect_error=True)
    assert isinstance(one.error, QuorumError)
    assert "3 rounds in a row had too few usable replies" in str(one.error)
    assert "the scanner was off that day" in str(one.error)
    assert len(one.rounds()) == 3
    record = Store(home / "coterie.db").find("last")
    assert record.status is RunStatus.FAILED


def test_nan_from_attackers_is_refused_by_name_and_the_rest_aggregated(run):
    one = run(simulation__attack="nan", simulation__attackers=["site3", "site4"])
    refused = one.of(EventKind.UPDATE_REFUSED)
    assert Counter(event.data["client_id"] for event in refused) == {"site3": 3, "site4": 3}
    assert all(event.data["kind"] == "not_finite" for event in refused)
    assert one.result.outcome.metrics["accuracy"] > 0.85


def test_a_run_in_which_all_is_refused_keeps_the_model_and_fails_with_the_cause(run, home):
    one = run(rounds=2, simulation__attack="nan", simulation__attackers=1.0, expect_error=True)
    assert all("0 usable replies, the quorum is 5" in data["empty"] for data in one.rounds())
    assert "most often not_finite" in str(one.error)
    saved = Checkpoint.load(next((home / "runs").iterdir()) / "checkpoint.safetensors")
    task = load_task(RunConfig.load(next((home / "runs").iterdir()) / "run.toml").task)
    assert saved.model.sha256() == initial_model(task, one.config.seed).sha256()


def test_dropout_and_stragglers_lose_clients_on_the_virtual_clock(run):
    one = run(
        rounds=4,
        simulation__dropout=0.3,
        simulation__slowness={"name": "stragglers", "share": 0.2, "factor": 100.0},
        cohort__deadline=2.0,
        cohort__min_replies=1,
    )
    kinds = Counter(event.data["kind"] for event in one.of(EventKind.CLIENT_FAILED))
    assert kinds["late"] >= 4
    assert kinds["dropped"] >= 4
    assert [round(data["clock"], 6) for data in one.rounds()] == [2.0, 4.0, 6.0, 8.0]
    slow = {event.data["client_id"] for event in one.of(EventKind.CLIENT_FAILED) if event.data["kind"] == "late"}
    assert len(slow) <= 2


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_with_over_selection_stragglers_hold_nobody_up_and_the_workers_leave_no_trace(run, dropout):
    settings = {
        "rounds": 4,
        "cohort__size": 5,
        "cohort__over_selection": 0.6,
        "cohort__min_replies": 1,
        "simulation__slowness": {"name": "stragglers", "share": 0.2, "factor": 100.0},
        "simulation__dropout": dropout,
    }
    runs = [run(simulation__workers=workers, **settings) for workers in (1, 2)]
    assert len({one.model.sha256() for one in runs}) == 1
    assert runs[0].rounds()[-1]["surplus"] == runs[1].rounds()[-1]["surplus"]
    for started, data in zip(runs[0].of(EventKind.ROUND_STARTED), runs[0].rounds(), strict=True):
        assert len(started.data["cohort"]) == 8
        assert data["used"] + data["failed"] + len(data["surplus"]) == 8
        assert data["used"] <= 5
    if not dropout:
        assert [data["used"] for data in runs[0].rounds()] == [5] * 4
        assert runs[0].rounds()[-1]["clock"] < 100.0


@pytest.mark.parametrize(
    ("attack", "harm"),
    [({"name": "sign_flip", "scale": 10.0}, True), ({"name": "gaussian", "std": 10.0}, True), ("label_flip", False)],
)
def test_a_mean_falls_to_attackers_and_a_trimmed_mean_does_not(run, attack, harm):
    attacked = {"simulation__attack": attack, "simulation__attackers": 0.2, "rounds": 6, "n": 1000}
    robust = run(strategy="trimmed_mean", aggregator={"name": "trimmed_mean", "f": 3}, **attacked)
    assert robust.result.outcome.metrics["accuracy"] > 0.85
    if harm:
        mean = run(strategy="fedavg", **attacked)
        assert mean.result.outcome.metrics["loss"] > 3 * robust.result.outcome.metrics["loss"]


def test_every_client_is_evaluated_at_the_end_on_records_it_kept(run):
    one = run(evaluation__client_holdout=0.25)
    (evaluated,) = one.of(EventKind.CLIENTS_EVALUATED)
    assert list(evaluated.data["per_client"]) == [f"site{i}" for i in range(10)]
    assert evaluated.data["on"] == "held-out records"
    assert set(evaluated.data["metrics"]) == {"accuracy", "loss"}
    assert [data["examples"] for data in one.rounds()] == [150, 150, 150]


def test_the_files_of_a_run_tell_everything(run, home):
    from safetensors.torch import load_file

    one = run()
    directory = one.result.directory
    again = RunConfig.load(directory / "run.toml")
    assert again == one.result.config
    assert torch.equal(load_file(directory / "model.safetensors")["weight"], one.model.tensors()["weight"])
    record = Store(home / "coterie.db").find("last")
    assert record.status is RunStatus.FINISHED
    assert record.result["sha256"] == one.model.sha256()
    stored = Store(home / "coterie.db").events(record.id)
    assert [event.seq for event in stored] == list(range(1, len(stored) + 1))
    assert [(event.kind, event.round) for event in stored] == [(event.kind, event.round) for event in one.events]
    json.dumps([dict(event.data) for event in stored], allow_nan=False)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"cohort__size": 11}, ConfigError, r"cohort\.size = 11 is more than the 10 clients"),
        (
            {"aggregator": {"name": "trimmed_mean", "f": 5}},
            ConfigError,
            r"TrimmedMean\(f=5\) needs more than 10 updates, got 10: lower f",
        ),
        (
            {"simulation__attack": "nan", "simulation__attackers": ["site99"]},
            ConfigError,
            "there is no client 'site99'",
        ),
        ({"simulation__clients": 11}, ConfigError, "the task has 10 natural clients"),
        ({"aggregator": "krumm"}, ConfigError, "aggregator: there is no 'krumm': choose one of mean, trimmed_mean"),
        ({"local__optimizer": {"name": "sgd", "momentun": 1}}, ConfigError, r"local\.optimizer\.momentun"),
        ({"local__algorithm": {"name": "fedprox", "mu": -1}}, ConfigError, "FedProx needs a finite mu > 0, got -1"),
        ({"local__optimizer": {"name": "sgd", "nesterov": True}}, ConfigError, "nesterov needs a momentum above 0"),
        ({"local__lr_schedule": {"name": "step", "every": 0}}, ConfigError, "needs every >= 1"),
        ({"server_optimizer": {"name": "sgd", "lr": -1}}, ConfigError, "lr must be finite and above 0"),
        ({"aggregator": "json:JSONDecoder"}, ConfigError, "which is no Aggregator: it has no __call__"),
        ({"server_optimizer": "builtins:dict"}, ConfigError, "gives a dict, which is no ServerOptimizer"),
        (
            {"local__optimizer": "builtins:dict"},
            ConfigError,
            "gives a dict, which is no Optimizer: it has no init, step",
        ),
        ({"aggregator": "builtins:exit"}, ConfigError, "'builtins:exit' raised SystemExit"),
        ({"aggregator": {"name": "trimmed_mean", "f": "1"}}, ConfigError, r"aggregator\.f = '1' is text"),
        ({"aggregator": "os:sep"}, ConfigError, "that is a str, not a class or function"),
        (
            {"simulation__slowness": {"name": "lognormal", "sigma": float("inf")}},
            ConfigError,
            "sigma = inf: it must be",
        ),
        ({"simulation__slowness": {"name": "stragglers", "share": 0.01}}, ConfigError, "is nobody: give at least 0.1"),
        (
            {"simulation__attack": "nan", "simulation__attackers": 0.04},
            ConfigError,
            r"simulation\.attackers = 0\.04 of 10 clients is nobody: give at least 0\.1",
        ),
        ({"simulation__partition": "builtins:dict"}, ConfigError, "'builtins:dict'"),
        (
            {"simulation__clients": 4, "simulation__partition": {"name": "dirichlet", "min_records": 0}},
            ConfigError,
            r"simulation\.partition\.min_records = 0: a client needs at least 1 record",
        ),
        (
            {"simulation__clients": 4, "simulation__partition": {"name": "quantity", "alpha": 1e308}},
            ConfigError,
            r"simulation\.partition\.alpha = 1e\+308: it must be above 0 and at most 1e\+06",
        ),
        ({"task": "tiny_task:fails"}, TaskError, "raised RuntimeError: the archive is locked"),
        ({"task": "tiny_task:forgets"}, TaskError, "returned dict: return a coterie.tasks.Task"),
        ({"task": "tiny_tusk:make"}, ConfigError, "importing tiny_tusk failed with ModuleNotFoundError"),
        ({"task": "mnits"}, ConfigError, "task: there is no 'mnits': choose one of"),
    ],
)
def test_a_wrong_run_is_refused_before_it_starts_and_leaves_nothing(run, home, settings, kind, message):
    one = run(expect_error=True, **settings)
    with pytest.raises(kind, match=message):
        raise one.error
    assert Store(home / "coterie.db").runs() == []
    assert list((home / "runs").glob("*")) == []
