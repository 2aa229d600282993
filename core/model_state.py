"""A model as data: what is averaged as one flat float32 vector, what is not averaged beside it.

`flat` holds the trainable parameters first and the floating-point buffers (BatchNorm's running statistics) after them,
so that every aggregator, the gate and a robust rule treat both alike: an attacker gains nothing by hiding in a buffer.
Only the first `layout.num_parameters` values are moved by a server optimizer or a local optimizer. Integer and boolean
buffers and frozen parameters are `fixed`: they keep dtype and shape (0-d included), travel with the model and are never
averaged.

The codec is safetensors: no pickle, every bit kept, written and read without a second copy. Averaged tensors are
float32 while a run lasts, in checkpoints too; only the final model file has them in the dtype that the module declared.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.core.errors import ModelError

_METADATA_KEY = "coterie"


@dataclass(frozen=True)
class Entry:
    """One averaged tensor: its name in the module, its shape and the dtype it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Layout:
    """Which tensor lies where in the flat vector: parameters, then floating-point buffers, each in module order."""

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        """P: values that an optimizer moves."""
        return sum(entry.numel for entry in self.parameters)

    @cached_property
    def size(self) -> int:
        """D: length of the flat vector."""
        return self.num_parameters + sum(entry.numel for entry in self.buffers)

    def views(self, flat: Tensor) -> Iterator[tuple[Entry, Tensor]]:
        """Each entry with its window on `flat[D]`, in its shape, sharing memory."""
        start = 0
        for entry in (*self.parameters, *self.buffers):
            yield entry, flat[start : start + entry.numel].view(entry.shape)
            start += entry.numel


@dataclass(frozen=True)
class ModelState:
    """The state of a model: `flat` float32[D] and the tensors that are never averaged."""

    layout: Layout
    flat: Tensor
    fixed: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        if self.flat.shape != (self.layout.size,) or self.flat.dtype != torch.float32:
            raise ModelError(
                f"the flat vector is {self.flat.dtype}{list(self.flat.shape)}, "
                f"the layout asks for torch.float32[{self.layout.size}]"
            )

    @classmethod
    def from_module(cls, module: nn.Module) -> "ModelState":
        """A copy of a module's state, on the CPU. Non-persistent buffers are left out; tied parameters count once."""
        layout, averaged, fixed = split(module)
        flat = torch.empty(layout.size, dtype=torch.float32)
        for (_, view), tensor in zip(layout.views(flat), averaged, strict=True):
            view.copy_(tensor.detach())
        return cls(layout, flat, {name: tensor.detach().cpu().clone() for name, tensor in fixed.items()})

    def load_into(self, module: nn.Module) -> None:
        """Copy this state into a module of the same layout. Raises ModelError naming the first difference."""
        layout, averaged, fixed = split(module)
        self.check_fits(layout, fixed)
        with torch.no_grad():
            for (_, view), tensor in zip(self.layout.views(self.flat), averaged, strict=True):
                tensor.copy_(view)
            for name, tensor in fixed.items():
                tensor.copy_(self.fixed[name])

    def check_fits(self, layout: Layout, fixed: Mapping[str, Tensor]) -> None:
        """Raise ModelError naming the first tensor in which a model of that layout and those fixed tensors differs."""
        check_layout(layout, self.layout)
        for name in sorted(fixed.keys() | self.fixed.keys()):
            given, wanted = (describe(_entry(name, t[name])) if name in t else "none" for t in (self.fixed, fixed))
            if given != wanted:
                raise ModelError(f"fixed tensors: expected {wanted}, got {given} ({name})")

    def with_flat(self, flat: Tensor) -> "ModelState":
        """The same model with another flat vector."""
        return ModelState(self.layout, flat, self.fixed)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, each in the dtype and shape that the module declared."""
        averaged = {entry.name: view.to(entry.dtype) for entry, view in self.layout.views(self.flat)}
        return {**averaged, **self.fixed}

    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and values: equal exactly when two states are equal bit by bit."""
        digest = hashlib.sha256()
        averaged = [(entry.name, entry.dtype, view) for entry, view in self.layout.views(self.flat)]
        fixed = [(name, tensor.dtype, tensor) for name, tensor in self.fixed.items()]
        for name, dtype, tensor in (*averaged, *fixed):
            digest.update(f"{name}|{dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(
        self, path: Path, extra: Mapping[str, Tensor] | None = None, note: Mapping[str, Any] | None = None
    ) -> None:
        """Write as safetensors. `extra` tensors are stored beside the model, `note` (JSON values) in the header."""

        def listed(entries: tuple[Entry, ...]) -> list[Any]:
            return [(entry.name, entry.shape, str(entry.dtype).removeprefix("torch.")) for entry in entries]

        header = {
            "parameters": listed(self.layout.parameters),
            "buffers": listed(self.layout.buffers),
            "fixed": list(self.fixed),
            "note": dict(note or {}),
        }
        tensors = {"flat": self.flat.contiguous()}
        tensors |= {f"fixed.{name}": tensor.contiguous() for name, tensor in self.fixed.items()}
        tensors |= {f"extra.{name}": tensor.contiguous() for name, tensor in (extra or {}).items()}
        save_file(tensors, path, metadata={_METADATA_KEY: json.dumps(header)})


def save_state_dict(state: ModelState, path: Path) -> None:
    """A plain safetensors file: `safetensors.torch.load_file` gives the module's state dict (tied parameters once)."""
    save_file({name: tensor.contiguous() for name, tensor in state.tensors().items()}, path)


def read_archive(path: Path) -> tuple[ModelState, dict[str, Tensor], dict[str, Any]]:
    """What `ModelState.save` wrote: the state, the extra tensors and the note. Raises ModelError, and OSError.

    The tensors are windows on the file, read when they are used: it may be replaced or removed, but not overwritten.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors: dict[str, Tensor] = file.get_tensors()
            header = json.loads(file.metadata()[_METADATA_KEY])
        parameters, buffers = (
            tuple(Entry(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in header[part])
            for part in ("parameters", "buffers")
        )
        fixed = {name: tensors[f"fixed.{name}"] for name in header["fixed"]}
        state = ModelState(Layout(parameters, buffers), tensors["flat"], fixed)
        note: dict[str, Any] = header["note"]
    except (SafetensorError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"not a model state written by Coterie: {type(error).__name__}: {error}") from error
    extra = {name.removeprefix("extra."): tensor for name, tensor in tensors.items() if name.startswith("extra.")}
    return state, extra, note


def split(module: nn.Module) -> tuple[Layout, list[Tensor], dict[str, Tensor]]:
    """A module's layout, its averaged tensors in that order, and its fixed tensors by name (not copies)."""
    persistent = module.state_dict(keep_vars=True).keys()
    named_parameters = list(module.named_parameters())
    named_buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
    for name, parameter in named_parameters:
        if isinstance(parameter, nn.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} has no shape yet: run one batch through lazy layers in the model factory"
            )
        if parameter.is_complex():
            raise ModelError(f"parameter {name!r} is {parameter.dtype}: complex parameters are not supported")
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ModelError("the model has no trainable parameter (requires_grad is False everywhere)")
    floating = [(name, b) for name, b in named_buffers if b.is_floating_point()]
    fixed = {name: t for name, t in named_parameters if not t.requires_grad}
    fixed |= {name: b for name, b in named_buffers if not b.is_floating_point()}
    layout = Layout(
        tuple(_entry(name, p) for name, p in trainable),
        tuple(_entry(name, b) for name, b in floating),
    )
    return layout, [t for _, t in (*trainable, *floating)], fixed


def check_layout(expected: Layout, actual: Layout) -> None:
    """Raise ModelError naming the first tensor in which two layouts differ (names, order, shapes, dtypes)."""
    for kind in ("parameters", "buffers"):
        wanted: tuple[Entry, ...] = getattr(expected, kind)
        given: tuple[Entry, ...] = getattr(actual, kind)
        for one, other in zip(wanted, given, strict=False):
            if one != other:
                raise ModelError(f"{kind}: expected {describe(one)}, got {describe(other)}")
        if len(wanted) != len(given):
            raise ModelError(f"{kind}: expected {len(wanted)} tensors, got {len(given)}")


def describe(entry: Entry) -> str:
    """An entry as people write it: ``conv1.weight float32[16, 1, 5, 5]``."""
    return f"{entry.name} {str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"


def _entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tuple(tensor.shape), tensor.dtype)


__all__ = ["Entry", "Layout", "ModelState", "check_layout", "describe", "read_archive", "save_state_dict", "split"]
