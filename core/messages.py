"""What the coordinator and the clients say to each other, and the seam between them.

A `Channel` is how the coordinator reaches clients. Simulation engines and the real federation are the two kinds; the
coordinator never asks which one it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from coterie.core.model_state import ModelState


@dataclass(frozen=True)
class ClientInfo:
    """A participant as the coordinator knows it. `num_examples` is what the client declares before any round."""

    id: str
    num_examples: int


class Purpose(StrEnum):
    """What a request asks for."""

    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Request:
    """One client's work in one round, starting from `model`, which is the global model of version `version`."""

    client_id: str
    round: int
    purpose: Purpose
    version: int
    model: ModelState


@dataclass(frozen=True)
class Update:
    """What a client returns from training.

    delta: float32[D], local minus global, in the layout of `ModelState.flat`. A channel may lend its own memory: the
    values hold only until the next reply is taken, so whoever keeps them copies them.
    num_examples: records that the client trained on, its weight.
    metrics: the client's own numbers by name, averaged over the clients that sent the name.
    """

    client_id: str
    round: int
    base_version: int
    delta: Tensor
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Evaluation:
    """What a client returns from evaluating the global model on its own records."""

    client_id: str
    round: int
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Failure:
    """Why there is no result. `kind` is one word for counting (crashed, dropped, late, ...), `reason` a sentence."""

    client_id: str
    round: int
    kind: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """One answer to one request: a result or a failure, never an exception.

    elapsed: seconds from the start of the dispatch to this reply, on the channel's clock (virtual in a simulation).
    """

    result: Update | Evaluation | Failure
    elapsed: float = 0.0


SURPLUS = "surplus"
"""The kind of a failure that is none: the client was asked in case others fail, and they did not."""


class Channel(Protocol):
    """How the coordinator reaches clients."""

    def clients(self) -> Sequence[ClientInfo]:
        """Everyone who could be asked now, in an order that does not change between calls."""
        ...

    def dispatch(
        self, requests: Sequence[Request], deadline: float | None = None, enough: int | None = None
    ) -> Iterator[Reply]:
        """Send requests and yield replies as they come, one per request; a failure is a reply with its reason.

        deadline: seconds on the channel's clock; whoever has not answered by then is yielded as a Failure("late").
        enough: so many results end the wait; whoever has not answered by then is yielded as a Failure(SURPLUS). An
        answer that comes after its round has closed may be yielded later, as a Failure of that round.
        """
        ...

    def close(self) -> None:
        """Release everything; safe to call twice."""
        ...
