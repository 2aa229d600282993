"""`coterie runs`: list, show, compare, report, resume."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from coterie.cli.options import DEFAULT_HOME, HomeOption, JsonOption, QuietOption, command

if TYPE_CHECKING:
    from coterie.server.store import RunRecord, Store

app = typer.Typer(help="What has been run: list, show, compare, report, resume.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="The run's id, the beginning of it, or 'last'.", metavar="RUN")]
RunsArgument = Annotated[list[str], typer.Argument(help="Runs: ids, beginnings of them, or 'last'.", metavar="RUN...")]


@app.command("list")
def list_runs(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List all runs, the newest first.

    Example: coterie runs list
    """
    rows = [_row(run, home) for run in _store(home).runs()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(Column("run", no_wrap=True), "label", "task", "strategy", "status", "rounds", "result", box=None)
    for row in rows:
        metrics = "  ".join(
            f"{name} {value:.4f}" for name, value in list(row["metrics"].items())[:1] if value is not None
        )
        done = f"{row['rounds_done']}/{row['rounds']}"
        table.add_row(row["run"], row["name"], row["task"], row["strategy"], row["status"], done, metrics)
    Console().print(table if rows else f"no runs in {home} yet: coterie simulate starts one", highlight=False)


@app.command()
def show(run: RunArgument, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Show one run: how it stands, its last numbers, who failed or was refused and why.

    Example: coterie runs show last
    """
    from collections import Counter

    from coterie.core.events import EventKind
    from coterie.server.store import effective

    store = _store(home)
    record = store.find(run)
    events = effective(store.events(record.id))
    losses = [event.data for event in events if event.kind in (EventKind.CLIENT_FAILED, EventKind.UPDATE_REFUSED)]
    lost = Counter(data["kind"] for data in losses)
    example = {data["kind"]: data["reason"] for data in reversed(losses)}
    evaluated = [event for event in events if event.kind is EventKind.EVALUATED]
    reasons = [event.data["reason"] for event in events if event.kind is EventKind.RUN_FAILED]
    row = _row(record, home) | {"lost": dict(lost.most_common()), "reason": reasons[-1] if reasons else None}
    row["evaluations"] = {str(event.round): event.data["metrics"] for event in evaluated}
    if as_json:
        typer.echo(json.dumps(row))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key in ("run", "name", "task", "strategy", "status", "reason", "created", "directory"):
        if row[key]:
            table.add_row(key, str(row[key]))
    table.add_row("rounds", f"{record.rounds_done} of {record.rounds}")
    if evaluated:
        metrics = "  ".join(f"{k} {v:.4f}" for k, v in evaluated[-1].data["metrics"].items() if v is not None)
        table.add_row(f"round {evaluated[-1].round}", metrics)
    for kind, count in lost.most_common():
        table.add_row("lost", f"{count} x {kind}: {example[kind]}")
    if row["status"] in ("interrupted", "failed", "killed"):
        table.add_row("next", command(home, "runs", "resume", record.id))
    Console().print(table, highlight=False, soft_wrap=True, markup=False)


@app.command()
def compare(runs: RunsArgument, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Put runs side by side: where their run files differ, and how they ended.

    Example: coterie runs compare 20260101-101500-1a2b last
    """
    import tomllib

    store = _store(home)
    records = [store.find(run) for run in runs]
    configs = [_flat(tomllib.loads(record.config)) for record in records]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differences = {
        key: [config.get(key) for config in configs] for key in keys if len({repr(c.get(key)) for c in configs}) > 1
    }
    metrics = [(record.result or {}).get("metrics", {}) for record in records]
    names = list(dict.fromkeys(name for one in metrics for name in one))
    if as_json:
        typer.echo(json.dumps({
            "runs": [record.id for record in records],
            "differences": differences,
            "metrics": {name: [one.get(name) for one in metrics] for name in names},
        }, default=str))  # fmt: skip
        return
    table = Table("", *[record.id for record in records], box=None)
    for key, values in differences.items():
        table.add_row(key, *["-" if value is None else str(value) for value in values])
    table.add_section()
    for name in names:
        values = [one.get(name) for one in metrics]
        table.add_row(name, *["-" if value is None else f"{value:.4f}" for value in values])
    table.add_row("status", *[_status(record, home) for record in records])
    Console().print(table, highlight=False, markup=False)


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

    store = _store(home)
    records = [store.find(run) for run in runs]
    path = output or run_path(home, records[0].id) / ("report.html" if len(records) == 1 else "comparison.html")
    try:
        write_report([(record, store.events(record.id)) for record in records], path)
    except OSError as error:
        raise StorageError(f"cannot write the report {path}: {error.strerror}") from None
    return path


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
    from coterie.cli.simulate import tell
    from coterie.simulations import resume as go_on

    record = _store(home).find(run)
    console = Console(stderr=as_json)
    with RunProgress(record.rounds, record.name or record.strategy, home, console, quiet) as progress:
        result = go_on(record.id, home, [progress], workers)
    tell(result, home, console, as_json)


def _store(home: Path) -> "Store":
    from coterie.server.store import Store

    return Store(home / "coterie.db")


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


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
