"""Partitions: every record goes to one client, every client has enough, and the same seed deals the same way."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from coterie.core.errors import ConfigError
from coterie.simulations.partitions import PARTITIONS, Population, dirichlet, iid, natural, quantity, shards


def population(n=400, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    return Population(n, rng.integers(0, classes, n), np.array([f"site{i % 7}" for i in range(n)]))


def rng(seed=1):
    return np.random.default_rng(seed)


@given(st.sampled_from(["iid", "dirichlet", "shards", "quantity"]), st.integers(1, 40), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_every_record_goes_to_exactly_one_client_and_nobody_goes_without(name, clients, seed):
    partition = PARTITIONS[name](population(seed=seed), clients, rng(seed))
    assert list(partition) == [str(i) for i in range(clients)]
    assert np.array_equal(np.sort(np.concatenate(list(partition.values()))), np.arange(400))
    assert min(len(rows) for rows in partition.values()) >= 2


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_the_same_seed_deals_the_same_way(name):
    clients = None if name == "natural" else 10
    one, other = (PARTITIONS[name](population(), clients, rng(3)) for _ in range(2))
    assert all(np.array_equal(one[key], other[key]) for key in one)


def label_spread(partition, labels):
    """Mean number of different labels per client."""
    return np.mean([len(np.unique(labels[rows])) for rows in partition.values()])


def test_a_small_alpha_skews_the_labels_and_a_large_one_does_not():
    people = population(4000)
    spread = [label_spread(dirichlet(people, 20, rng(), alpha), people.labels) for alpha in (0.01, 0.5, 100)]
    assert spread[0] < 4 < spread[1] < spread[2]
    assert spread[2] > 9.5


def test_shards_give_few_labels():
    people = population(4000)
    assert label_spread(shards(people, 20, rng(), 2), people.labels) <= 4


def test_quantity_skews_sizes_and_iid_does_not():
    sizes = [len(rows) for rows in quantity(population(4000), 20, rng(), 0.3).values()]
    assert max(sizes) > 5 * np.median(sizes)
    sizes = [len(rows) for rows in iid(population(4003), 20, rng()).values()]
    assert max(sizes) - min(sizes) <= 1


def test_natural_clients_are_the_keys():
    people = population()
    partition = natural(people, None, rng())
    assert list(partition) == [f"site{i}" for i in range(7)]
    assert all((people.keys[rows] == key).all() for key, rows in partition.items())
    assert len(natural(people, 3, rng())) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: natural(Population(10), None, rng()), "the task's records have no client keys"),
        (lambda: natural(population(), 8, rng()), "simulation.clients = 8: the task has 7 natural clients"),
        (lambda: dirichlet(Population(10), 2, rng()), "needs class labels, the task has none: choose iid or quantity"),
        (lambda: dirichlet(population(), 2, rng(), 0.0), "alpha = 0.0: it must be above 0"),
        (lambda: iid(population(), 401, rng()), "simulation.clients = 401: 400 training records are too few"),
        (lambda: shards(population(), 2, rng(), 0), "shards_per_client = 0: it must be at least 1"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_the_remedy(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
