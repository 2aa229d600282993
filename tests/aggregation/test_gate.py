"""The gate: every kind of garbage is refused by name, and refusing one client changes nothing for another."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.aggregation import Gate, Mean, TrimmedMean, check_tensors
from coterie.core.messages import Update
from coterie.core.model_state import Entry, Layout
from coterie.core.run_config import GateConfig

NAN, INF = math.nan, math.inf
GOOD = Update("a", 4, 3, torch.tensor([1.0, 2.0, 3.0]), 20)


@pytest.fixture
def gate() -> Gate:
    return opened()


def opened(**limits) -> Gate:
    gate = Gate(3, GateConfig(**{"max_norm": 10.0, **limits}), {"a": 50, "b": 0, "c": 50})
    gate.open(4, 3, ["a", "b", "unknown"])
    return gate


def test_a_good_update_passes(gate):
    assert gate.judge(GOOD) is None


@pytest.mark.parametrize(
    ("wrong", "kind", "reason"),
    [
        ({"client_id": "c"}, "not_asked", "c is not in the cohort of round 4"),
        ({"round": 3}, "stale", "the update is for round 3 from model 3, this is round 4 from model 3"),
        ({"base_version": 1}, "stale", "the update is for round 4 from model 1"),
        ({"delta": torch.zeros(2)}, "shape", "the update has shape [2], the model asks for [3]"),
        ({"delta": torch.zeros(1)}, "shape", "the update has shape [1], the model asks for [3]"),
        ({"delta": torch.zeros(1, 3)}, "shape", "the update has shape [1, 3], the model asks for [3]"),
        ({"delta": torch.tensor(1.0)}, "shape", "the update has shape [], the model asks for [3]"),
        ({"delta": torch.zeros(3).double()}, "dtype", "the update is float64, the model asks for float32"),
        ({"delta": torch.zeros(3).half()}, "dtype", "the update is float16"),
        ({"delta": torch.zeros(3).int()}, "dtype", "the update is int32"),
        ({"delta": [0.0, 0.0, 0.0]}, "dtype", "the update is a list, the model asks for a dense float32 tensor"),
        ({"delta": None}, "dtype", "the update is a NoneType"),
        ({"delta": torch.zeros(3).to_sparse()}, "dtype", "asks for a dense float32 tensor"),
        ({"num_examples": 0}, "num_examples", "num_examples = 0: it must be from 1 to the 50 that it declared"),
        ({"num_examples": -30}, "num_examples", "num_examples = -30: it must be from 1 to the 50 that it declared"),
        ({"num_examples": 51}, "num_examples", "num_examples = 51: it must be from 1 to the 50 that it declared"),
        ({"num_examples": 10**12}, "num_examples", "num_examples = 1000000000000: it must be"),
        ({"num_examples": 10**5000}, "num_examples", "num_examples = a very large int: it must be"),
        ({"client_id": "b", "num_examples": 10**7}, "num_examples", "from 1 to gate.max_num_examples = 1000000"),
        ({"client_id": "unknown", "num_examples": 10**7}, "num_examples", "from 1 to gate.max_num_examples = 1000000"),
        ({"num_examples": NAN}, "num_examples", "num_examples = nan is a float, it must be an int"),
        ({"num_examples": 20.0}, "num_examples", "num_examples = 20.0 is a float, it must be an int"),
        ({"num_examples": True}, "num_examples", "num_examples = True is a bool, it must be an int"),
        ({"num_examples": "9" * 500}, "num_examples", "9... is a str, it must be an int"),
        ({"num_examples": None}, "num_examples", "num_examples = None is a NoneType"),
        ({"delta": torch.tensor([0.0, NAN, 0.0])}, "not_finite", "1 of 3 values are NaN or infinite"),
        ({"delta": torch.tensor([-INF, NAN, INF])}, "not_finite", "3 of 3 values are NaN or infinite"),
        ({"delta": torch.tensor([0.0, -2e6, 0.0])}, "magnitude", "2e+06 in magnitude, at most 1048576 can be summed"),
        ({"delta": torch.tensor([0.0, 3e38, 3e38])}, "magnitude", "3e+38 in magnitude"),
        ({"delta": torch.tensor([0.0, 20.0, 0.0])}, "norm", "the update's L2 norm is 20, gate.max_norm = 10"),
    ],
)
def test_garbage_is_refused_by_name(gate, wrong, kind, reason):
    refusal = gate.judge(replace(GOOD, **wrong))
    assert refusal is not None
    assert refusal.kind == kind
    assert reason in refusal.reason
    assert len(refusal.reason) < 200


def test_a_declared_count_above_the_cap_does_not_raise_it():
    gate = opened(max_num_examples=30)
    refusal = gate.judge(replace(GOOD, num_examples=40))
    assert refusal is not None
    assert refusal.reason.endswith("from 1 to gate.max_num_examples = 30")


def test_the_limits_themselves_pass():
    gate = opened(max_norm=INF)
    assert gate.judge(replace(GOOD, num_examples=50)) is None
    assert gate.judge(replace(GOOD, client_id="b", num_examples=1_000_000, delta=torch.full((3,), 2.0**20))) is None


def test_a_client_that_clips_to_the_norm_limit_passes_in_spite_of_float32():
    delta = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    gate = Gate(len(delta), GateConfig(max_norm=1.0), {})
    for scale, passes in ((1.0, True), (1.0 + 5e-7, True), (1.0 + 1e-5, False)):
        gate.open(1, 0, ["a"])
        refusal = gate.judge(Update("a", 1, 0, delta / delta.norm() * scale, 1))
        assert (refusal is None) == passes


def test_a_second_reply_is_refused_and_the_first_still_counts(gate):
    assert gate.judge(GOOD) is None
    refusal = gate.judge(GOOD)
    assert (refusal.kind, refusal.reason) == ("duplicate", "a has answered already in round 4: its first answer counts")
    assert gate.judge(replace(GOOD, client_id="b")) is None


def test_a_refused_client_gets_no_second_try_in_the_round_but_one_in_the_next(gate):
    assert gate.judge(replace(GOOD, delta=torch.full((3,), NAN))).kind == "not_finite"
    assert gate.judge(GOOD).kind == "duplicate"
    gate.open(5, 4, ["a"])
    assert gate.judge(replace(GOOD, round=5, base_version=4)) is None


def test_a_late_reply_to_an_earlier_round_does_not_use_up_the_answer(gate):
    assert gate.judge(replace(GOOD, round=3, base_version=2)).kind == "stale"
    assert gate.judge(GOOD) is None


def test_before_the_first_round_nobody_was_asked():
    assert Gate(3, GateConfig(), {}).judge(GOOD).kind == "not_asked"


def test_an_update_is_judged_as_it_lies_in_memory(gate):
    strided = torch.tensor([1.0, NAN, 2.0, NAN, 3.0, NAN])[::2]
    assert gate.judge(replace(GOOD, delta=strided)) is None
    assert gate.judge(replace(GOOD, client_id="b", delta=GOOD.delta.clone().requires_grad_())) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=5), st.randoms())
def test_what_is_refused_never_changes_the_others_result(wrong, random):
    """Good updates among garbage, in any order: both rules give the bits that they give without the garbage."""
    generator = torch.Generator().manual_seed(1)
    good = [Update(f"good{i}", 1, 0, torch.randn(3, generator=generator), i + 1) for i in range(4)]
    garbage = [
        replace(good[0], client_id="bad", delta=torch.full((3,), NAN)),
        replace(good[0], client_id="bad", num_examples=10**9),
        replace(good[0], client_id="bad", delta=torch.zeros(2)),
        replace(good[0], client_id="stranger"),
        replace(good[1], round=0, delta=torch.full((3,), 9.0)),
        replace(good[0], client_id="bad", delta=torch.full((3,), 1e9)),
    ]
    replies = good + [garbage[i] for i in wrong]
    random.shuffle(replies)
    gate = Gate(3, GateConfig(), {})
    gate.open(1, 0, [*(one.client_id for one in good), "bad"])
    total, kept = Mean().stream(3, 100), []
    for reply in replies:
        if gate.judge(reply) is None:
            total.accumulate(reply.delta, reply.num_examples)
            kept.append(reply.delta)
    alone = Mean().stream(3, 100)
    for one in good:
        alone.accumulate(one.delta, one.num_examples)
    assert torch.equal(total.result(), alone.result())
    assert torch.equal(TrimmedMean(1)(torch.stack(kept)), TrimmedMean(1)(torch.stack([one.delta for one in good])))


LAYOUT = Layout(
    (Entry("w", (2, 1), torch.float32), Entry("b", (2,), torch.bfloat16)), (Entry("mean", (), torch.float32),)
)
TENSORS = {"w": torch.zeros(2, 1), "b": torch.zeros(2, dtype=torch.bfloat16), "mean": torch.tensor(0.0)}


@pytest.mark.parametrize(
    ("tensors", "kind", "reason"),
    [
        ({"w": TENSORS["w"], "b": TENSORS["b"]}, "layers", "layers missing: mean; layers that the model has not: none"),
        ({**TENSORS, "extra": TENSORS["w"]}, "layers", "layers missing: none; layers that the model has not: extra"),
        ({}, "layers", "layers missing: w, b, mean"),
        ({**TENSORS, **{f"x{i}": TENSORS["w"] for i in range(9)}}, "layers", "model has not: x0, x1, x2 and 6 more"),
        ({name: TENSORS[name] for name in ("b", "w", "mean")}, "layers", "layer 0 is b, the model has w there"),
        ({**TENSORS, "w": torch.zeros(1, 2)}, "shape", "w has shape [1, 2], the model asks for [2, 1]"),
        ({**TENSORS, "mean": torch.zeros(1)}, "shape", "mean has shape [1], the model asks for []"),
        ({**TENSORS, "b": torch.zeros(2)}, "dtype", "b is float32, the model asks for bfloat16"),
        ({**TENSORS, "b": torch.zeros(2).int()}, "dtype", "b is int32, the model asks for bfloat16"),
        ({**TENSORS, "w": [[0.0], [0.0]]}, "dtype", "w is a list, the model asks for a float32 tensor"),
    ],
)
def test_other_layers_shapes_and_dtypes_are_refused_by_name(tensors, kind, reason):
    refusal = check_tensors(LAYOUT, tensors)
    assert refusal is not None
    assert (refusal.kind, reason in refusal.reason) == (kind, True), refusal


def test_the_models_own_tensors_pass():
    assert check_tensors(LAYOUT, TENSORS) is None
