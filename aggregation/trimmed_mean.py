"""The coordinate-wise trimmed mean.

Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical rates", arXiv:1803.01498.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.aggregation import kernels
from coterie.core.errors import PreconditionError

CHUNK = 1 << 15
"""Columns handed to a thread at once: small enough that a converted copy of 100 rows stays under 16 MB."""


@dataclass(frozen=True)
class TrimmedMean:
    """In each coordinate, drop the f smallest and the f largest values and average the rest.

    f: how many updates may be arbitrary, 0 <= f < n/2 (the breakdown point). With at most f wrong updates every
    coordinate of the result lies within the range of the honest ones. Weights are ignored on purpose: a claimed number
    of records must not buy influence.
    """

    f: int

    def __post_init__(self) -> None:
        if self.f < 0:
            raise PreconditionError(f"TrimmedMean(f={self.f}): f must be at least 0")

    def check(self, num_updates: int) -> None:
        """Raises PreconditionError unless num_updates > 2f."""
        if num_updates <= 2 * self.f:
            raise PreconditionError(
                f"TrimmedMean(f={self.f}) needs more than {2 * self.f} updates, got {num_updates}: "
                f"lower f or raise cohort.min_replies"
            )

    def __call__(self, updates: Tensor, weights: Tensor | None = None, /) -> Tensor:
        """The trimmed mean [D] of updates[n, D] in their dtype; `weights` are ignored.

        Raises PreconditionError unless n > 2f and all entries are finite. Uses a few hundred kilobytes beyond the input
        and the result (one converted chunk of columns per thread for dtypes other than float32 and float64).
        """
        n, size = updates.shape
        self.check(n)
        pairs = sorting_network(n)
        out = torch.empty(size, dtype=torch.float64 if updates.dtype == torch.float64 else torch.float32)
        result = out.numpy()
        native = updates.dtype in (torch.float32, torch.float64)

        def chunk(start: int) -> None:
            part = updates[:, start : start + CHUNK].detach().cpu()
            columns = (part if native else part.float()).numpy()
            if not np.isfinite(columns.sum()) and not np.isfinite(columns).all():
                raise PreconditionError(f"TrimmedMean(f={self.f}) needs finite updates: one holds NaN or infinity")
            kernels.trimmed_mean(columns, self.f, pairs, result[start : start + CHUNK])

        _each(chunk, range(0, size, CHUNK))
        return out.to(updates.dtype)


@lru_cache(maxsize=32)
def sorting_network(n: int) -> NDArray[np.int64]:
    """Pairs [m, 2] of positions to compare and exchange, in order, that sort any n values.

    Batcher 1968, odd-even merge sort, for the next power of two, without the pairs that touch positions from n on
    (those would hold infinities, which never move).
    """
    pairs: list[tuple[int, int]] = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                pairs += [
                    (i + j, i + j + k) for i in range(min(k, n - j - k)) if (i + j) // (2 * p) == (i + j + k) // (2 * p)
                ]
            k //= 2
        p *= 2
    return np.array(pairs, np.int64).reshape(-1, 2)


def _each(work: Callable[[int], None], starts: range) -> None:
    """Do the chunks on all cores; the kernels release the GIL. A chunk's result does not depend on who computes it."""
    threads = min(
        len(starts), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if threads <= 1:
        for start in starts:
            work(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, starts):
            pass
