"""How the aggregate moves the global model.

FedAvgM: Hsu et al. 2019, "Measuring the effects of non-identical data distribution for federated visual
classification", arXiv:1909.06335.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from coterie.core.errors import PreconditionError

State = Mapping[str, Tensor]


@runtime_checkable
class ServerOptimizer(Protocol):
    """Options in the object, memory in the state, which a checkpoint keeps.

    It moves the P parameters only: floating-point buffers (the tail of the flat vector) take the plain aggregate.
    """

    def init(self, size: int) -> State:
        """Memory for P = `size` parameters before the first round."""
        ...

    def step(self, params: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """New params[P] and memory, from the aggregate `direction[P]`; the given tensors stay as they are."""
        ...


@dataclass(frozen=True)
class ServerSGD:
    """params + lr * v with v = momentum * v + direction. lr = 1, momentum = 0 is FedAvg: exactly params + direction.

    lr > 0, default 1; 0 <= momentum < 1, default 0 (no memory is kept). Raises PreconditionError for others.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise PreconditionError(f"ServerSGD(lr={self.lr}): lr must be finite and above 0")
        if not 0 <= self.momentum < 1:
            raise PreconditionError(f"ServerSGD(momentum={self.momentum}): momentum must be at least 0 and below 1")

    def init(self, size: int) -> State:
        """v = 0, float32[size], where there is momentum."""
        return {"momentum": torch.zeros(size)} if self.momentum else {}

    def step(self, params: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """New params[P] and v. Raises PreconditionError when direction is not [P]."""
        if params.shape != direction.shape:
            raise PreconditionError(
                f"ServerSGD got params of shape {list(params.shape)} and a direction of shape "
                f"{list(direction.shape)}: they must agree"
            )
        if not self.momentum:
            return torch.add(params, direction, alpha=self.lr), state
        velocity = state["momentum"] * self.momentum + direction
        return torch.add(params, velocity, alpha=self.lr), {"momentum": velocity}
