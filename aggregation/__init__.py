"""n updates to one vector: pure tensor maths, usable alone on plain tensors."""

from collections.abc import Callable, Mapping

from coterie.aggregation.gate import Gate, Refusal, check_tensors
from coterie.aggregation.mean import Mean, WeightedSum
from coterie.aggregation.metrics import mean_metrics, usable_metrics
from coterie.aggregation.rules import Aggregator, LinearAggregator, PartialSum
from coterie.aggregation.server_optimizer import ServerOptimizer, ServerSGD
from coterie.aggregation.trimmed_mean import TrimmedMean
from coterie.core.errors import PreconditionError

AGGREGATORS: Mapping[str, Callable[..., Aggregator]] = {"mean": Mean, "trimmed_mean": TrimmedMean}
SERVER_OPTIMIZERS: Mapping[str, Callable[..., ServerOptimizer]] = {"sgd": ServerSGD}

__all__ = [
    "AGGREGATORS",
    "SERVER_OPTIMIZERS",
    "Aggregator",
    "Gate",
    "LinearAggregator",
    "Mean",
    "PartialSum",
    "PreconditionError",
    "Refusal",
    "ServerOptimizer",
    "ServerSGD",
    "TrimmedMean",
    "WeightedSum",
    "check_tensors",
    "mean_metrics",
    "usable_metrics",
]
