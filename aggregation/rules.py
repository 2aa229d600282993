"""What an aggregation rule is: n updates to one vector, pure tensor maths with no idea of transport."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Aggregator(Protocol):
    """A rule. Implementations are frozen dataclasses whose fields are the options of a run file."""

    def check(self, num_updates: int) -> None:
        """Raise PreconditionError, naming the inequality, when the rule does not hold for that many updates."""
        ...

    def __call__(self, updates: Tensor, weights: Tensor | None = None, /) -> Tensor:
        """One vector [D] from updates[n, D] and weights[n] (num_examples), in the dtype of the updates."""
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
    """A rule that needs no update twice: it can take them as they come."""

    def stream(self, size: int, max_total_weight: float) -> PartialSum:
        """An empty sum for vectors of length `size` whose weights add up to at most `max_total_weight`."""
        ...
