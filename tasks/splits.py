"""Which records are held out: always the same ones, whatever the run's seed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def stratified_split(
    strata: Sequence[NDArray[np.generic]], test_fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (train, test), each sorted. strata: one array[N] per criterion, the most important first (label, client).

    Records are shuffled, put in order of the strata, and every 1/test_fraction-th is held out: each stratum, and each
    group within it, gives its share to within one record.
    """
    count = len(strata[0])
    shuffled = np.random.default_rng(20_240_229).permutation(count)
    order = shuffled[np.lexsort([stratum[shuffled] for stratum in reversed(strata)])]
    # Half a step in, so that a group of half the stride already gives one.
    marks = np.floor(np.arange(count + 1) * test_fraction + 0.5)
    held_out = np.diff(marks) > 0
    return np.sort(order[~held_out]), np.sort(order[held_out])
