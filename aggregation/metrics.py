"""Clients' own numbers, averaged. A broken metric is no reason to lose an update, or another client's metric."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real

_LARGEST = 1e100
"""Products of two such numbers, and sums of those, stay finite."""


def usable_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that can be averaged: those that are real numbers, finite and at most 1e100 in magnitude."""
    numbers = {name: _number(value) for name, value in metrics.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def mean_metrics(pairs: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Weighted mean of each metric over those who sent it, the same in every order.

    pairs: (metrics, weight) for each client. Values that `usable_metrics` drops are left out, and so is a client whose
    weight is not such a number above 0.
    """
    sent: dict[str, list[tuple[float, float]]] = {}
    for metrics, claimed in pairs:
        weight = _number(claimed)
        if weight is None or weight <= 0:
            continue
        for name, value in usable_metrics(metrics).items():
            sent.setdefault(name, []).append((value * weight, weight))
    return {
        name: math.fsum(product for product, _ in terms) / math.fsum(weight for _, weight in terms)
        for name, terms in sent.items()
    }


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        return None
    return number if abs(number) <= _LARGEST else None
