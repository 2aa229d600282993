"""The weighted mean: exact, the same bits in every order, and closed to garbage."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from coterie.aggregation import Mean, PreconditionError, WeightedSum
from coterie.aggregation.mean import MAX_VALUE

matrices = st.tuples(st.integers(1, 8), st.integers(1, 40)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-1000, 1000, width=32, allow_subnormal=False))
)


def random_updates(n=6, size=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, size, generator=generator), torch.randint(1, 500, (n,), generator=generator)


def test_a_small_case_by_hand():
    updates = torch.tensor([[1.0, 10.0], [4.0, -20.0]])
    assert torch.equal(Mean()(updates, torch.tensor([1, 3])), torch.tensor([3.25, -12.5]))
    assert torch.equal(Mean()(updates), torch.tensor([2.5, -5.0]))


@given(matrices, st.randoms())
@settings(deadline=None)
def test_agrees_with_float64_and_does_not_depend_on_the_order(values, random):
    updates = torch.from_numpy(values)
    weights = torch.tensor([float(random.randint(1, 1000)) for _ in updates])
    result = Mean()(updates, weights)
    expected = (updates.double() * weights[:, None]).sum(0) / weights.sum()
    scale = float(updates.abs().max())
    assert torch.allclose(result.double(), expected.double(), rtol=1e-6, atol=1e-7 * scale)
    order = random.sample(range(len(updates)), len(updates))
    assert torch.equal(Mean()(updates[order], weights[order]), result)


@given(st.integers(1, 10), st.randoms())
@settings(deadline=None)
def test_any_split_into_partial_sums_gives_the_same_bits(parts, random):
    updates, weights = random_updates(n=12)
    total = Mean().stream(50, float(weights.sum()))
    for row, weight in zip(updates, weights, strict=True):
        total.accumulate(row, float(weight))
    partial = [Mean().stream(50, float(weights.sum())) for _ in range(parts)]
    for i in random.sample(range(12), 12):
        random.choice(partial).accumulate(updates[i], float(weights[i]))
    merged = partial.pop(random.randrange(parts))
    for other in partial:
        merged.merge(other)
    assert torch.equal(merged.result(), total.result())


def test_streaming_agrees_with_the_whole():
    updates, weights = random_updates(n=20, size=1000)
    total = Mean().stream(1000, 20 * 500)
    for row, weight in zip(updates, weights, strict=True):
        total.accumulate(row, int(weight))
    assert torch.allclose(total.result(), Mean()(updates, weights), rtol=0, atol=1e-7)


def test_tiny_entries_survive_beside_large_ones():
    total = WeightedSum(2, max_total_weight=2e6)
    total.accumulate(torch.tensor([1000.0, 1e-9]), 1e6)
    total.accumulate(torch.tensor([-1000.0, 1e-9]), 1e6)
    assert torch.allclose(total.result(), torch.tensor([0.0, 1e-9]), rtol=1e-3, atol=0)


def test_the_largest_allowed_sum_does_not_overflow():
    total = WeightedSum(1, max_total_weight=1000)
    for _ in range(1000):
        total.accumulate(torch.tensor([MAX_VALUE]), 1)
    assert total.result().item() == MAX_VALUE


@pytest.mark.parametrize(
    ("delta", "weight", "message"),
    [
        (torch.tensor([torch.nan, 0.0]), 1, "1 entries of an update are not finite"),
        (torch.tensor([-torch.inf, torch.nan]), 1, "2 entries of an update are not finite"),
        (torch.tensor([2 * MAX_VALUE, 0.0]), 1, "beyond 1048576"),
        (torch.zeros(3), 1, r"shape \[3\] does not fit a sum of 2 values"),
        (torch.zeros(2), -1, "weight = -1"),
        (torch.zeros(2), float("nan"), "weight = nan"),
        (torch.zeros(2), 11, "weights add up to 14.0, the sum was made for 10"),
    ],
)
def test_a_refused_update_leaves_the_sum_as_it_was(delta, weight, message):
    total = WeightedSum(2, max_total_weight=10)
    total.accumulate(torch.tensor([1.0, 2.0]), 3)
    before = total.result()
    with pytest.raises(PreconditionError, match=message):
        total.accumulate(delta, weight)
    assert torch.equal(total.result(), before)


def test_an_empty_sum_has_no_mean():
    with pytest.raises(PreconditionError, match="the sum is empty"):
        WeightedSum(2, 10).result()
    with pytest.raises(PreconditionError, match="at least 1 update, got 0"):
        Mean()(torch.empty(0, 3))


def test_sums_with_different_bounds_are_not_merged():
    with pytest.raises(PreconditionError, match="same size and bounds"):
        WeightedSum(2, 10).merge(WeightedSum(2, 1e9))


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [torch.nan, 1], [torch.inf, 1]])
def test_weights_that_make_no_mean_are_refused(weights):
    with pytest.raises(PreconditionError, match="weights >= 0 with a sum above 0"):
        Mean()(torch.ones(2, 3), torch.tensor(weights, dtype=torch.float32))


def test_nan_is_refused_by_name():
    with pytest.raises(PreconditionError, match="NaN or infinity"):
        Mean()(torch.tensor([[1.0, torch.nan], [1.0, 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    updates = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    assert torch.equal(Mean()(updates), torch.tensor([2.0, 3.0], dtype=dtype))


def test_memory_stays_at_a_sum_whatever_the_number_of_updates():
    import tracemalloc

    updates, _ = random_updates(n=1, size=200_000)
    total = Mean().stream(200_000, 100)
    total.accumulate(updates[0], 1)
    tracemalloc.start()
    for _ in range(50):
        total.accumulate(updates[0], 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000
