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
from coterie.core.model_state import Entry, Layout
from coterie.core.run_config import GateConfig

_NORM_ROUNDING = 1e-6
"""Relative slack for a client that clips to the limit itself, in float32."""


@dataclass(frozen=True)
class Refusal:
    """kind: one word for counting; reason: a sentence with the value and the limit."""

    kind: str
    reason: str


class Gate:
    """Judges the updates of one round after another. `open` starts a round.

    Refusals in the order in which they are looked for: not_asked, stale, duplicate, shape, dtype, num_examples,
    not_finite, magnitude, norm.
    """

    def __init__(self, size: int, config: GateConfig, declared: Mapping[str, int]) -> None:
        """size: D. declared: num_examples that each client declared beforehand, 0 where it declared nothing."""
        self._size = size
        self._config = config
        self._declared = declared
        self._round = self._version = -1
        self._awaited: set[str] = set()
        self._answered: set[str] = set()

    def open(self, round: int, version: int, cohort: Iterable[str]) -> None:
        """Start a round: only the cohort's first updates to the global model of that version count."""
        self._round, self._version = round, version
        self._awaited, self._answered = set(cohort), set()

    def judge(self, update: Update) -> Refusal | None:
        """Why an update cannot be used, or None. Never raises for anything that a client chose.

        A client's first update of the round is its answer, even when it is refused for what it holds.
        """
        return self._judge_sender(update) or self._judge_form(update.delta) or self._judge_content(update)

    def _judge_sender(self, update: Update) -> Refusal | None:
        client_id = update.client_id
        if client_id not in self._awaited:
            return Refusal("not_asked", f"{client_id} is not in the cohort of round {self._round}")
        if update.round != self._round or update.base_version != self._version:
            return Refusal(
                "stale",
                f"the update is for round {_shown(update.round)} from model {_shown(update.base_version)}, "
                f"this is round {self._round} from model {self._version}",
            )
        if client_id in self._answered:
            return Refusal(
                "duplicate", f"{client_id} has answered already in round {self._round}: its first answer counts"
            )
        self._answered.add(client_id)
        return None

    def _judge_form(self, delta: object) -> Refusal | None:
        if not isinstance(delta, Tensor) or delta.layout != torch.strided:
            return Refusal(
                "dtype", f"the update is a {type(delta).__name__}, the model asks for a dense float32 tensor"
            )
        if delta.shape != (self._size,):
            return Refusal("shape", f"the update has shape {list(delta.shape)}, the model asks for [{self._size}]")
        if delta.dtype != torch.float32:
            return Refusal("dtype", f"the update is {_name(delta.dtype)}, the model asks for float32")
        return None

    def _judge_content(self, update: Update) -> Refusal | None:
        count: object = update.num_examples
        if type(count) is not int:
            return Refusal(
                "num_examples", f"num_examples = {_shown(count)} is a {type(count).__name__}, it must be an int"
            )
        cap = self._config.max_num_examples
        declared = self._declared.get(update.client_id, 0) or cap
        if not 0 < count <= min(cap, declared):
            limit = f"the {declared} that it declared" if declared < cap else f"gate.max_num_examples = {cap}"
            return Refusal("num_examples", f"num_examples = {_shown(count)}: it must be from 1 to {limit}")
        delta = update.delta.detach()
        usable, squares = kernels.inspect(delta.cpu().contiguous().numpy(), MAX_VALUE)
        if not usable:
            return _name_values(delta)
        norm, limit = math.sqrt(squares), self._config.max_norm
        if norm > limit * (1 + _NORM_ROUNDING):
            return Refusal("norm", f"the update's L2 norm is {norm:.6g}, gate.max_norm = {limit:.6g}")
        return None


def check_tensors(layout: Layout, tensors: Mapping[str, Tensor]) -> Refusal | None:
    """Judge a named set of tensors against a layout, or None when names, order, shapes and dtypes are the model's own.

    The kinds of refusal are layers (missing, unknown or in another order), shape and dtype.
    """
    wanted = {entry.name: entry for entry in (*layout.parameters, *layout.buffers)}
    missing = [name for name in wanted if name not in tensors]
    unknown = [name for name in tensors if name not in wanted]
    if missing or unknown:
        return Refusal(
            "layers", f"layers missing: {_listed(missing)}; layers that the model has not: {_listed(unknown)}"
        )
    for place, (name, expected) in enumerate(zip(tensors, wanted, strict=True)):
        if name != expected:
            return Refusal(
                "layers", f"layer {place} is {name}, the model has {expected} there: the order must be the model's"
            )
    return next(filter(None, (_judge_tensor(entry, tensors[name]) for name, entry in wanted.items())), None)


def _judge_tensor(entry: Entry, tensor: object) -> Refusal | None:
    asked = _name(entry.dtype)
    if not isinstance(tensor, Tensor):
        return Refusal("dtype", f"{entry.name} is a {type(tensor).__name__}, the model asks for a {asked} tensor")
    if tensor.shape != entry.shape:
        return Refusal("shape", f"{entry.name} has shape {list(tensor.shape)}, the model asks for {list(entry.shape)}")
    if tensor.dtype != entry.dtype:
        return Refusal("dtype", f"{entry.name} is {_name(tensor.dtype)}, the model asks for {asked}")
    return None


def _name_values(delta: Tensor) -> Refusal:
    broken = int((~torch.isfinite(delta)).sum())
    if broken:
        return Refusal("not_finite", f"{broken} of {delta.numel()} values are NaN or infinite")
    return Refusal(
        "magnitude",
        f"the largest value is {float(delta.abs().max()):.6g} in magnitude, at most {MAX_VALUE:.0f} can be summed",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    """A few names: a client may send any number of them, of any length."""
    few = ", ".join(_shown(name) for name in names[:3]) or "none"
    return few if len(names) <= 3 else f"{few} and {len(names) - 3} more"


def _shown(value: object) -> str:
    """What a client sent, as it goes into a sentence: short, whatever it is."""
    try:
        text = str(value)
    except ValueError:  # an int of more digits than Python prints
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
