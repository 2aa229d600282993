"""Who holds which records.

- natural: one client per key of the data (hospital, person).
- iid: dealt out evenly at random.
- dirichlet: for each label, shares of the clients drawn from Dirichlet(alpha). Yurochkin et al. 2019, arXiv:1905.12022;
  Li et al. 2022,
  arXiv:2102.02079.
- shards: records sorted by label, cut into shards, each client dealt a few. McMahan et al. 2017, arXiv:1602.05629.
- quantity: labels mixed evenly, numbers of records drawn from Dirichlet(alpha). Li et al. 2022, arXiv:2102.02079.

Each is a function ``(population, num_clients, rng, /, options) -> {client id: record indices}``. Every record goes to
exactly one client (natural with fewer clients than keys leaves records out) and every client has at least
`min_records`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError

MAX_ALPHA = 1e6
"""Practically even from here on; the generator of Dirichlet shares breaks down far beyond."""

Indices = NDArray[np.int64]
Partition = dict[str, Indices]


@dataclass(frozen=True)
class Population:
    """What a partition may look at. labels: int[N] class labels, or None; keys: str[N] natural client keys, or None."""

    num_records: int
    labels: Indices | None = None
    keys: NDArray[np.str_] | None = None


def natural(population: Population, num_clients: int | None, rng: np.random.Generator, /) -> Partition:
    """One client per key; with `num_clients` below the number of keys, a random choice of the keys."""
    if population.keys is None:
        raise ConfigError(
            "simulation.partition = 'natural': the task's records have no client keys: choose iid or dirichlet"
        )
    ids = np.unique(population.keys)
    wanted = num_clients or len(ids)
    if wanted > len(ids):
        raise ConfigError(
            f"simulation.clients = {wanted}: the task has {len(ids)} natural clients: leave simulation.clients out, or "
            f"choose another partition, for example simulation.partition = 'dirichlet'"
        )
    if wanted < len(ids):
        ids = np.sort(rng.choice(ids, wanted, replace=False))
    return {str(key): np.flatnonzero(population.keys == key) for key in ids}


def iid(population: Population, num_clients: int, rng: np.random.Generator, /) -> Partition:
    """Dealt out evenly at random; sizes differ by at most one."""
    _check_enough(population, num_clients, 1)
    return _numbered(np.array_split(rng.permutation(population.num_records), num_clients))


def dirichlet(
    population: Population,
    num_clients: int,
    rng: np.random.Generator,
    /,
    alpha: float = 0.5,
    min_records: int = 2,
) -> Partition:
    """Label skew: alpha near 0 gives clients of one label, a large alpha gives IID. Sizes differ too."""
    labels = _labels(population, "dirichlet")
    _check_alpha(alpha)
    _check_enough(population, num_clients, min_records)
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return _numbered(_topped_up([np.concatenate(part) for part in parts], min_records))


def shards(
    population: Population, num_clients: int, rng: np.random.Generator, /, shards_per_client: int = 2
) -> Partition:
    """Records sorted by label, cut into num_clients * shards_per_client shards, dealt at random."""
    labels = _labels(population, "shards")
    if shards_per_client < 1:
        raise ConfigError(f"simulation.partition.shards_per_client = {shards_per_client}: it must be at least 1")
    _check_enough(population, num_clients, shards_per_client)
    order = rng.permutation(population.num_records)
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], num_clients * shards_per_client)
    dealt = rng.permutation(len(pieces)).reshape(num_clients, shards_per_client)
    return _numbered([np.concatenate([pieces[i] for i in row]) for row in dealt])


def quantity(
    population: Population,
    num_clients: int,
    rng: np.random.Generator,
    /,
    alpha: float = 0.5,
    min_records: int = 2,
) -> Partition:
    """Quantity skew: sizes from Dirichlet(alpha), labels mixed evenly."""
    _check_alpha(alpha)
    _check_enough(population, num_clients, min_records)
    shares = rng.dirichlet(np.full(num_clients, alpha))
    cuts = np.round(np.cumsum(shares)[:-1] * population.num_records).astype(int)
    return _numbered(_topped_up(np.split(rng.permutation(population.num_records), cuts), min_records))


PARTITIONS: Mapping[str, Callable[..., Partition]] = {
    "natural": natural,
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "quantity": quantity,
}


def _numbered(parts: list[Indices]) -> Partition:
    return {str(i): part.astype(np.int64) for i, part in enumerate(parts)}


def _topped_up(parts: list[Indices], min_records: int) -> list[Indices]:
    """Give every client `min_records` by taking records, one at a time, from whoever then holds most."""
    for i in range(len(parts)):
        while len(parts[i]) < min_records:
            richest = max(range(len(parts)), key=lambda j: len(parts[j]))
            parts[i] = np.append(parts[i], parts[richest][-1])
            parts[richest] = parts[richest][:-1]
    return parts


def _labels(population: Population, name: str) -> Indices:
    if population.labels is None:
        raise ConfigError(
            f"simulation.partition = {name!r} needs class labels, the task has none: choose iid or quantity"
        )
    return population.labels


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= MAX_ALPHA:
        raise ConfigError(f"simulation.partition.alpha = {alpha}: it must be above 0 and at most {MAX_ALPHA:g}")


def _check_enough(population: Population, num_clients: int, min_records: int) -> None:
    if min_records < 1:
        raise ConfigError(f"simulation.partition.min_records = {min_records}: a client needs at least 1 record")
    if population.num_records < num_clients * min_records:
        raise ConfigError(
            f"simulation.clients = {num_clients}: {population.num_records} training records are too few for "
            f"{min_records} per client: lower simulation.clients"
        )
