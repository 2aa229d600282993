"""Compiled loops over updates, one pass each. They release the GIL and are compiled once per machine (numba's
cache)."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]

# numba is untyped; these wrappers are where its functions get their types.


def add_fixed_point(total: NDArray[np.int64], values: Array, factor: float) -> None:
    """total[D] += rint(values[D] * factor), in place."""
    _add_fixed_point(total, values, factor)


def fixed_point_to_float32(total: NDArray[np.int64], divisor: float) -> NDArray[np.float32]:
    """float32(total[D] / divisor)."""
    return _fixed_point_to_float32(total, divisor)


def count_outside(values: Array, limit: float) -> int:
    """How many entries of values[D] are not finite or larger than `limit` in magnitude."""
    return int(_count_outside(values, values.dtype.type(limit)))


def largest(values: Array) -> float:
    """The largest magnitude in values[D]; NaN when there is one."""
    return float(_largest(values))


def inspect(values: NDArray[np.float32], limit: float) -> tuple[int, float]:
    """How many entries are not finite or beyond `limit`, and the sum of squares in float64."""
    outside, squares = _inspect(values, np.float32(limit))
    return int(outside), float(squares)


def trimmed_mean(updates: Array, f: int, pairs: NDArray[np.int64], out: Array) -> None:
    """out[C] = mean of the n - 2f middle values in each column of updates[n, C].

    pairs[m, 2]: a sorting network for n values. Columns are sorted a block at a time, all of a block's columns at once,
    so the comparisons run on whole vector registers.
    """
    _trimmed_mean(updates, f, pairs, out)


@njit(cache=True, nogil=True)
def _add_fixed_point(total, values, factor):  # pyright: ignore
    for i in range(values.size):
        total[i] += np.int64(np.rint(np.float64(values[i]) * factor))


@njit(cache=True, nogil=True)
def _fixed_point_to_float32(total, divisor):  # pyright: ignore
    out = np.empty(total.size, np.float32)
    for i in range(total.size):
        out[i] = np.float32(np.float64(total[i]) / divisor)
    return out


@njit(cache=True, nogil=True)
def _count_outside(values, limit):  # pyright: ignore
    outside = 0
    for i in range(values.size):
        outside += not (abs(values[i]) <= limit)
    return outside


@njit(cache=True, nogil=True)
def _largest(values):  # pyright: ignore
    top = abs(values[0])
    for i in range(values.size):
        size = abs(values[i])
        if not size <= top:
            top = size
            if np.isnan(size):
                break
    return top


# Only the order of the additions may change here: NaN and infinities keep their meaning.
@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _inspect(values, limit):  # pyright: ignore
    outside = 0
    squares = 0.0
    for i in range(values.size):
        value = values[i]
        outside += not (abs(value) <= limit)
        wide = np.float64(value)
        squares += wide * wide
    return outside, squares


_BLOCK = 256


@njit(cache=True, nogil=True)
def _trimmed_mean(updates, f, pairs, out):  # pyright: ignore
    n, columns = updates.shape
    block = np.empty((n, _BLOCK), updates.dtype)
    sums = np.empty(_BLOCK, np.float64)
    for start in range(0, columns, _BLOCK):
        width = min(_BLOCK, columns - start)
        for i in range(n):
            for c in range(width):
                block[i, c] = updates[i, start + c]
        for p in range(pairs.shape[0]):
            upper, lower = block[pairs[p, 0]], block[pairs[p, 1]]
            for c in range(_BLOCK):
                x, y = upper[c], lower[c]
                upper[c] = x if x < y else y
                lower[c] = y if x < y else x
        sums[:] = 0.0
        for i in range(f, n - f):
            row = block[i]
            for c in range(_BLOCK):
                sums[c] += row[c]
        for c in range(width):
            out[start + c] = sums[c] / (n - 2 * f)
