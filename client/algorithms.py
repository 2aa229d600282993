"""What moves the parameters during local training, each written once for one client and for many.

Everything here is elementwise in the parameters and works in place on float32 tensors of shape [..., P]: [P] for one
client, [K, P] for K clients trained at once.

- Momentum and Nesterov SGD: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".
- Adam: Kingma and Ba 2015, arXiv:1412.6980.
- FedProx: Li et al. 2020, arXiv:1812.06127.
- Cosine schedule: Loshchilov and Hutter 2017, arXiv:1608.03983.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

State = dict[str, Tensor]


@runtime_checkable
class Optimizer(Protocol):
    """A local optimizer: options in the object, memory in the state."""

    def init(self, params: Tensor) -> State:
        """Fresh memory for one round of one client (or K clients)."""
        ...

    def step(self, params: Tensor, grads: Tensor, state: State, lr: float) -> None:
        """Move `params` in place; `grads` may be overwritten."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as torch.optim.SGD defines it.

    momentum, weight_decay: 0 turns them off; nesterov needs momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise ValueError(
                f"SGD needs 0 <= momentum < 1 and weight_decay >= 0, got {self.momentum}, {self.weight_decay}"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("SGD with nesterov needs a momentum above 0")

    def init(self, params: Tensor) -> State:
        return {"momentum": torch.zeros_like(params)} if self.momentum else {}

    def step(self, params: Tensor, grads: Tensor, state: State, lr: float) -> None:
        if self.weight_decay:
            grads.add_(params, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["momentum"].mul_(self.momentum).add_(grads)
            grads = grads.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        params.add_(grads, alpha=-lr)


@dataclass(frozen=True)
class Adam:
    """Adam as torch.optim.Adam defines it; its memory starts afresh in every round."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps > 0 and self.weight_decay >= 0):
            raise ValueError(f"Adam needs 0 <= beta1, beta2 < 1, eps > 0 and weight_decay >= 0, got {self}")

    def init(self, params: Tensor) -> State:
        return {"m": torch.zeros_like(params), "v": torch.zeros_like(params), "t": torch.zeros(())}

    def step(self, params: Tensor, grads: Tensor, state: State, lr: float) -> None:
        if self.weight_decay:
            grads.add_(params, alpha=self.weight_decay)
        t = float(state["t"].add_(1))
        m = state["m"].lerp_(grads, 1 - self.beta1)
        v = state["v"].mul_(self.beta2).addcmul_(grads, grads, value=1 - self.beta2)
        denominator = v.sqrt().div_(math.sqrt(1 - self.beta2**t)).add_(self.eps)
        params.addcdiv_(m, denominator, value=-lr / (1 - self.beta1**t))


@runtime_checkable
class LocalAlgorithm(Protocol):
    """What a method adds to plain local training."""

    def after_step(self, params: Tensor, start: Tensor, lr: float) -> None:
        """Correct `params` in place after an optimizer step; `start` holds the global parameters of the round."""
        ...


@dataclass(frozen=True)
class Plain:
    """No correction: FedAvg's local training."""

    def after_step(self, params: Tensor, start: Tensor, lr: float) -> None:
        """Nothing."""


@dataclass(frozen=True)
class FedProx:
    """The proximal term mu/2 ||w - w_global||^2, applied exactly after each step (implicit step).

    w <- (w + lr mu w_global) / (1 + lr mu). It equals the usual gradient term to first order in lr mu, and is stable
    for every mu: the usual form diverges once lr mu > 2. mu > 0.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not (self.mu > 0 and math.isfinite(self.mu)):
            raise ValueError(f"FedProx needs a finite mu > 0, got {self.mu}: use the plain algorithm for mu = 0")

    def after_step(self, params: Tensor, start: Tensor, lr: float) -> None:
        pull = lr * self.mu
        params.lerp_(start, pull / (1 + pull))


@runtime_checkable
class Schedule(Protocol):
    """A learning rate by round: a factor on the base rate."""

    def factor(self, round: int, rounds: int) -> float:
        """Factor in round `round` = 1 .. `rounds`."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always the base rate."""

    def factor(self, round: int, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 down to `end`, which the round after the last would reach, after `warmup` rounds of linear
    growth."""

    end: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.end <= 1 or self.warmup < 0:
            raise ValueError(f"a cosine schedule needs 0 <= end <= 1 and warmup >= 0, got {self.end}, {self.warmup}")

    def factor(self, round: int, rounds: int) -> float:
        if round <= self.warmup:
            return round / (self.warmup + 1)
        progress = (round - self.warmup - 1) / (rounds - self.warmup)
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Exponential:
    """Multiplied by `gamma` after every round."""

    gamma: float = 0.99

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"an exponential schedule needs gamma > 0, got {self.gamma}")

    def factor(self, round: int, rounds: int) -> float:
        return self.gamma ** (round - 1)


@dataclass(frozen=True)
class Step:
    """Multiplied by `gamma` after every `every` rounds."""

    every: int = 10
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1 or not self.gamma > 0:
            raise ValueError(f"a step schedule needs every >= 1 and gamma > 0, got {self.every}, {self.gamma}")

    def factor(self, round: int, rounds: int) -> float:
        return self.gamma ** ((round - 1) // self.every)


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam}
LOCAL_ALGORITHMS: Mapping[str, Callable[..., LocalAlgorithm]] = {"plain": Plain, "fedprox": FedProx}
SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "exponential": Exponential,
    "step": Step,
}


def clip_(grads: Tensor, clip_norm: float) -> None:
    """Scale each gradient of `grads[..., P]` in place so that its L2 norm is at most `clip_norm`."""
    if math.isinf(clip_norm):
        return
    norm = grads.norm(dim=-1, keepdim=True)
    grads.mul_((clip_norm / norm.clamp_min(1e-12)).clamp_max(1.0))
