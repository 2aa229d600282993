"""What attacking clients do, for evaluation in simulations.

- sign_flip: the update turned round and scaled. Li et al. 2019, arXiv:1811.03761.
- gaussian: noise instead of an update. Blanchard et al. 2017, arXiv:1703.02757.
- label_flip: training on label C-1-y in place of y. Fang et al. 2020, arXiv:1911.11815.
- nan: not a number everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Attack(Protocol):
    """Both halves work on what the client would have used: its targets before training, its update after."""

    def poison_targets(self, targets: Tensor, num_classes: int | None) -> Tensor:
        """Targets[N] to train on instead of the true ones; must not change the given tensor."""
        ...

    def poison_update(self, delta: Tensor, generator: torch.Generator) -> None:
        """Change delta[D] in place before it is sent."""
        ...


@dataclass(frozen=True)
class NoAttack:
    """Honest."""

    def poison_targets(self, targets: Tensor, num_classes: int | None) -> Tensor:
        return targets

    def poison_update(self, delta: Tensor, generator: torch.Generator) -> None:
        """Nothing."""


@dataclass(frozen=True)
class SignFlip(NoAttack):
    """Sends -scale times its update."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"sign_flip needs a scale above 0, got {self.scale}")

    def poison_update(self, delta: Tensor, generator: torch.Generator) -> None:
        delta.mul_(-self.scale)


@dataclass(frozen=True)
class Gaussian(NoAttack):
    """Sends N(0, std^2) in every coordinate."""

    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"gaussian needs a std of at least 0, got {self.std}")

    def poison_update(self, delta: Tensor, generator: torch.Generator) -> None:
        delta.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class LabelFlip(NoAttack):
    """Trains on label C-1-y in place of y; needs class labels."""

    def poison_targets(self, targets: Tensor, num_classes: int | None) -> Tensor:
        if num_classes is None:
            raise ValueError("the label_flip attack needs class labels, the task has none")
        return num_classes - 1 - targets


@dataclass(frozen=True)
class NotANumber(NoAttack):
    """Sends NaN in every coordinate."""

    def poison_update(self, delta: Tensor, generator: torch.Generator) -> None:
        delta.fill_(torch.nan)


ATTACKS: Mapping[str, Callable[..., Attack]] = {
    "none": NoAttack,
    "sign_flip": SignFlip,
    "gaussian": Gaussian,
    "label_flip": LabelFlip,
    "nan": NotANumber,
}
