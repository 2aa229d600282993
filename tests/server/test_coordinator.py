"""The round loop against clients that do as a script says: late, twice, out of turn, wrong."""

import math

import pytest
import torch
from torch import nn

from coterie.aggregation import Mean, ServerSGD, TrimmedMean
from coterie.core.errors import QuorumError
from coterie.core.events import EventKind
from coterie.core.messages import SURPLUS, ClientInfo, Evaluation, Failure, Purpose, Reply, Update
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.server.checkpoint import Checkpoint, CheckpointWriter
from coterie.server.coordinator import Coordinator
from coterie.server.journal import Journal
from coterie.server.store import Store


class ScriptedChannel:
    """A channel whose clients answer what `answer(request)` gives: a list of results."""

    def __init__(self, ids, answer, num_examples=10):
        self.infos = [ClientInfo(client_id, num_examples) for client_id in ids]
        self.answer = answer
        self.order = list

    def clients(self):
        return self.infos

    def dispatch(self, requests, deadline=None, enough=None):
        missing = math.inf if enough is None else enough
        for request in self.order(requests):
            if request.purpose is Purpose.EVALUATE:
                yield Reply(Evaluation(request.client_id, request.round, 10, {"accuracy": 0.5}))
                continue
            if not missing:
                yield Reply(Failure(request.client_id, request.round, SURPLUS, "others were faster"), 1.0)
                continue
            for result in self.answer(request):
                missing -= not isinstance(result, Failure)
                yield Reply(result, 1.0)

    def close(self):
        pass


def update(request, value=1.0, num_examples=10, **change):
    delta = torch.full((3,), float(value))
    given = {"client_id": request.client_id, "round": request.round, "base_version": request.version, "delta": delta}
    return Update(**(given | {"num_examples": num_examples, "metrics": {"loss": value}} | change))


@pytest.fixture
def coordinate(tmp_path):
    def run(answer, ids=("a", "b", "c", "d"), rounds=1, aggregator=None, optimizer=None, order=list, **settings):
        config = RunConfig.load(overrides={"rounds": rounds, "cohort.min_replies": 1} | settings).resolve(len(ids))
        store = Store(tmp_path / "c.db")
        store.create_run("r", name="", task="", strategy="", rounds=rounds, config="")
        events = []
        module = nn.Linear(2, 1)
        with torch.no_grad():
            module.weight.zero_()
            module.bias.zero_()
        channel = ScriptedChannel(ids, answer)
        channel.order = order
        outcome = error = None
        checkpoints = CheckpointWriter(tmp_path / "checkpoint")
        coordinator = Coordinator(
            config, channel, aggregator or Mean(), optimizer or ServerSGD(), Journal(store, "r", [events.append]),
            checkpoints, lambda model: {"accuracy": float(model.flat[0])},
        )  # fmt: skip
        try:
            outcome = coordinator.run(Checkpoint(0, ModelState.from_module(module)))
        except QuorumError as raised:
            error = raised
        checkpoints.close()
        return outcome, events, error

    return run


def of(events, kind):
    return [event.data for event in events if event.kind is kind]


def test_the_mean_of_the_updates_moves_the_model(coordinate):
    values = {"a": (1, 10), "b": (2, 5), "c": (3, 5), "d": (4, 10)}
    outcome, events, _ = coordinate(lambda r: [update(r, *values[r.client_id])], rounds=2)
    assert torch.allclose(outcome.model.flat, torch.full((3,), 5.0))
    assert of(events, EventKind.ROUND_FINISHED)[0]["metrics"] == {"loss": 2.5}
    assert of(events, EventKind.ROUND_FINISHED)[0]["examples"] == 30


def test_the_order_of_arrival_leaves_no_trace(coordinate, tmp_path):
    shas = set()
    for rule in (Mean(), TrimmedMean(1)):
        for order in (list, lambda r: r[::-1], lambda r: r[2:] + r[:2]):
            (tmp_path / "c.db").unlink(missing_ok=True)
            outcome, events, _ = coordinate(
                lambda r: [update(r, math.sin(ord(r.client_id) * r.round))], rounds=3, aggregator=rule, order=order
            )
            shas.add((rule, outcome.model.sha256(), str(of(events, EventKind.ROUND_FINISHED)[-1]["metrics"])))
    assert len(shas) == 2


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"delta": torch.tensor([math.nan, 0, 0])}, "not_finite"),
        ({"delta": torch.zeros(2)}, "shape"),
        ({"delta": torch.zeros(3).half()}, "dtype"),
        ({"num_examples": -30}, "num_examples"),
        ({"num_examples": 10**12}, "num_examples"),
        ({"num_examples": math.nan}, "num_examples"),
        ({"round": 7}, "stale"),
        ({"base_version": 7}, "stale"),
        ({"client_id": "stranger"}, "not_asked"),
    ],
)
@pytest.mark.parametrize("rule", [Mean(), TrimmedMean(1)])
def test_one_clients_garbage_is_refused_by_name_and_the_rest_aggregated(coordinate, change, kind, rule):
    outcome, events, _ = coordinate(
        lambda r: [update(r, 1.0, **(change if r.client_id == "b" else {}))], aggregator=rule
    )
    (refused,) = of(events, EventKind.UPDATE_REFUSED)
    assert refused["kind"] == kind
    assert torch.equal(outcome.model.flat, torch.ones(3))
    assert of(events, EventKind.ROUND_FINISHED)[0]["used"] == 3


def test_with_over_selection_the_first_of_the_size_count_and_the_rest_is_no_failure(coordinate):
    def answer(request):
        if request.client_id == "b":
            return [Failure("b", request.round, "raised", "out of paper")]
        return [update(request)]

    overrides = {"cohort.size": 2, "cohort.over_selection": 1.0}
    outcome, events, _ = coordinate(answer, ids=("a", "b", "c", "d"), **overrides)
    (started,) = of(events, EventKind.ROUND_STARTED)
    (finished,) = of(events, EventKind.ROUND_FINISHED)
    assert started["cohort"] == ["a", "b", "c", "d"]
    assert (finished["used"], finished["failed"], finished["surplus"]) == (2, 1, ["d"])
    assert torch.equal(outcome.model.flat, torch.ones(3))


def test_what_comes_after_its_round_has_closed_is_refused_by_name_and_counts_nowhere(coordinate):
    def answer(request):
        if request.round == 2 and request.client_id == "a":
            return [Failure("d", 1, "late", "3.0 s after that round had closed"), update(request)]
        return [update(request)]

    _, events, _ = coordinate(answer, rounds=2)
    (refused,) = [event for event in events if event.kind is EventKind.UPDATE_REFUSED]
    assert (refused.round, refused.data["client_id"], refused.data["kind"]) == (2, "d", "late")
    assert [data["used"] for data in of(events, EventKind.ROUND_FINISHED)] == [4, 4]
    assert [data["refused"] + data["failed"] for data in of(events, EventKind.ROUND_FINISHED)] == [0, 0]


def test_a_second_reply_counts_once(coordinate):
    outcome, events, _ = coordinate(lambda r: [update(r, 1.0), update(r, 50.0)])
    assert torch.equal(outcome.model.flat, torch.ones(3))
    assert [data["kind"] for data in of(events, EventKind.UPDATE_REFUSED)] == ["duplicate"] * 4


def test_metrics_that_only_some_clients_send_are_averaged_over_those(coordinate):
    own = {"a": {"loss": 1.0, "auc": 0.8}, "b": {"loss": 3.0}, "c": {"loss": math.nan}, "d": {"words": "many"}}
    _, events, _ = coordinate(lambda r: [update(r, metrics=own[r.client_id])])
    assert of(events, EventKind.ROUND_FINISHED)[0]["metrics"] == {"loss": 2.0, "auc": 0.8}
    assert of(events, EventKind.ROUND_FINISHED)[0]["used"] == 4


def test_below_the_quorum_the_model_is_kept_and_the_round_says_so(coordinate):
    def answer(r):
        good = r.round == 1 or r.client_id == "a"
        return [update(r) if good else Failure(r.client_id, r.round, "late", "too slow")]

    outcome, events, _ = coordinate(answer, rounds=2, **{"cohort.min_replies": 2, "cohort.max_empty_rounds": 3})
    assert torch.equal(outcome.model.flat, torch.ones(3))
    assert (
        of(events, EventKind.ROUND_FINISHED)[1]["empty"]
        == "1 usable replies, the quorum is 2, most often late: too slow"
    )


def test_too_many_empty_rounds_end_the_run_with_the_cause(coordinate):
    answer = lambda r: [Failure(r.client_id, r.round, "crashed", "out of memory")] if r.round > 2 else [update(r)]  # noqa: E731
    _, events, error = coordinate(answer, rounds=20, **{"cohort.max_empty_rounds": 3})
    assert "3 rounds in a row had too few usable replies (round 5" in str(error)
    assert "out of memory" in str(error)
    assert len(of(events, EventKind.ROUND_FINISHED)) == 5


def test_a_good_round_between_empty_ones_starts_the_count_afresh(coordinate):
    answer = lambda r: [update(r)] if r.round % 3 == 0 else []  # noqa: E731
    outcome, _, error = coordinate(answer, rounds=9, **{"cohort.max_empty_rounds": 3})
    assert error is None
    assert torch.equal(outcome.model.flat, torch.full((3,), 3.0))


def test_a_rule_that_gives_values_that_are_not_finite_moves_nothing(coordinate):
    class Broken:
        def __call__(self, updates, weights=None):
            return updates.mean(0) / 0

    _, events, error = coordinate(lambda r: [update(r)], aggregator=Broken())
    assert "not finite" in of(events, EventKind.ROUND_FINISHED)[0]["empty"]
    assert "gave values that are not finite" in str(error)


def test_the_cohort_changes_by_round_and_repeats_by_seed(coordinate, tmp_path):
    ids = [f"c{i:02}" for i in range(30)]
    seen = []
    for seed in (1, 1, 2):
        (tmp_path / "c.db").unlink(missing_ok=True)
        _, events, _ = coordinate(lambda r: [update(r)], ids, rounds=4, seed=seed, **{"cohort.size": 5})
        seen.append([tuple(data["cohort"]) for data in of(events, EventKind.ROUND_STARTED)])
    assert seen[0] == seen[1] != seen[2]
    assert len(set(seen[0])) == 4
    assert all(len(set(cohort)) == 5 for cohort in seen[0])


def test_server_momentum_is_kept_in_the_checkpoint(coordinate, tmp_path):
    coordinate(lambda r: [update(r)], rounds=2, optimizer=ServerSGD(momentum=0.5))
    saved = Checkpoint.load(tmp_path / "checkpoint")
    assert saved.round == 2
    assert torch.equal(saved.optimizer["momentum"], torch.full((3,), 1.5))
    assert torch.equal(saved.model.flat, torch.full((3,), 2.5))
