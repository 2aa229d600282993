"""The trimmed mean: what it promises up to f wrong updates, and that it refuses to promise more."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from coterie.aggregation import Mean, PreconditionError, TrimmedMean
from coterie.aggregation import trimmed_mean as module
from coterie.aggregation.trimmed_mean import sorting_network

values = st.floats(-1000, 1000, width=32, allow_subnormal=False)
cases = st.tuples(st.integers(1, 12), st.integers(1, 30)).flatmap(
    lambda shape: st.tuples(arrays(np.float32, shape, elements=values), st.integers(0, (shape[0] - 1) // 2))
)


def test_a_small_case_by_hand():
    updates = torch.tensor([[1.0, 5.0], [2.0, -100.0], [3.0, 6.0], [1000.0, 7.0]])
    assert torch.equal(TrimmedMean(1)(updates), torch.tensor([2.5, 5.5]))


@given(cases, st.randoms())
@settings(deadline=None)
def test_agrees_with_sorting_in_float64_and_does_not_depend_on_the_order(case, random):
    matrix, f = case
    updates = torch.from_numpy(matrix)
    result = TrimmedMean(f)(updates)
    n = len(updates)
    expected = np.sort(matrix.astype(np.float64), axis=0)[f : n - f].mean(axis=0)
    assert np.allclose(result.numpy(), expected, rtol=1e-6, atol=1e-4)
    assert torch.equal(TrimmedMean(f)(updates[random.sample(range(n), n)]), result)


@given(cases, st.data())
@settings(deadline=None)
def test_up_to_f_wrong_updates_cannot_leave_the_honest_range(case, data):
    matrix, f = case
    honest = torch.from_numpy(matrix)
    wrong = torch.from_numpy(
        data.draw(arrays(np.float32, (f, matrix.shape[1]), elements=st.floats(-1e30, 1e30, width=32)))
    )
    if len(honest) <= f:
        return
    result = TrimmedMean(f)(torch.cat([wrong, honest]))
    slack = 1e-5 * honest.abs().amax(0) + 1e-6
    assert (result >= honest.amin(0) - slack).all()
    assert (result <= honest.amax(0) + slack).all()


@given(cases, st.integers(-512, 512))
@settings(deadline=None)
def test_moving_every_update_moves_the_result(case, shift):
    matrix, f = case
    updates = torch.from_numpy(np.round(matrix))
    assert torch.allclose(TrimmedMean(f)(updates + shift), TrimmedMean(f)(updates) + shift, rtol=1e-6, atol=1e-3)


def test_without_trimming_it_is_the_uniform_mean():
    updates = torch.randn(9, 100)
    assert torch.allclose(TrimmedMean(0)(updates), Mean()(updates), rtol=0, atol=1e-7)


def test_a_claimed_weight_buys_nothing():
    updates = torch.randn(5, 10)
    assert torch.equal(TrimmedMean(1)(updates, torch.tensor([1, 1, 1, 1, 10**6])), TrimmedMean(1)(updates))


@pytest.mark.parametrize(("f", "n"), [(1, 2), (3, 6), (3, 5), (1, 0)])
def test_the_precondition_is_named_with_the_remedy(f, n):
    message = rf"TrimmedMean\(f={f}\) needs more than {2 * f} updates, got {n}: lower f or raise cohort.min_replies"
    with pytest.raises(PreconditionError, match=message):
        TrimmedMean(f)(torch.ones(n, 3))
    with pytest.raises(ValueError, match=message):
        TrimmedMean(f).check(n)


def test_it_never_silently_trims_nobody():
    # Flower's trimmed mean with n = 4 and beta = 0.2 keeps all four; here f is a count and says what it drops.
    updates = torch.tensor([[0.0], [0.0], [0.0], [1e6]])
    assert TrimmedMean(1)(updates).item() == 0.0


def test_a_negative_f_is_refused():
    with pytest.raises(PreconditionError, match="f must be at least 0"):
        TrimmedMean(-1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(bad):
    updates = torch.zeros(5, 40_000)
    updates[2, 39_999] = bad
    with pytest.raises(PreconditionError, match="NaN or infinity"):
        TrimmedMean(1)(updates)


def test_large_finite_values_are_not_taken_for_infinity():
    updates = torch.full((5, 3), 3e38)
    assert torch.equal(TrimmedMean(1)(updates), updates[0])


def test_the_number_of_threads_and_the_size_of_a_chunk_leave_no_trace(monkeypatch):
    updates = torch.randn(7, 5000)
    whole = TrimmedMean(2)(updates)
    monkeypatch.setattr(module, "CHUNK", 333)
    assert torch.equal(TrimmedMean(2)(updates), whole)
    monkeypatch.setattr(module, "available_cores", lambda: 1)
    assert torch.equal(TrimmedMean(2)(updates), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    updates = torch.tensor([[1.0], [2.0], [300.0]], dtype=dtype)
    assert torch.equal(TrimmedMean(1)(updates), torch.tensor([2.0], dtype=dtype))


@pytest.mark.parametrize("n", range(1, 40))
def test_the_sorting_network_sorts(n):
    # A network that sorts every 0-1 sequence sorts everything; a random half of them for large n.
    rng = np.random.default_rng(n)
    rows = np.array([[i >> k & 1 for k in range(n)] for i in range(2**n)]) if n <= 10 else rng.integers(0, 2, (2000, n))
    for i, j in sorting_network(n):
        rows[:, [i, j]] = np.sort(rows[:, [i, j]], axis=1)
    assert (np.diff(rows, axis=1) >= 0).all()
