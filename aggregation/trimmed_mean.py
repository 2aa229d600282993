"""The coordinate-wise trimmed mean.

Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical rates", arXiv:1803.01498.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.aggregation import kernels
from coterie.aggregation.blocks import Array, check_updates, each_block
from coterie.aggregation.mean import Mean
from coterie.core.errors import PreconditionError


@dataclass(frozen=True)
class TrimmedMean:
    """In each coordinate, drop the f smallest and the f largest values and average the rest.

    f: how many updates may be arbitrary, 0 <= f < n/2 (the breakdown point). With at most f wrong updates every
    coordinate of the result lies within the range of the honest ones; an entry that is NaN counts as +infinity and is
    trimmed like any other outlier. f = 0 is the uniform mean. Weights are ignored on purpose: a claimed number of
    records must not buy influence.
    """

    f: int

    def __post_init__(self) -> None:
        if self.f < 0:
            raise PreconditionError(f"TrimmedMean(f={self.f}): f must be at least 0")

    def check(self, num_updates: int) -> None:
        """Raise PreconditionError unless num_updates > 2f."""
        if num_updates <= 2 * self.f:
            raise PreconditionError(
                f"TrimmedMean(f={self.f}) needs more than {2 * self.f} updates, got {num_updates}: "
                f"lower f or raise cohort.min_replies"
            )

    def __call__(self, updates: Tensor, weights: Tensor | None = None) -> Tensor:
        """The trimmed mean [D] of updates[n, D], in their dtype; `weights` are ignored.

        Any permutation of the updates gives the same bits. Beyond the updates and the result it takes less than 64 MB
        for up to 10,000 updates. Raises PreconditionError unless n > 2f, and when more than f values of one coordinate
        are not finite.
        """
        check_updates(updates, f"TrimmedMean(f={self.f})")
        n, size = updates.shape
        self.check(n)
        if self.f == 0:
            return Mean()(updates)
        pairs = _network(n, self.f)
        out = torch.empty(size, dtype=updates.dtype)

        def trim(array: Array, first: int, columns: slice) -> None:
            means = kernels.trimmed_mean(array, self.f, pairs, first, columns.stop - columns.start)
            if not np.isfinite(means).all():
                raise PreconditionError(
                    f"TrimmedMean(f={self.f}) got more than {self.f} values that are NaN or infinite in coordinate "
                    f"{columns.start + int(np.isfinite(means).argmin())}: raise f or put a Gate in front"
                )
            out[columns] = torch.from_numpy(means)

        each_block(updates, trim)
        return out.to(updates.device)


@lru_cache(maxsize=32)
def _network(n: int, f: int) -> NDArray[np.int64]:
    """The part of `sorting_network` that the positions f to n - f - 1 depend on."""
    needed = set(range(f, n - f))
    kept: list[tuple[int, int]] = []
    for pair in reversed(sorting_network(n)):
        if not needed.isdisjoint(pair):
            needed.update(pair)
            kept.append(pair)
    return np.array(kept[::-1], np.int64).reshape(-1, 2)


def sorting_network(n: int) -> list[tuple[int, int]]:
    """Pairs of positions to compare and exchange, in order, that sort any n values.

    Odd-even merge sort (Batcher 1968, doi:10.1145/1468075.1468121) for the next power of two, without the pairs that
    touch positions from n on: those would hold infinities, which never move.
    """
    pairs: list[tuple[int, int]] = []
    run = 1
    while run < n:
        step = run
        while step >= 1:
            for start in range(step % run, n - step, 2 * step):
                for low in range(start, min(start + step, n - step)):
                    if low // (2 * run) == (low + step) // (2 * run):
                        pairs.append((low, low + step))
            step //= 2
        run *= 2
    return pairs
