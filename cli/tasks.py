"""`coterie tasks`."""

import inspect
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.cli.options import JsonOption


def tasks(as_json: JsonOption = False) -> None:
    """List the built-in tasks and their options.

    Examples:

        coterie tasks

        coterie simulate --task heart
    """
    import json

    from coterie.tasks import TASKS

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "about": (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "),
            "options": {
                p.name: None if p.default is inspect.Parameter.empty else p.default for p in parameters(function)
            },
        }
        for name, function in TASKS.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, default=str))
        return
    table = Table("task", "what it is", "options")
    for row in rows:
        options = ", ".join(name if value is None else f"{name}={value!r}" for name, value in row["options"].items())
        table.add_row(row["name"], row["about"], options)
    console = Console()
    console.print(table)
    console.print("A task of your own: --task package.module:function (coterie init writes one to start from).")


def parameters(function: object) -> list[inspect.Parameter]:
    """The options of a task function, in order."""
    return list(inspect.signature(function).parameters.values()) if callable(function) else []
