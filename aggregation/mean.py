"""The weighted mean of FedAvg, summed exactly.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", arXiv:1602.05629.

Floating-point sums depend on the order of their terms. Here every term is rounded once, to a fixed point that is the
same for the whole sum, and added as a 64-bit integer: the order of arrival and the way updates were spread over partial
sums leave no trace.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from coterie.aggregation import kernels
from coterie.aggregation.blocks import WIDTH, Array, check_updates, each_block
from coterie.core.errors import PreconditionError

MAX_VALUE = 2.0**20
"""The largest magnitude of an update's entry that a streamed sum takes; the gate refuses updates beyond it."""


@dataclass(frozen=True)
class Mean:
    """sum(weights_i * updates_i) / sum(weights_i). Any number of updates; no protection against wrong ones.

    Breakdown point 0: one client with an unbounded update moves the result anywhere.
    """

    def check(self, num_updates: int) -> None:
        """Raise PreconditionError when there is no update at all."""
        if num_updates < 1:
            raise PreconditionError(f"Mean() needs at least 1 update, got {num_updates}: raise cohort.min_replies")

    def __call__(self, updates: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean [D] of updates[n, D], in their dtype; weights[n] >= 0, default all equal.

        The fixed point fits the largest entry there is: beyond the float64 rounding of each product, the error is at
        most n * 2^-62 of that entry. Any permutation of the updates (with their weights) gives the same bits. Reads the
        updates twice, in blocks of columns, row after row. Raises PreconditionError for no updates, an entry that is
        not finite, or weights that are negative, not finite or all zero.
        """
        check_updates(updates, "Mean()")
        n, size = updates.shape
        self.check(n)
        shares = _weights(weights, n)
        total_weight = math.fsum(shares)

        def top(array: Array, first: int, columns: slice) -> float:
            return kernels.largest(array, first, columns.stop - columns.start)

        tops = each_block(updates, top)
        if not all(map(math.isfinite, tops)):
            raise PreconditionError("Mean() needs finite updates, one holds NaN or infinity: put a Gate in front")
        scale = _scale(total_weight, max(tops, default=0.0))
        factors = np.array(shares) * scale
        out = torch.empty(size, dtype=updates.dtype)

        def mean(array: Array, first: int, columns: slice) -> None:
            total = kernels.sum_rows(array, factors, first, columns.stop - columns.start)
            out[columns] = torch.from_numpy(total / (scale * total_weight))

        each_block(updates, mean)
        return out.to(updates.device)

    def stream(self, size: int, max_total_weight: float) -> "WeightedSum":
        """An empty sum for vectors of length `size` whose weights add up to at most `max_total_weight`."""
        return WeightedSum(size, max_total_weight)


class WeightedSum:
    """A weighted sum in 64-bit fixed point: 8 bytes per entry, the same bits in every order and for every split.

    The scale s is the largest power of two with max_total_weight * MAX_VALUE * s <= 2^62. Each update is rounded once,
    by at most MAX_VALUE * 2^-62 = 2.3e-13 (absolute) in the mean when the weights add up to max_total_weight, by as
    many times more as they stay below it.
    """

    def __init__(self, size: int, max_total_weight: float) -> None:
        """Raises PreconditionError unless max_total_weight is finite and above 0."""
        if not (max_total_weight > 0 and math.isfinite(max_total_weight)):
            raise PreconditionError(f"max_total_weight = {max_total_weight}: it must be finite and above 0")
        self.max_total_weight = max_total_weight
        self._scale = _scale(max_total_weight, MAX_VALUE)
        self._total = np.zeros(size, np.int64)
        # Exact, whatever floats the weights are.
        self._weight = Fraction(0)

    def accumulate(self, delta: Tensor, weight: float) -> None:
        """Add weight * delta[size]. A refused delta leaves the sum as it was.

        Raises PreconditionError for a wrong size, an entry that is not finite or beyond MAX_VALUE in magnitude, a
        weight that is negative or not finite, or weights that add up to more than max_total_weight.
        """
        if delta.shape != self._total.shape:
            raise PreconditionError(
                f"an update of shape {list(delta.shape)} does not fit a sum of {len(self._total)} values"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise PreconditionError(f"weight = {weight}: it must be finite and at least 0")
        total_weight = self._within_bounds(self._weight + Fraction(weight))
        delta = delta.detach().cpu().contiguous()
        values = (delta if delta.dtype in (torch.float32, torch.float64) else delta.float()).numpy()
        if not kernels.accumulate(self._total, values, weight * self._scale, MAX_VALUE):
            place = int(np.argmin(np.abs(values) <= MAX_VALUE))
            raise PreconditionError(
                f"entry {place} of an update is {values[place]}: "
                f"it must be finite and at most {MAX_VALUE:.0f} in magnitude"
            )
        self._weight = total_weight

    def merge(self, other: "WeightedSum") -> None:
        """Add another sum of the same size and max_total_weight. A refused one leaves this sum as it was.

        Raises PreconditionError when they differ in either, or when the weights together go beyond max_total_weight.
        """
        mine, others = (len(self._total), self.max_total_weight), (len(other._total), other.max_total_weight)
        if mine != others:
            raise PreconditionError(
                f"sums of (size, max_total_weight) = {mine} and {others} cannot be merged: make them alike"
            )
        self._weight = self._within_bounds(self._weight + other._weight)
        self._total += other._total

    def result(self) -> Tensor:
        """The weighted mean so far, float32[size]. Raises PreconditionError when no weight above 0 was added."""
        if self._weight == 0:
            raise PreconditionError("the sum is empty: no update with a weight above 0 was added")
        divisor = self._scale * float(self._weight)
        out = np.empty(len(self._total), np.float32)
        for start in range(0, len(out), WIDTH):
            out[start : start + WIDTH] = self._total[start : start + WIDTH] / divisor
        return torch.from_numpy(out)  # pyright: ignore[reportUnknownMemberType] (torch leaves from_numpy untyped)

    def _within_bounds(self, total_weight: Fraction) -> Fraction:
        # A bound added up in floats may be below the exact sum by their rounding; 2^63 leaves room for that.
        if total_weight > Fraction(self.max_total_weight) * (1 + Fraction(1, 2**40)):
            raise PreconditionError(
                f"the weights add up to {float(total_weight)}, the sum was made for at most {self.max_total_weight}: "
                f"raise max_total_weight"
            )
        return total_weight


def _scale(max_total_weight: float, max_value: float) -> float:
    """The largest power of two s (below 2^1024) with max_total_weight * max(max_value, 2^-900) * s <= 2^62."""
    weight, weight_exponent = math.frexp(max_total_weight)
    value, value_exponent = math.frexp(max(max_value, 2.0**-900))
    # Each fraction is in [1/2, 1), their product in [1/4, 1).
    spare = 2 if weight * value == 0.25 else 1 if weight * value <= 0.5 else 0
    return math.ldexp(
        1.0, min(1023, 62 - weight_exponent - value_exponent + spare)
    )  # the largest float is below 2^1024


def _weights(weights: Tensor | None, n: int) -> list[float]:
    """Weights as floats. Raises PreconditionError naming the first that cannot be one."""
    if weights is None:
        return [1.0] * n
    values: list[float] = weights.double().flatten().tolist()  # pyright: ignore[reportUnknownMemberType] (untyped in torch)
    if weights.shape != (n,):
        raise PreconditionError(
            f"Mean() got {n} updates and weights of shape {list(weights.shape)}: give one weight each"
        )
    for i, weight in enumerate(values):
        if not (weight >= 0 and math.isfinite(weight)):
            raise PreconditionError(f"Mean() got weights[{i}] = {weight}: weights must be finite and at least 0")
    if not any(values):
        raise PreconditionError(f"Mean() got {n} weights that are all 0: at least one must be above 0")
    return values
