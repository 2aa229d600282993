"""A client's own records: which it trains on, and in which order. The same in a simulation and on a real node."""

import numpy as np
from numpy.typing import NDArray

from coterie.core.seeding import numpy_generator


def num_training(num_records: int, holdout: float) -> int:
    """How many of its records a client trains on.

    holdout: the share kept for its own evaluation: at least one record where it is above 0, and never the last one.
    """
    return num_records - (min(num_records - 1, max(1, round(holdout * num_records))) if holdout else 0)


def own_order(num_records: int, seed: int, client_id: str) -> NDArray[np.int64]:
    """An order int64[N] of a client's records; the first `num_training` are for training."""
    return numpy_generator(seed, "holdout", client_id).permutation(num_records)
