"""Loops that numba compiles once per machine and keeps on disk. `kernels` says what each does and gives them types.

Written for vector registers: no branch in an inner loop, flags as wide as the values, rows as slices of their own.
"""

# numba has no types, and inside a compiled function there is nothing that a type checker could follow.
# pyright: basic, reportOptionalMemberAccess=false

import numpy as np
from numba import njit


def _compile(**options):
    """njit with a cache beside the module or in the user's cache folder; in memory where neither can be written."""

    def decorate(function):
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:
            return njit(nogil=True, **options)(function)

    return decorate


@_compile()
def accumulate(total, values, factor, limit):
    outside = np.uint32(0)
    for i in range(values.size):
        value = values[i]
        inside = abs(value) <= limit
        outside |= np.uint32(not inside)
        # Converting a number that int64 cannot hold has no defined result: such entries add zero.
        term = np.float64(value if inside else values.dtype.type(0)) * factor
        total[i] += np.int64(np.rint(term))
    return outside


@_compile()
def sum_rows(updates, factors, start, width):
    total = np.zeros(width, np.int64)
    last = updates.shape[0] - 1
    for i in range(0, factors.size, 4):
        # Four rows at once: the total is read and written a quarter as often.
        a = updates[min(i, last), start : start + width]
        b = updates[min(i + 1, last), start : start + width]
        c = updates[min(i + 2, last), start : start + width]
        d = updates[min(i + 3, last), start : start + width]
        for j in range(width):
            total[j] += (
                np.int64(np.rint(np.float64(a[j]) * factors[i]))
                + np.int64(np.rint(np.float64(b[j]) * factors[i + 1]))
                + np.int64(np.rint(np.float64(c[j]) * factors[i + 2]))
                + np.int64(np.rint(np.float64(d[j]) * factors[i + 3]))
            )
    return total


@_compile()
def largest(bits, mask, start, width):
    top = mask & 0
    for i in range(bits.shape[0]):
        row = bits[i, start : start + width]
        for j in range(width):
            top = max(top, row[j] & mask)
    return top


# Only the order of the additions may change here (squares of float32 are exact in float64): NaN keeps its meaning.
@_compile(fastmath={"reassoc", "contract", "nsz"})
def inspect(values, limit):
    outside = np.uint32(0)
    squares = 0.0
    for i in range(values.size):
        value = values[i]
        outside |= np.uint32(not (abs(value) <= limit))
        wide = np.float64(value)
        squares += wide * wide
    return outside, squares


_BLOCK = 128


@_compile()
def trimmed_mean(updates, f, pairs, start, width):
    n = updates.shape[0]
    out = np.empty(width, np.float64)
    # A block is sorted column by column, all columns at once. What lies beyond `width` is sorted too and never read.
    block = np.zeros((n, _BLOCK), updates.dtype)
    sums = np.empty(_BLOCK, np.float64)
    for offset in range(0, width, _BLOCK):
        count = min(_BLOCK, width - offset)
        for i in range(n):
            source = updates[i, start + offset : start + offset + count]
            target = block[i]
            for c in range(count):
                target[c] = source[c] if source[c] == source[c] else np.inf
        for p in range(pairs.shape[0]):
            low = block[pairs[p, 0]]
            high = block[pairs[p, 1]]
            for c in range(_BLOCK):
                x, y = low[c], high[c]
                low[c] = x if x < y else y
                high[c] = y if x < y else x
        # In sorted order, so that the order of the updates leaves no trace in the rounding.
        sums[:] = 0.0
        for i in range(f, n - f):
            row = block[i]
            for c in range(_BLOCK):
                sums[c] += row[c]
        for c in range(count):
            out[offset + c] = sums[c] / (n - 2 * f)
    return out
