"""The streamed mean: no trace of the order of arrival, of partial sums, or of what was refused."""

import pickle
import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.aggregation import LinearAggregator, Mean, PreconditionError, TrimmedMean, WeightedSum
from coterie.aggregation.mean import MAX_VALUE

SIZE = 65  # not a multiple of any vector register


def deltas(seed: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Magnitudes far apart, where sums of floats would differ by order.
    return torch.randn(n, SIZE, generator=generator) * 10.0 ** torch.randint(-6, 6, (n, SIZE), generator=generator)


def summed(rows, weights, bound: float = 1e6) -> WeightedSum:
    total = Mean().stream(SIZE, bound)
    for row, weight in zip(rows, weights, strict=True):
        total.accumulate(row, weight)
    return total


def test_the_mean_streams_and_the_trimmed_mean_does_not():
    assert isinstance(Mean(), LinearAggregator)
    assert not isinstance(TrimmedMean(1), LinearAggregator)


def test_a_small_sum_by_hand():
    total = Mean().stream(2, 4)
    total.accumulate(torch.tensor([1.0, 2.0]), 1)
    total.accumulate(torch.tensor([3.0, 6.0]), 3)
    assert total.result().tolist() == [2.5, 5.0]
    assert total.result().dtype == torch.float32


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0, 1000), min_size=1, max_size=12), st.randoms())
def test_any_split_into_partial_sums_in_any_order_gives_the_same_bits(seed, weights, rng: random.Random):
    weights[0] += 1.0
    rows = deltas(seed, len(weights))
    expected = summed(rows, weights).result()
    order = list(range(len(weights)))
    rng.shuffle(order)
    parts = [Mean().stream(SIZE, 1e6) for _ in range(3)]
    for i in order:
        parts[rng.randrange(3)].accumulate(rows[i], weights[i])
    rng.shuffle(parts)
    parts[0].merge(parts[1])
    parts[2].merge(parts[0])
    assert torch.equal(parts[2].result(), expected)


def test_partial_sums_travel_between_processes():
    rows = deltas(1, 4)
    first, second = summed(rows[:2], [1, 2]), summed(rows[2:], [3, 4])
    first.merge(pickle.loads(pickle.dumps(second)))
    assert torch.equal(first.result(), summed(rows, [1, 2, 3, 4]).result())


def test_it_agrees_with_the_direct_mean_to_the_promised_resolution():
    rows, weights = deltas(2, 20), torch.arange(1.0, 21.0)
    bound = float(weights.sum())
    expected = Mean()(rows.double(), weights)
    error = (summed(rows, weights.tolist(), bound).result().double() - expected).abs()
    assert bool((error <= 20 * MAX_VALUE * 2.0**-62 + expected.abs() * 2.0**-24).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bound", [1.0, 3.0, 0.7, 2.0**30, 1e12])
def test_the_largest_values_with_the_largest_weights_do_not_overflow(sign, bound):
    total = Mean().stream(SIZE, bound)
    for _ in range(8):
        total.accumulate(torch.full((SIZE,), sign * MAX_VALUE), bound / 8)
    assert total.result().tolist() == [sign * MAX_VALUE] * SIZE


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0 * MAX_VALUE, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 37, SIZE - 1])
def test_a_refused_delta_leaves_the_sum_as_it_was(bad, dtype, place):
    rows = deltas(3, 3)
    total = summed(rows, [1, 2, 3])
    before = total.result()
    wrong = deltas(4, 1)[0].to(dtype)
    wrong[place] = bad
    with pytest.raises(
        PreconditionError, match=rf"entry {place} of an update is .*: it must be finite and at most 1048576"
    ):
        total.accumulate(wrong, 5)
    assert torch.equal(total.result(), before)
    total.accumulate(rows[0], 4)
    assert torch.equal(total.result(), summed(rows[[0, 1, 2, 0]], [1, 2, 3, 4]).result())


@pytest.mark.parametrize(
    ("delta", "weight", "message"),
    [
        (torch.zeros(SIZE + 1), 1, r"shape \[66\] does not fit a sum of 65 values"),
        (torch.zeros(1, SIZE), 1, r"shape \[1, 65\] does not fit"),
        (torch.zeros(SIZE), -1, r"weight = -1: it must be finite and at least 0"),
        (torch.zeros(SIZE), float("nan"), r"weight = nan"),
        (torch.zeros(SIZE), float("inf"), r"weight = inf"),
        (torch.zeros(SIZE), 8, r"the weights add up to 11.0, the sum was made for at most 10: raise max_total_weight"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(delta, weight, message):
    total = summed(torch.ones(1, SIZE), [3], bound=10)
    with pytest.raises(PreconditionError, match=message):
        total.accumulate(delta, weight)
    assert total.result().tolist() == [1.0] * SIZE


def test_a_bound_that_was_added_up_in_floats_is_enough():
    weights = [0.1] * 3 + [1e-17] * 5
    summed(torch.ones(8, SIZE), weights, bound=sum(weights))


def test_only_like_sums_merge_and_only_within_the_bound():
    total = summed(torch.ones(1, SIZE), [6], bound=10)
    with pytest.raises(PreconditionError, match=r"\(65, 10\) and \(65, 11\) cannot be merged: make them alike"):
        total.merge(Mean().stream(SIZE, 11))
    with pytest.raises(PreconditionError, match=r"\(65, 10\) and \(64, 10\) cannot be merged"):
        total.merge(Mean().stream(64, 10))
    with pytest.raises(PreconditionError, match=r"the weights add up to 12.0"):
        total.merge(summed(torch.zeros(1, SIZE), [6], bound=10))
    assert total.result().tolist() == [1.0] * SIZE


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf")])
def test_a_sum_without_a_usable_bound_is_refused(bound):
    with pytest.raises(PreconditionError, match=f"max_total_weight = {bound}: it must be finite and above 0"):
        Mean().stream(SIZE, bound)


def test_an_empty_sum_has_no_result():
    with pytest.raises(PreconditionError, match="the sum is empty"):
        summed(torch.ones(2, SIZE), [0, 0]).result()


def test_memory_stays_at_one_sum_whatever_the_number_of_updates():
    delta = torch.randn(200_000)
    total = Mean().stream(len(delta), 100)
    total.accumulate(delta, 1)
    tracemalloc.start()
    for _ in range(50):
        total.accumulate(delta, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_entries_below_the_resolution_of_a_float32_sum_survive_beside_large_ones():
    total = WeightedSum(2, max_total_weight=2e6)
    total.accumulate(torch.tensor([1000.0, 1e-9]), 1e6)
    total.accumulate(torch.tensor([-1000.0, 1e-9]), 1e6)
    torch.testing.assert_close(total.result(), torch.tensor([0.0, 1e-9]), rtol=1e-3, atol=0)


def test_a_lent_delta_may_change_once_it_was_added():
    lent = torch.ones(SIZE)
    total = Mean().stream(SIZE, 2)
    total.accumulate(lent, 1)
    lent.fill_(7.0)
    assert total.result().tolist() == [1.0] * SIZE


def test_a_delta_of_another_layout_or_dtype_is_summed_by_value():
    wide = torch.arange(2.0 * SIZE)
    for delta in (wide[::2], wide[::2].double(), wide[::2].bfloat16()):
        assert summed([delta], [1]).result().tolist() == delta.float().tolist()
