"""Clients' own numbers, averaged."""

import math
from collections.abc import Iterable, Mapping


def mean_metrics(answers: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Weighted mean of each metric over the clients that sent it. answers: (metrics, weight) per client.

    A value that is not a finite number is left out: a client's broken metric is no reason to lose its update, or
    another client's.
    """
    sums: dict[str, list[tuple[float, float]]] = {}
    for metrics, weight in answers:
        for name, value in metrics.items():
            if is_number(value):
                sums.setdefault(name, []).append((float(value) * weight, weight))
    return {
        name: math.fsum(product for product, _ in pairs) / math.fsum(weight for _, weight in pairs)
        for name, pairs in sums.items()
        if math.fsum(weight for _, weight in pairs) > 0
    }


def is_number(value: object) -> bool:
    """Whether a client's metric can be averaged."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
