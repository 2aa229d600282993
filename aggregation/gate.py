"""The gate in front of every aggregator: judges each update alone, drops what cannot be right, and says why.

What it refuses never reaches the rule, so one client's garbage cannot change another client's result or end the round.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.aggregation import kernels
from coterie.aggregation.mean import MAX_VALUE
from coterie.core.messages import Update
from coterie.core.model_state import Layout, describe
from coterie.core.run_config import GateConfig


@dataclass(frozen=True)
class Refusal:
    """kind: one word for counting; reason: a sentence with the value and the limit."""

    kind: str
    reason: str


class Gate:
    """Judges the updates of one round after another. `open` starts a round."""

    def __init__(self, size: int, config: GateConfig, declared: Mapping[str, int]) -> None:
        """size: D. declared: num_examples that each client declared beforehand; 0 where it declared nothing."""
        self._size = size
        self._config = config
        self._declared = declared
        self._round = self._version = -1
        self._awaited: set[str] = set()
        self._seen: set[str] = set()

    def open(self, round: int, version: int, cohort: Iterable[str]) -> None:
        """Start a round: only the cohort's first updates to the global model of that version count."""
        self._round, self._version = round, version
        self._awaited, self._seen = set(cohort), set()

    def judge(self, update: Update) -> Refusal | None:
        """Why an update cannot be used, or None. A client's first update of the round counts, whatever it is."""
        client_id = update.client_id
        if client_id not in self._awaited:
            return Refusal("not_asked", f"{client_id} is not in the cohort of round {self._round}")
        if update.round != self._round or update.base_version != self._version:
            return Refusal(
                "stale",
                f"the update is for round {update.round} from model {update.base_version}, "
                f"this is round {self._round} from model {self._version}",
            )
        if client_id in self._seen:
            return Refusal(
                "duplicate", f"{client_id} has answered already in round {self._round}; its first answer counts"
            )
        self._seen.add(client_id)
        return self._judge_count(update) or self._judge_values(update.delta)

    def _judge_count(self, update: Update) -> Refusal | None:
        count: object = update.num_examples
        declared = self._declared.get(update.client_id, 0)
        most = min(self._config.max_num_examples, declared or self._config.max_num_examples)
        if isinstance(count, bool) or not isinstance(count, int):
            return Refusal("num_examples", f"num_examples = {count!r} is not a whole number")
        if not 0 < count <= most:
            limit = "it declared" if most == declared else "gate.max_num_examples allows"
            return Refusal("num_examples", f"num_examples = {count}: it must be from 1 to the {most} that {limit}")
        return None

    def _judge_values(self, delta: Tensor) -> Refusal | None:
        if delta.dtype != torch.float32:
            return Refusal("dtype", f"the update is {delta.dtype}, the model asks for torch.float32")
        if delta.shape != (self._size,):
            return Refusal("shape", f"the update has shape {list(delta.shape)}, the model asks for [{self._size}]")
        values = delta.detach().cpu().numpy()
        outside, squares = kernels.inspect(values, MAX_VALUE)
        if outside:
            broken = int((~torch.isfinite(delta)).sum())
            if broken:
                return Refusal("not_finite", f"{broken} of {self._size} values are NaN or infinite")
            return Refusal(
                "magnitude", f"{outside} values are beyond {MAX_VALUE:.0f} in magnitude: the training diverged"
            )
        norm = math.sqrt(squares)
        if norm > self._config.max_norm:
            return Refusal(
                "norm", f"the update's L2 norm is {norm:.4g}, gate.max_norm allows {self._config.max_norm:.4g}"
            )
        return None


def check_tensors(layout: Layout, tensors: Mapping[str, Tensor]) -> Refusal | None:
    """Judge a named set of tensors against a layout: names, order, shapes and dtypes must be the model's own."""
    wanted = {entry.name: entry for entry in (*layout.parameters, *layout.buffers)}
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted]
    if missing or extra:
        return Refusal("layers", f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(extra) or 'none'}")
    if list(tensors) != list(wanted):
        first = next(i for i, (one, other) in enumerate(zip(tensors, wanted, strict=True)) if one != other)
        return Refusal("layers", f"layer {first} is {list(tensors)[first]}, the model has {list(wanted)[first]} there")
    for name, tensor in tensors.items():
        entry = wanted[name]
        if tuple(tensor.shape) != entry.shape:
            return Refusal("shape", f"{name} has shape {list(tensor.shape)}, the model asks for {describe(entry)}")
        if tensor.dtype != entry.dtype:
            return Refusal("dtype", f"{name} is {tensor.dtype}, the model asks for {describe(entry)}")
    return None
