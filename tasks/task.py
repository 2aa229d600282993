"""A task: model, loss, metrics and records. This is what a user writes to bring a problem of their own."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.core.errors import TaskError
from coterie.core.model_state import ModelState
from coterie.core.seeding import derive_seed

Metric = Callable[[Tensor, Tensor], float]
"""outputs[N, ...], targets[N, ...] to one number. Computed on all outputs of a set at once, so AUC is exact."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""outputs[B, ...], targets[B, ...] to a scalar: the mean over the batch, as torch.nn.functional has it."""


@dataclass(frozen=True)
class Records:
    """Records in memory.

    inputs: Tensor[N, ...]; targets: Tensor[N, ...]; keys: one natural client key (hospital, person) per record, or
    None.
    """

    inputs: Tensor
    targets: Tensor
    keys: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def sha256(self) -> str:
        """Hash of all records and keys: equal exactly when nothing in them has changed."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.targets):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digest.update(b"" if self.keys is None else "\n".join(self.keys.tolist()).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """One learning problem.

    model: makes a fresh torch module; called under the run's seed. Its output goes to `loss` and to `metrics`.
    train: the records that the clients hold. test: the held-out global set.
    loss: mean loss of a batch. metrics: each on a whole set; the first one is the headline.
    num_classes: size of the label set when targets are one integer class label per record, else None (label partitions
    then do not apply).
    """

    name: str
    model: Callable[[], nn.Module]
    train: Records
    test: Records
    loss: Loss
    metrics: Mapping[str, Metric]
    num_classes: int | None = None
    label_names: tuple[str, ...] = ()


def measure(outputs: Tensor, targets: Tensor, loss: Loss, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics in the task's order, then the mean loss, of outputs[N, ...] against targets[N, ...].

    Raises TaskError naming the metric or the loss that raised.
    """
    values: dict[str, float] = {}
    for name, function in (*metrics.items(), ("loss", loss)):
        try:
            values[name] = float(function(outputs, targets))
        except Exception as error:
            what = "the loss" if name == "loss" else f"the metric {name!r}"
            raise TaskError(f"{what} raised {type(error).__name__} on {len(outputs)} records: {error}") from error
    return values


def initial_model(task: Task, seed: int) -> ModelState:
    """The model of round 0, drawn under the run's seed without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        return ModelState.from_module(task.model())
