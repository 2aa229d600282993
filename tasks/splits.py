"""Which records are held out: always the same ones, whatever the run's seed."""

import numpy as np
from numpy.typing import NDArray


def stratified_split(groups: NDArray[np.generic], test_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (train, test), each sorted, with `test_fraction` of every group held out (at least one, if it has two or
    more)."""
    rng = np.random.default_rng(20_240_229)
    test: list[NDArray[np.int64]] = []
    for group in np.unique(groups):
        rows = rng.permutation(np.flatnonzero(groups == group))
        held_out = max(round(test_fraction * len(rows)), 1 if len(rows) > 1 and test_fraction > 0 else 0)
        test.append(rows[:held_out])
    held = np.sort(np.concatenate(test)) if test else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(groups)), held), held
