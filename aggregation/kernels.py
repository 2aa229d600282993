"""The loops over updates, one pass each, with types; `compiled` holds them for numba, which is untyped.

They release the GIL. Arrays are C-contiguous float32 or float64 unless a shape says otherwise.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def accumulate(total: NDArray[np.int64], values: Array, factor: float, limit: float) -> bool:
    """total[D] += rint(values[D] * factor). False, and total as it was, when a value is NaN or beyond `limit`."""
    limit = values.dtype.type(limit)
    if not _compiled().accumulate(total, values, factor, limit):
        return True
    # The same terms with the other sign: integers cancel exactly.
    _compiled().accumulate(total, values, -factor, limit)
    return False


def sum_rows(updates: Array, factors: NDArray[np.float64], start: int, width: int) -> NDArray[np.int64]:
    """Sum over i of rint(updates[i, c] * factors[i]) for `width` columns c from `start`. All values are finite."""
    # The loop takes four rows at once; rows that are not there have the factor zero.
    return _compiled().sum_rows(updates, np.pad(factors, (0, -len(factors) % 4)), start, width)


def largest(updates: Array, start: int, width: int) -> float:
    """The largest magnitude in `width` columns of updates[n, D] from `start`, or NaN when one is there."""
    # Magnitudes are ordered like their bits, NaN above infinity, and the maximum of integers runs on vector registers.
    bits = updates.view(np.int32 if updates.dtype == np.float32 else np.int64)
    top = _compiled().largest(bits, bits.dtype.type(np.iinfo(bits.dtype).max), start, width)
    return float(bits.dtype.type(top).view(updates.dtype))


def inspect(values: NDArray[np.float32], limit: float) -> tuple[bool, float]:
    """Whether all entries are numbers of at most `limit` in magnitude, and the sum of their squares in float64."""
    outside, squares = _compiled().inspect(values, np.float32(limit))
    return not outside, float(squares)


def trimmed_mean(updates: Array, f: int, pairs: NDArray[np.int64], start: int, width: int) -> NDArray[np.float64]:
    """Mean of the n - 2f middle values in `width` columns of updates[n, D] from `start`. NaN counts as infinity.

    pairs[m, 2]: a sorting network for n values (only its outputs f to n - f - 1 matter).
    """
    return _compiled().trimmed_mean(updates, f, pairs, start, width)


def _compiled() -> Any:
    """Importing numba takes 0.4 s: only a process that aggregates pays for it."""
    from coterie.aggregation import compiled

    return compiled
