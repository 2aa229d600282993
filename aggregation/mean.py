"""The weighted mean of FedAvg, summed exactly.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", arXiv:1602.05629.

Floating-point sums depend on the order of their terms. Here every term is rounded once, to a fixed point that is the
same for the whole sum, and added as a 64-bit integer: the result does not depend on the order of arrival or on how
updates were spread over partial sums, bit by bit.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from coterie.aggregation import kernels
from coterie.core.errors import PreconditionError

MAX_VALUE = 2.0**20
"""The largest magnitude of an update's entry that a streamed sum takes; the gate refuses updates beyond it."""

_RANGE_BITS = 62


@dataclass(frozen=True)
class Mean:
    """sum(weights_i * updates_i) / sum(weights_i). Any number of updates; no protection against wrong ones."""

    def check(self, num_updates: int) -> None:
        """Raises PreconditionError when there is no update at all."""
        if num_updates < 1:
            raise PreconditionError(f"Mean() needs at least 1 update, got {num_updates}: raise cohort.min_replies")

    def __call__(self, updates: Tensor, weights: Tensor | None = None, /) -> Tensor:
        """The mean [D] of updates[n, D] in their dtype; weights[n] >= 0, default all equal.

        Raises PreconditionError for no updates, entries that are not finite, or weights that are negative or all zero.
        Reads one row at a time.
        """
        self.check(len(updates))
        given = [1.0] * len(updates) if weights is None else [float(weight) for weight in weights]
        if len(given) != len(updates):
            raise PreconditionError(f"Mean() got {len(updates)} updates and {len(given)} weights")
        if not all(weight >= 0 and math.isfinite(weight) for weight in given) or not any(given):
            raise PreconditionError(f"Mean() needs finite weights >= 0 with a sum above 0, got {given[:10]}")
        top = max((kernels.largest(_array(row)) for row in updates if row.numel()), default=0.0)
        if not math.isfinite(top):
            raise PreconditionError("Mean() needs finite updates: one holds NaN or infinity")
        total = WeightedSum(updates.shape[1], math.fsum(given), max_value=top or 1.0)
        for row, weight in zip(updates, given, strict=True):
            total.accumulate(row, weight)
        return total.result().to(updates.dtype)

    def stream(self, size: int, max_total_weight: float) -> "WeightedSum":
        """An empty sum for vectors of length `size` whose weights add up to at most `max_total_weight`."""
        return WeightedSum(size, max_total_weight)


class WeightedSum:
    """A weighted sum in 64-bit fixed point: O(size) memory, the same bits in every order.

    The scale is the largest power of two with max_total_weight * max_value * scale <= 2^62. One rounding step of an
    update therefore costs at most max_value * 2^-62 (2e-13 for the default) in the mean.
    """

    def __init__(self, size: int, max_total_weight: float, max_value: float = MAX_VALUE) -> None:
        if not (max_total_weight > 0 and math.isfinite(max_total_weight)):
            raise PreconditionError(f"max_total_weight = {max_total_weight}: it must be finite and above 0")
        self.max_total_weight = max_total_weight
        self.max_value = max_value
        # frexp: x < 2^exponent, so the product of both bounds and the scale stays below 2^62.
        exponent = math.frexp(max_total_weight)[1] + math.frexp(max_value)[1]
        self._scale = 2.0 ** min(1000, _RANGE_BITS - exponent)
        self._total = np.zeros(size, np.int64)
        self._weight = Fraction(0)

    def accumulate(self, delta: Tensor, weight: float) -> None:
        """Add weight * delta[size]. A refused delta leaves the sum as it was.

        Raises PreconditionError for a wrong size, an entry that is not finite or beyond `max_value`, a weight that is
        negative or not finite, or weights beyond `max_total_weight`.
        """
        if delta.shape != self._total.shape:
            raise PreconditionError(
                f"an update of shape {list(delta.shape)} does not fit a sum of {len(self._total)} values"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise PreconditionError(f"weight = {weight}: it must be finite and at least 0")
        total_weight = self._weight + Fraction(weight)
        if total_weight > Fraction(self.max_total_weight) * (1 + Fraction(1, 2**40)):
            raise PreconditionError(
                f"weights add up to {float(total_weight)}, the sum was made for {self.max_total_weight}"
            )
        values = _array(delta)
        outside = kernels.count_outside(values, self.max_value)
        if outside:
            raise PreconditionError(f"{outside} entries of an update are not finite or beyond {self.max_value}")
        kernels.add_fixed_point(self._total, values, weight * self._scale)
        self._weight = total_weight

    def merge(self, other: "WeightedSum") -> None:
        """Add another sum made with the same bounds."""
        if (self._scale, self._total.shape) != (other._scale, other._total.shape):
            raise PreconditionError("only sums of the same size and bounds can be merged")
        self._total += other._total
        self._weight += other._weight

    def result(self) -> Tensor:
        """The weighted mean, float32[size]. Raises PreconditionError when nothing with a weight was added."""
        if self._weight == 0:
            raise PreconditionError("the sum is empty: no update with a weight above 0 was added")
        return torch.from_numpy(kernels.fixed_point_to_float32(self._total, self._scale * float(self._weight)))


def _array(row: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.floating]]":
    """A row as numpy: a view for float32 and float64, a float32 copy for other dtypes and devices."""
    row = row.detach().cpu()
    return (row if row.dtype in (torch.float32, torch.float64) else row.float()).numpy()
