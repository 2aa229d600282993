"""Clients' own numbers, averaged. A broken metric is no reason to lose an update, or another client's metric."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeGuard

_LARGEST = 1e100
"""Products of two such numbers, and sums of those, stay finite."""


def usable_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that can be averaged: those that are real numbers, finite and at most 1e100 in magnitude."""
    return {name: float(value) for name, value in metrics.items() if _is_usable(value)}


def mean_metrics(pairs: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Weighted mean of each metric over those who sent it, the same in every order.

    pairs: (metrics, weight) for each client. Values that `usable_metrics` drops are left out, and so is a client whose
    weight is not a usable number above 0.
    """
    sent: dict[str, list[tuple[float, float]]] = {}
    for metrics, weight in pairs:
        if not (_is_usable(weight) and weight > 0):
            continue
        for name, value in usable_metrics(metrics).items():
            sent.setdefault(name, []).append((value * float(weight), float(weight)))
    return {
        name: math.fsum(product for product, _ in terms) / math.fsum(weight for _, weight in terms)
        for name, terms in sent.items()
    }


def _is_usable(value: object) -> TypeGuard[float]:
    # NaN compares false; an int too large for a float compares true without being converted.
    return isinstance(value, Real) and not isinstance(value, bool) and bool(abs(value) <= _LARGEST)  # pyright: ignore
