"""The gate: every kind of garbage is refused by name, and refusing one client changes nothing for another."""

import pytest
import torch

from coterie.aggregation import Gate, Mean, check_tensors
from coterie.core.messages import Update
from coterie.core.model_state import Entry, Layout
from coterie.core.run_config import GateConfig

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def gate():
    gate = Gate(3, GateConfig(max_norm=10.0), {"a": 50, "b": 0, "c": 50})
    gate.open(4, 3, ["a", "b"])
    return gate


def update(client_id="a", round=4, version=3, delta=None, num_examples=20, **rest):
    delta = torch.tensor([1.0, 2.0, 3.0]) if delta is None else delta
    return Update(client_id, round, version, delta, num_examples, **rest)


def test_a_good_update_passes(gate):
    assert gate.judge(update()) is None


@pytest.mark.parametrize(
    ("wrong", "kind", "reason"),
    [
        ({"client_id": "c"}, "not_asked", "c is not in the cohort of round 4"),
        ({"round": 3}, "stale", "the update is for round 3 from model 3, this is round 4 from model 3"),
        ({"version": 1}, "stale", "the update is for round 4 from model 1"),
        ({"num_examples": 0}, "num_examples", "num_examples = 0: it must be from 1 to the 50 that it declared"),
        ({"num_examples": -30}, "num_examples", "num_examples = -30"),
        ({"num_examples": 51}, "num_examples", "from 1 to the 50 that it declared"),
        ({"num_examples": 10**12}, "num_examples", "num_examples = 1000000000000"),
        ({"client_id": "b", "num_examples": 10**7}, "num_examples", "the 1000000 that gate.max_num_examples allows"),
        ({"num_examples": NAN}, "num_examples", "num_examples = nan is not a whole number"),
        ({"num_examples": 2.5}, "num_examples", "num_examples = 2.5 is not a whole number"),
        ({"num_examples": True}, "num_examples", "num_examples = True is not a whole number"),
        ({"delta": torch.zeros(2)}, "shape", r"the update has shape [2], the model asks for [3]"),
        ({"delta": torch.zeros(1)}, "shape", "the update has shape [1]"),
        ({"delta": torch.zeros(1, 3)}, "shape", "the update has shape [1, 3]"),
        ({"delta": torch.zeros(3).double()}, "dtype", "the update is torch.float64"),
        ({"delta": torch.zeros(3).half()}, "dtype", "the update is torch.float16"),
        ({"delta": torch.tensor([0.0, NAN, 0.0])}, "not_finite", "1 of 3 values are NaN or infinite"),
        ({"delta": torch.tensor([-INF, NAN, INF])}, "not_finite", "3 of 3 values"),
        ({"delta": torch.tensor([0.0, 2e6, 0.0])}, "magnitude", "1 values are beyond 1048576"),
        ({"delta": torch.tensor([0.0, 20.0, 0.0])}, "norm", "L2 norm is 20, gate.max_norm allows 10"),
    ],
)
def test_garbage_is_refused_by_name(gate, wrong, kind, reason):
    refusal = gate.judge(update(**wrong))
    assert refusal is not None
    assert refusal.kind == kind
    assert reason in refusal.reason


def test_a_second_reply_is_refused_and_the_first_still_counts(gate):
    assert gate.judge(update()) is None
    assert gate.judge(update()).kind == "duplicate"
    assert gate.judge(update("b")) is None


def test_a_refused_client_gets_no_second_try_in_the_round_but_one_in_the_next(gate):
    assert gate.judge(update(delta=torch.full((3,), NAN))).kind == "not_finite"
    assert gate.judge(update()).kind == "duplicate"
    gate.open(5, 4, ["a"])
    assert gate.judge(update(round=5, version=4)) is None


def test_what_is_refused_never_changes_the_others_result(gate):
    total = Mean().stream(3, 100)
    gate.open(1, 0, ["a", "b", "c"])
    for one in (
        update("a", 1, 0),
        update("b", 1, 0, delta=torch.full((3,), NAN)),
        update("a", 1, 0, delta=torch.full((3,), 9.0)),
        update("c", 1, 0, num_examples=50, delta=torch.full((3,), -1.0)),
    ):
        if gate.judge(one) is None:
            total.accumulate(one.delta, one.num_examples)
    expected = Mean()(torch.tensor([[1.0, 2.0, 3.0], [-1.0, -1.0, -1.0]]), torch.tensor([20, 50]))
    assert torch.allclose(total.result(), expected)


LAYOUT = Layout(
    (Entry("w", (2, 1), torch.float32), Entry("b", (2,), torch.float32)), (Entry("mean", (), torch.float32),)
)
GOOD = {"w": torch.zeros(2, 1), "b": torch.zeros(2), "mean": torch.tensor(0.0)}


@pytest.mark.parametrize(
    ("tensors", "kind", "reason"),
    [
        ({"w": GOOD["w"], "b": GOOD["b"]}, "layers", "missing: mean; unknown: none"),
        ({**GOOD, "extra": torch.zeros(1)}, "layers", "missing: none; unknown: extra"),
        ({"b": GOOD["b"], "w": GOOD["w"], "mean": GOOD["mean"]}, "layers", "layer 0 is b, the model has w there"),
        ({**GOOD, "w": torch.zeros(1)}, "shape", r"w has shape [1], the model asks for w float32[2, 1]"),
        ({**GOOD, "mean": torch.zeros(1)}, "shape", "mean has shape [1], the model asks for mean float32[]"),
        ({**GOOD, "b": torch.zeros(2).int()}, "dtype", "b is torch.int32"),
    ],
)
def test_other_layers_shapes_and_dtypes_are_refused_by_name(tensors, kind, reason):
    refusal = check_tensors(LAYOUT, tensors)
    assert (refusal.kind, reason in refusal.reason) == (kind, True), refusal


def test_the_models_own_tensors_pass():
    assert check_tensors(LAYOUT, GOOD) is None
