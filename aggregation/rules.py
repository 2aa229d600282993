"""What an aggregation rule is: n updates to one vector, pure tensor maths with no idea of transport.

A rule is a frozen dataclass whose fields are the options of a run file. One that cannot work with any number of updates
also has `check(num_updates)`, which raises PreconditionError naming the inequality, so that a run is refused before it
starts.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Aggregator(Protocol):
    """A rule that sees all updates of a round at once."""

    def __call__(self, updates: Tensor, weights: Tensor | None = None, /) -> Tensor:
        """One vector [D] from updates[n, D] and weights[n] (None: all equal), in the dtype of the updates."""
        ...


class PartialSum(Protocol):
    """A linear rule's running sum, in O(D) memory."""

    def accumulate(self, delta: Tensor, weight: float) -> None:
        """Add delta[D] with its weight."""
        ...

    def result(self) -> Tensor:
        """The aggregate, float32[D]."""
        ...


@runtime_checkable
class LinearAggregator(Aggregator, Protocol):
    """A rule that needs no update twice: it takes them as they come."""

    def stream(self, size: int, max_total_weight: float) -> PartialSum:
        """An empty sum for vectors of length `size` whose weights add up to at most `max_total_weight`."""
        ...
