"""`coterie runs`: list, show, compare, report, export, resume."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from coterie.cli import printing
from coterie.cli.options import DEFAULT_HOME, HomeOption, JsonOption, QuietOption, command

if TYPE_CHECKING:
    from coterie.server.store import RunRecord, Store

app = typer.Typer(help="What has been run: list, show, compare, report, export, resume.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="The run's id, the beginning of it, or 'last'.", metavar="RUN")]
RunsArgument = Annotated[list[str], typer.Argument(help="Runs: ids, beginnings of them, or 'last'.", metavar="RUN...")]

_KEY_WIDTH = 30
_REASON = 400


@app.command("list")
def list_runs(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List all runs, the newest first.

    Example: coterie runs list
    """
    store = _open(home)
    rows = [_row(run, home) for run in store.runs()] if store else []
    if as_json:
        printing.echo_json(rows)
        return
    if not rows:
        typer.echo(_none_yet(home))
        return
    table = printing.table(
        printing.whole("run", (row["run"] for row in rows)),
        *("label", "task", "strategy"),
        printing.whole("status", (row["status"] for row in rows)),
        printing.whole("rounds", (f"{row['rounds_done']}/{row['rounds']}" for row in rows)),
        "result",
    )
    for row in rows:
        result = _told(dict(list(row["metrics"].items())[:1]))
        done = f"{row['rounds_done']}/{row['rounds']}"
        cells = (row["run"], row["name"], row["task"], row["strategy"], row["status"], done, result)
        table.add_row(*map(printing.text, cells))
    printing.console().print(table)


@app.command()
def show(run: RunArgument, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Show one run: how it stands, its last numbers, who failed or was refused and why.

    Example: coterie runs show last
    """
    from coterie.server.report_data import by_round, ranked, read_story

    store, (record,) = _find(home, [run])
    story = read_story(record, store.events(record.id))
    row = _row(record, home)
    lost = ranked(loss.word for loss in story.lost)
    evaluations = by_round(story.held_out)
    row |= {"lost": dict(lost), "reason": (story.reason or None) if row["status"] == "failed" else None}
    if as_json:
        printing.echo_json(row | {"evaluations": evaluations, "training": by_round(story.training)})
        return
    keys = ("run", "name", "task", "strategy", "status", "reason", "created", "directory")
    lines = [(key, str(row[key])) for key in keys if row[key]]
    lines.append(("rounds", f"{record.rounds_done} of {record.rounds}"))
    lines += [(f"round {round}", _told(metrics)) for round, metrics in list(evaluations.items())[-1:]]
    for word, count in lost:
        reason = next(loss.reason for loss in story.lost if loss.word == word)
        lines.append(("lost", f"{count} x {word}: {reason if len(reason) <= _REASON else f'{reason[:_REASON]}...'}"))
    if story.diverged:
        lines.append(("hint", f"training diverged: lower local.lr = {story.setting('local.lr')}"))
    if row["status"] in ("interrupted", "failed", "killed"):
        lines.append(("next", command(home, "runs", "resume", record.id)))
    width = max(len(key) for key, _ in lines)
    console = printing.console()
    for key, value in lines:
        console.print(printing.text(f"{key:<{width}}  {value}"), soft_wrap=True)


@app.command()
def compare(runs: RunsArgument, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Put runs side by side: where their run files differ, and how they ended.

    Example: coterie runs compare 20260101-101500-1a2b last
    """
    from coterie.server.report_data import read_story
    from coterie.server.report_labels import differences, settings

    _, records = _find(home, runs)
    ids = [record.id for record in records]
    found = differences([settings(read_story(record, [])) for record in records])
    metrics = [(record.result or {}).get("metrics", {}) for record in records]
    measured = {name: [one.get(name) for one in metrics] for name in dict.fromkeys(n for one in metrics for n in one)}
    if as_json:
        printing.echo_json({"runs": ids, "differences": found, "metrics": measured})
        return
    rows = [(key, ["-" if value is None else str(value) for value in values]) for key, values in found.items()]
    rows += [(name, [_number(value) for value in values]) for name, values in measured.items()]
    rows.append(("status", [_status(record, home) for record in records]))
    console = printing.console()
    console.print(_side_by_side(ids, rows, console.width))


@app.command()
def report(
    runs: RunsArgument,
    home: HomeOption = DEFAULT_HOME,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file to write.", show_default="in the run's files")
    ] = None,
) -> None:
    """Write one self-contained HTML page with plots about one run, or comparing several.

    Examples:

        coterie runs report last

        coterie runs report RUN1 RUN2 --output comparison.html
    """
    path = make_report(home, runs, output)
    typer.echo(path)


def make_report(home: Path, runs: list[str], output: Path | None = None) -> Path:
    """Write the report of runs and return where it lies."""
    from coterie.core.errors import StorageError
    from coterie.server.report import write_report
    from coterie.server.run_directory import run_path

    store, records = _find(home, runs)
    path = output or run_path(home, records[0].id) / ("report.html" if len(records) == 1 else "comparison.html")
    try:
        write_report([(record, store.events(record.id)) for record in records], path)
    except OSError as error:
        raise StorageError(f"cannot write the report {path}: {error.strerror}") from None
    return path


@app.command()
def export(
    run: RunArgument,
    home: HomeOption = DEFAULT_HOME,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The CSV file to write.", show_default="standard output")
    ] = None,
) -> None:
    """Write one run's history as CSV: a row per round, with clients, losses, metrics and seconds.

    Example: coterie runs export last --output history.csv
    """
    from coterie.core.errors import StorageError
    from coterie.server.report_data import read_story
    from coterie.server.report_history import history_csv

    store, (record,) = _find(home, [run])
    text = history_csv(read_story(record, store.events(record.id)))
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise StorageError(f"cannot write the history {output}: {error.strerror}") from None
    typer.echo(output)


@app.command()
def resume(
    run: RunArgument = "last",
    workers: Annotated[int | None, typer.Option(help="Another number of worker processes than before.")] = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Go on with an interrupted, killed or failed run from its last complete round.

    The end is that of an undisturbed run, bit by bit.

    Example: coterie runs resume last
    """
    from coterie.cli.progress import RunProgress
    from coterie.cli.simulate import told
    from coterie.simulations import resume as go_on

    _, (record,) = _find(home, [run])
    console = printing.beside(as_json)
    with RunProgress(record.rounds, record.name or record.strategy, home, console, quiet) as progress:
        result = go_on(record.id, home, [progress], workers)
    printing.tell(told(result), console, as_json, command(home, "runs", "report", result.run_id))


def _open(home: Path) -> "Store | None":
    """The store ($COTERIE_DATABASE, or under the home), or None where nothing has been run yet: who only reads makes
    nothing."""
    from coterie.server.store import open_store

    try:
        there = "COTERIE_DATABASE" in os.environ or (home / "coterie.db").exists()
    except OSError:  # the store itself says what is wrong
        there = True
    return open_store(home) if there else None


def _find(home: Path, runs: Sequence[str]) -> "tuple[Store, list[RunRecord]]":
    from coterie.core.errors import RunNotFoundError

    store = _open(home)
    if store is None:
        raise RunNotFoundError(f"there is no run {runs[0]!r}: {_none_yet(home)}")
    return store, [store.find(run) for run in runs]


def _none_yet(home: Path) -> str:
    return f"no runs in {home} yet: coterie simulate starts one"


def _row(record: "RunRecord", home: Path) -> dict[str, Any]:
    from coterie.server.run_directory import run_path

    return {
        "run": record.id,
        "name": record.name,
        "task": record.task,
        "strategy": record.strategy,
        "status": _status(record, home),
        "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)),
        "rounds": record.rounds,
        "rounds_done": record.rounds_done,
        "metrics": dict((record.result or {}).get("metrics", {})),
        "sha256": (record.result or {}).get("sha256"),
        "directory": str(run_path(home, record.id)),
    }


def _status(record: "RunRecord", home: Path) -> str:
    """The stored status; a run that claims to be running while no process holds it was killed."""
    from coterie.server.run_directory import is_in_use, run_path
    from coterie.server.store import RunStatus

    if record.status is RunStatus.RUNNING and not is_in_use(run_path(home, record.id)):
        return "killed"
    return record.status.value


def _side_by_side(ids: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], width: int) -> Table:
    """A column for each run, or a line for each where the columns do not fit."""
    longest = max(len(printing.text(key)) for key, _ in rows)
    keys = Column("", overflow="fold", width=min(longest, max(_KEY_WIDTH, width // 4)))
    if (keys.width or 0) + sum(len(run) + 2 for run in ids) <= width:
        table = printing.table(keys, *(Column(printing.text(run), overflow="fold", min_width=len(run)) for run in ids))
        for key, values in rows:
            table.add_row(*map(printing.text, (key, *values)))
        return table
    table = printing.table(keys, printing.whole("run", ids), "")
    for key, values in rows:
        for i, (run, value) in enumerate(zip(ids, values, strict=True)):
            table.add_row(*map(printing.text, ("" if i else key, run, value)))
    return table


def _told(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"
