"""Clients' metrics are averaged over those who sent them, and no client's number can spoil another's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.aggregation import mean_metrics, usable_metrics

numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))


def test_each_metric_is_averaged_over_the_clients_that_sent_it():
    pairs = [({"loss": 1.0, "auc": 0.5}, 10), ({"loss": 3.0}, 30), ({"other": 7}, 5)]
    assert mean_metrics(pairs) == {"loss": 2.5, "auc": 0.5, "other": 7.0}


@pytest.mark.parametrize(
    "broken", [math.nan, math.inf, -math.inf, "high", None, True, [1.0], 10**400, 1e308, 1j, np.float32("nan")]
)
def test_a_broken_value_is_left_out_and_costs_nobody_else(broken):
    assert usable_metrics({"loss": broken, "acc": 1}) == {"acc": 1.0}
    assert mean_metrics([({"loss": broken, "acc": 0.5}, 10), ({"loss": 2.0}, 30)]) == {"loss": 2.0, "acc": 0.5}


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, 10**400, "many", None, True])
def test_a_client_without_a_usable_weight_is_left_out(weight):
    assert mean_metrics([({"loss": 9.0}, weight), ({"loss": 2.0}, 30)]) == {"loss": 2.0}
    assert mean_metrics([({"loss": 9.0}, weight)]) == {}


def test_numpy_numbers_count():
    assert usable_metrics({"a": np.float32(0.5), "b": np.int64(3), "c": np.float64(2)}) == {
        "a": 0.5,
        "b": 3.0,
        "c": 2.0,
    }


def test_no_answers_give_no_metrics():
    assert mean_metrics([]) == {}


@settings(deadline=None)
@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), numbers), numbers)), st.randoms())
def test_whatever_clients_send_the_means_are_finite_and_independent_of_order(pairs, random):
    means = mean_metrics(pairs)
    assert all(math.isfinite(value) for value in means.values())
    shuffled = random.sample(pairs, len(pairs))
    assert mean_metrics(shuffled) == means
