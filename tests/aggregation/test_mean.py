"""The mean: right to float64, the same bits in every order, and refused where it has no answer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coterie.aggregation import Mean, PreconditionError, blocks

values = st.floats(-1e6, 1e6, width=32)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=values)


def rows(seed: int, n: int, size: int) -> torch.Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def test_weights_count():
    updates = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert Mean()(updates, torch.tensor([1.0, 3.0])).tolist() == [2.5, 5.0]


def test_without_weights_all_count_alike():
    updates = torch.tensor([[1.0, -2.0], [3.0, 6.0], [5.0, 2.0]])
    assert Mean()(updates).tolist() == [3.0, 2.0]


def test_a_weight_of_zero_takes_no_part():
    assert Mean()(torch.tensor([[1.0], [100.0]]), torch.tensor([2.0, 0.0])).tolist() == [1.0]


@settings(deadline=None)
@given(matrices, st.data())
def test_a_permutation_gives_the_same_bits(matrix, data):
    updates = torch.from_numpy(matrix)
    weights = torch.tensor(data.draw(st.lists(st.floats(0.01, 1e4), min_size=len(matrix), max_size=len(matrix))))
    order = data.draw(st.permutations(range(len(matrix))))
    assert torch.equal(Mean()(updates[order], weights[order]), Mean()(updates, weights))


@settings(deadline=None)
@given(matrices, values)
def test_moving_all_updates_moves_the_mean(matrix, shift):
    updates = torch.from_numpy(matrix).double()
    torch.testing.assert_close(Mean()(updates + shift), Mean()(updates) + shift, rtol=1e-12, atol=1e-8)


@settings(deadline=None)
@given(matrices, st.data())
def test_it_agrees_with_float64(matrix, data):
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=len(matrix), max_size=len(matrix)))
    expected = np.average(matrix.astype(np.float64), axis=0, weights=weights)
    scale = float(np.abs(matrix).max())
    for dtype, tolerance in ((torch.float32, 6e-8), (torch.float64, 1e-15)):
        got = Mean()(torch.from_numpy(matrix).to(dtype), torch.tensor(weights)).numpy()
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("magnitude", [1e-250, 1e-30, 1.0, 1e30, 1e300])
def test_it_is_precise_at_every_magnitude(magnitude):
    updates = rows(0, 5, 40).double() * magnitude
    torch.testing.assert_close(Mean()(updates) / magnitude, updates.mean(0) / magnitude, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype):
    updates = rows(1, 4, 100).to(dtype)
    mean = Mean()(updates)
    assert mean.dtype == dtype
    torch.testing.assert_close(mean, updates.double().mean(0).to(dtype))


def test_tiny_entries_survive_beside_large_ones():
    updates = torch.tensor([[1000.0, 1e-9], [-1000.0, 1e-9]])
    torch.testing.assert_close(Mean()(updates), torch.tensor([0.0, 1e-9]), rtol=1e-6, atol=0)


def test_all_zero_updates_have_the_mean_zero():
    assert Mean()(torch.zeros(3, 4)).tolist() == [0.0] * 4


def test_an_empty_vector_is_averaged_to_an_empty_vector():
    assert Mean()(torch.zeros(3, 0)).shape == (0,)


def test_neither_threads_nor_block_width_show_in_the_bits(monkeypatch):
    updates, weights = rows(2, 7, 10_001), torch.arange(1.0, 8.0)
    expected = Mean()(updates, weights)
    for threads, width in ((1, 100), (3, 1000), (4, 4097)):
        monkeypatch.setattr(blocks, "available_cores", lambda threads=threads: threads)
        monkeypatch.setattr(blocks, "WIDTH", width)
        assert torch.equal(Mean()(updates, weights), expected)
        assert torch.equal(Mean()(updates.T.contiguous().T, weights), expected)


def test_memory_mapped_updates_are_read_in_place(tmp_path):
    matrix = rows(3, 6, 70_000).numpy()
    matrix.tofile(tmp_path / "updates.bin")
    mapped = torch.from_numpy(np.memmap(tmp_path / "updates.bin", np.float32, "r+", shape=matrix.shape))
    lent = blocks.each_block(mapped, lambda array, first, columns: np.shares_memory(array, mapped.numpy()))
    assert all(lent)
    assert torch.equal(Mean()(mapped), Mean()(torch.from_numpy(matrix)))


def test_the_updates_stay_as_they_were():
    updates = rows(4, 3, 50)
    before = updates.clone()
    Mean()(updates.requires_grad_(), torch.ones(3))
    assert torch.equal(updates, before)


@pytest.mark.parametrize(
    ("updates", "weights", "message"),
    [
        (torch.zeros(0, 3), None, r"Mean\(\) needs at least 1 update, got 0: raise cohort.min_replies"),
        (torch.zeros(3), None, r"Mean\(\) needs floating-point updates\[n, D\], got float32\[3\]"),
        (torch.zeros(2, 3, dtype=torch.int64), None, r"floating-point updates\[n, D\], got int64\[2, 3\]"),
        (torch.tensor([[1.0], [torch.nan]]), None, r"Mean\(\) needs finite updates"),
        (torch.tensor([[1.0], [-torch.inf]]).double(), None, r"Mean\(\) needs finite updates"),
        (torch.zeros(2, 3), torch.ones(3), r"got 2 updates and weights of shape \[3\]"),
        (torch.zeros(2, 3), torch.tensor([1.0, -1.0]), r"weights\[1\] = -1.0: weights must be finite and at least 0"),
        (torch.zeros(2, 3), torch.tensor([torch.nan, 1.0]), r"weights\[0\] = nan"),
        (torch.zeros(2, 3), torch.tensor([1.0, torch.inf]), r"weights\[1\] = inf"),
        (torch.zeros(2, 3), torch.zeros(2), r"2 weights that are all 0"),
    ],
)
def test_what_has_no_mean_is_refused_by_name(updates, weights, message):
    with pytest.raises(PreconditionError, match=message):
        Mean()(updates, weights)
