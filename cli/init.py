"""`coterie init`: a commented run file and a task file to start from."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

TASK_FILE = '''"""A task of your own. Try it with: coterie simulate run.toml"""

import torch
import torch.nn.functional as F
from torch import nn

from coterie.tasks import Records, Task
from coterie.tasks.metrics import accuracy


def model() -> nn.Module:
    """A fresh model; any torch module will do."""
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


def make(num_records: int = 4000) -> Task:
    """Called once by `coterie simulate`; its parameters can be set as task.num_records and so on."""
    # Replace these lines: load your records into tensors. Here two noisy half-spaces stand in for them.
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_records, 20, generator=generator)
    targets = (inputs[:, :3].sum(1) + 0.5 * torch.randn(num_records, generator=generator) > 0).long()
    held_out = num_records // 5
    return Task(
        name="my_task",
        model=model,
        train=Records(inputs[held_out:], targets[held_out:]),  # keys=... gives each record its client
        test=Records(inputs[:held_out], targets[:held_out]),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        num_classes=2,
    )
'''


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write run.toml and my_task.py.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write a commented run.toml and my_task.py, a task of your own to start from.

    Example: coterie init study && cd study && coterie simulate run.toml
    """
    files = {"run.toml": run_file(), "my_task.py": TASK_FILE}
    there = [name for name in files if (directory / name).exists()]
    if there and not force:
        raise ConfigError(
            f"{directory / there[0]} exists already: choose another directory, or overwrite it with --force"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from None
    where = "" if directory == Path() else f"cd {directory} && "
    Console().print(f"wrote {', '.join(files)}; next: {where}coterie simulate run.toml", highlight=False)


def run_file() -> str:
    """A run file with every key, its meaning and its default; what is commented out has no fixed default."""
    from coterie.core.run_config import RunConfig

    config = RunConfig.from_dict(
        {"task": {"name": "my_task:make"}, "cohort": {"size": 10}, "simulation": {"clients": 50}}
    )
    lines = [
        "# A run of Coterie. Every key is here, with its default or a value to start from.",
        "# What is commented out is chosen for you. inf means no limit.",
    ]
    sections: list[tuple[str, BaseModel]] = []
    for key, field in RunConfig.model_fields.items():
        value = getattr(config, key)
        if hasattr(value, "model_fields") and key != "task" and not _is_choice(value):
            sections.append((key, value))
        else:
            lines += _entry(key, value, field)
    for key, section in sections:
        lines += ["", f"[{key}]  # {(inspect.getdoc(type(section)) or '').splitlines()[0]}"]
        for name, field in type(section).model_fields.items():
            lines += _entry(name, getattr(section, name), field)
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, field: "FieldInfo") -> list[str]:
    about = f"  # {field.description}" if field.description else ""
    if value is None:
        return [f"# {key} = {_toml((field.examples or [''])[0])}{about}"]
    return [f"{key} = {_toml(value)}{about}"]


def _is_choice(value: Any) -> bool:
    from coterie.core.choice import Choice

    return isinstance(value, Choice)


def _toml(value: Any) -> str:
    if _is_choice(value):
        value = value.model_dump()
        return _toml(value["name"]) if len(value) == 1 else _toml(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)
