"""How commands print: tables of other people's texts as they are, one JSON object as the last line."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_ANY_WIDTH = 1_000_000


def echo_json(data: Any) -> None:
    """One line that every JSON reader takes."""
    from coterie.server.store import jsonable

    typer.echo(json.dumps(jsonable(data), default=str, allow_nan=False))


def console() -> Console:
    """As wide as the terminal; lines for a file or a pipe stay whole."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_ANY_WIDTH)


def beside(as_json: bool) -> Console:
    """For what comes before the end of a run: not where the JSON goes."""
    return Console(stderr=as_json)


def table(*columns: Column | str) -> Table:
    """A table without lines, whose cells are folded, never cut."""
    made = [Column(column, overflow="fold") if isinstance(column, str) else column for column in columns]
    return Table(*made, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def whole(head: str, texts: Iterable[str]) -> Column:
    """A column that is never folded or cut, however narrow the terminal is."""
    return Column(head, no_wrap=True, min_width=max(map(len, (head, *texts))))


def text(text: str) -> Text:
    """Somebody's text as it is: no markup, one line."""
    from coterie.server.report_history import visible

    return Text(visible(text))


def tell(ending: Mapping[str, Any], console: Console, as_json: bool, next_command: str = "") -> None:
    """How a run ended, `ending` as `coterie simulate --json` prints it."""
    if as_json:
        echo_json(ending)
        return
    rows = {metric: f"{value:.4f}" for metric, value in ending["metrics"].items()}
    clock = f" (the clients' virtual clock: {ending['virtual_seconds']:.1f} s)" if "virtual_seconds" in ending else ""
    rows["rounds"] = f"{ending['rounds']} in {ending['seconds']:.1f} s{clock}"
    rows |= {"weights": f"sha256 {ending['model']['sha256']}", "run": ending["run"]}
    if "directory" in ending:
        rows["files"] = ending["directory"]
    for key, value in rows.items():
        console.print(f"{key:<18} {value}", highlight=False, markup=False, soft_wrap=True)
    if next_command:
        console.print("next:", next_command, highlight=False, markup=False, soft_wrap=True)
