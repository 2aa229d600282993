"""The trimmed mean: right, the same bits in every order, and within the honest range whatever f clients send."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coterie.aggregation import Mean, PreconditionError, TrimmedMean, blocks
from coterie.aggregation.trimmed_mean import sorting_network


def rows(seed: int, n: int, size: int) -> torch.Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def reference(updates: torch.Tensor, f: int) -> torch.Tensor:
    kept = np.sort(updates.double().numpy(), axis=0)[f : len(updates) - f]
    return torch.from_numpy(kept.mean(axis=0))


@st.composite
def cases(draw) -> tuple[torch.Tensor, int]:
    n = draw(st.integers(1, 24))
    matrix = draw(arrays.arrays(np.float32, (n, draw(st.integers(1, 6))), elements=st.floats(-1e6, 1e6, width=32)))
    return torch.from_numpy(matrix), draw(st.integers(0, (n - 1) // 2))


def test_a_small_case_by_hand():
    updates = torch.tensor([[1.0, 5.0], [2.0, -100.0], [3.0, 6.0], [4.0, 10.0], [1000.0, 7.0]])
    assert TrimmedMean(1)(updates).tolist() == [3.0, 6.0]
    assert TrimmedMean(2)(updates).tolist() == [3.0, 6.0]


def test_weights_buy_no_influence():
    updates = rows(0, 7, 20)
    assert torch.equal(TrimmedMean(2)(updates, torch.tensor([1e6] + [1.0] * 6)), TrimmedMean(2)(updates))


@settings(deadline=None)
@given(cases())
def test_it_agrees_with_float64(case):
    updates, f = case
    scale = float(updates.abs().max())
    torch.testing.assert_close(TrimmedMean(f)(updates).double(), reference(updates, f), rtol=6e-8, atol=1e-15 * scale)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 20, 33, 64, 100, 129])
def test_it_is_right_for_every_size_of_cohort(n):
    updates = rows(n, n, 300)
    for f in {0, 1, n // 5, (n - 1) // 2}:
        if n > 2 * f:
            torch.testing.assert_close(TrimmedMean(f)(updates), reference(updates, f).float(), rtol=2e-7, atol=1e-9)


@settings(deadline=None)
@given(cases(), st.randoms())
def test_a_permutation_gives_the_same_bits(case, rng):
    updates, f = case
    order = list(range(len(updates)))
    rng.shuffle(order)
    assert torch.equal(TrimmedMean(f)(updates[order]), TrimmedMean(f)(updates))


@settings(deadline=None)
@given(cases(), st.floats(-1e6, 1e6))
def test_moving_all_updates_moves_the_result(case, shift):
    updates, f = case[0].double(), case[1]
    torch.testing.assert_close(TrimmedMean(f)(updates + shift), TrimmedMean(f)(updates) + shift, rtol=1e-12, atol=1e-8)


@settings(deadline=None)
@given(cases(), st.data())
def test_f_wrong_updates_cannot_leave_the_honest_range(case, data):
    honest, f = case
    wrong = data.draw(
        arrays.arrays(
            np.float32, (f, honest.shape[1]), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
        )
    )
    honest = torch.cat([honest, honest[: f + 1]])  # enough of them for n > 2f
    result = TrimmedMean(f)(torch.cat([torch.from_numpy(wrong), honest]))
    slack = honest.abs().amax(0) * 1e-6
    if f == 0:  # the mean: one fixed point for all coordinates, fitted to the largest entry
        slack += honest.abs().max() * len(honest) * 2.0**-62
    assert bool((result >= honest.amin(0) - slack).all() and (result <= honest.amax(0) + slack).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_more_wrong_values_than_f_are_refused_by_coordinate(bad):
    updates = rows(1, 9, 40_000)
    updates[:3, 35_000] = bad
    with pytest.raises(
        PreconditionError, match=r"more than 2 values that are NaN or infinite in coordinate 35000: raise f"
    ):
        TrimmedMean(2)(updates)


def test_a_refusal_ends_the_call_also_where_blocks_are_converted():
    updates = torch.full((9, 200_000), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(PreconditionError, match="NaN or infinite in coordinate"):
        TrimmedMean(2)(updates)


def test_large_finite_values_are_not_taken_for_infinity():
    updates = torch.full((5, 3), 3e38)
    assert torch.equal(TrimmedMean(1)(updates), updates[0])


def test_it_never_silently_trims_nobody():
    """Flower's trimmed mean with n = 4 and beta = 0.2 keeps all four; here f is a count."""
    assert TrimmedMean(1)(torch.tensor([[0.0], [0.0], [0.0], [1e6]])).tolist() == [0.0]


def test_f_zero_is_the_uniform_mean():
    updates = rows(2, 9, 500)
    assert torch.equal(TrimmedMean(0)(updates), Mean()(updates))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype):
    updates = rows(3, 9, 300).to(dtype)
    result = TrimmedMean(2)(updates)
    assert result.dtype == dtype
    torch.testing.assert_close(result, reference(updates, 2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_threads_nor_block_width_show_in_the_bits(monkeypatch, dtype):
    updates = rows(4, 11, 10_001).to(dtype)
    expected = TrimmedMean(3)(updates)
    for threads, width in ((1, 100), (3, 1000), (4, 4097)):
        monkeypatch.setattr(blocks, "available_cores", lambda threads=threads: threads)
        monkeypatch.setattr(blocks, "WIDTH", width)
        assert torch.equal(TrimmedMean(3)(updates), expected)
        assert torch.equal(TrimmedMean(3)(updates.T.contiguous().T), expected)


def test_the_updates_stay_as_they_were():
    updates = rows(5, 5, 300)
    before = updates.clone()
    TrimmedMean(1)(updates)
    assert torch.equal(updates, before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_less_than_64_mb_beyond_the_updates(dtype):
    updates = torch.ones(48, 1_000_000, dtype=dtype)
    TrimmedMean(5)(updates[:, :1000])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _memory("VmRSS")
    TrimmedMean(5)(updates)
    assert _memory("VmHWM") - before < 64e6


def _memory(line: str) -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return float(next(text for text in status if text.startswith(line)).split()[1]) * 1024


def test_too_few_updates_are_refused_with_the_inequality():
    with pytest.raises(PreconditionError) as error:
        TrimmedMean(3)(torch.zeros(5, 2))
    assert str(error.value) == "TrimmedMean(f=3) needs more than 6 updates, got 5: lower f or raise cohort.min_replies"
    with pytest.raises(ValueError, match=r"needs more than 6 updates, got 6"):
        TrimmedMean(3).check(6)
    TrimmedMean(3).check(7)


def test_a_negative_f_is_refused():
    with pytest.raises(PreconditionError, match=r"TrimmedMean\(f=-1\): f must be at least 0"):
        TrimmedMean(-1)


def test_updates_of_another_form_are_refused():
    with pytest.raises(
        PreconditionError, match=r"TrimmedMean\(f=1\) needs floating-point updates\[n, D\], got int64\[3, 2\]"
    ):
        TrimmedMean(1)(torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("n", range(1, 13))
def test_the_network_sorts(n):
    """A network that sorts every sequence of zeros and ones sorts everything (Knuth, vol. 3, 5.3.4, theorem Z)."""
    columns = np.array(list(itertools.product([0, 1], repeat=n))).T.copy()
    for low, high in sorting_network(n):
        columns[[low, high]] = np.minimum(columns[low], columns[high]), np.maximum(columns[low], columns[high])
    assert (np.diff(columns, axis=0) >= 0).all()
