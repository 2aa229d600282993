"""A clock for clients that do not exist: how long each would take, and who vanishes.

A client needs ``seconds_per_example * records * passes * slowness`` virtual seconds, with `local.steps`
``seconds_per_example * steps * records per step * slowness``. Slowness is drawn once per client;
vanishing is drawn per client and round. Both derive from the run's seed.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError
from coterie.core.seeding import numpy_generator

Factors = NDArray[np.float64]


def uniform(num_clients: int, rng: np.random.Generator, /) -> Factors:
    """All clients equally fast."""
    return np.ones(num_clients)


def lognormal(num_clients: int, rng: np.random.Generator, /, sigma: float = 0.5) -> Factors:
    """exp(N(0, sigma^2)): median 1, a long tail of slow ones."""
    return rng.lognormal(0.0, sigma, num_clients)


def stragglers(num_clients: int, rng: np.random.Generator, /, share: float = 0.1, factor: float = 10.0) -> Factors:
    """A random share of the clients is `factor` times slower than the rest."""
    if not 0 <= share <= 1 or not factor > 0:
        raise ConfigError(
            f"simulation.slowness: share = {share}, factor = {factor}: need 0 <= share <= 1 and factor > 0"
        )
    factors = np.ones(num_clients)
    count = at_least_one(share, num_clients, "simulation.slowness.share")
    factors[rng.choice(num_clients, count, replace=False)] = factor
    return factors


def at_least_one(share: float, num_clients: int, key: str) -> int:
    """How many clients a share is. Raises ConfigError for a share above 0 that rounds to nobody."""
    count = round(share * num_clients)
    if share and not count:
        raise ConfigError(f"{key} = {share} of {num_clients} clients is nobody: give at least {1 / num_clients:.3g}")
    return count


SLOWNESS: Mapping[str, Callable[..., Factors]] = {"uniform": uniform, "lognormal": lognormal, "stragglers": stragglers}


def drops_out(seed: int, round: int, client_id: str, chance: float) -> bool:
    """Whether a client vanishes in a round."""
    return chance > 0 and bool(numpy_generator(seed, "dropout", round, client_id).random() < chance)
