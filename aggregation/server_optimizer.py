"""How the aggregate moves the global model.

FedAvgM: Hsu et al. 2019, "Measuring the effects of non-identical data distribution for federated visual
classification", arXiv:1909.06335.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie.core.errors import PreconditionError

State = Mapping[str, Tensor]


class ServerOptimizer(Protocol):
    """Options in the object, memory in the state, which a checkpoint keeps."""

    def init(self, size: int) -> State:
        """Memory for P = `size` parameters before the first round."""
        ...

    def step(self, params: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """New params[P] and memory, from the aggregate `direction[P]`; the given tensors stay as they are."""
        ...


@dataclass(frozen=True)
class ServerSGD:
    """params + lr * v with v = momentum * v + direction. lr = 1 and momentum = 0 are FedAvg: params + direction.

    lr > 0; 0 <= momentum < 1.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr) and 0 <= self.momentum < 1):
            raise PreconditionError(
                f"server sgd needs lr > 0 and 0 <= momentum < 1, got lr={self.lr}, momentum={self.momentum}"
            )

    def init(self, size: int) -> State:
        return {"momentum": torch.zeros(size)} if self.momentum else {}

    def step(self, params: Tensor, direction: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.momentum:
            return torch.add(params, direction, alpha=self.lr), state
        velocity = state["momentum"] * self.momentum + direction
        return torch.add(params, velocity, alpha=self.lr), {"momentum": velocity}
