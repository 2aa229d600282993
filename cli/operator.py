"""`coterie run`, `coterie status` and `coterie cancel`: what an operator does with a server that runs."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from coterie.cli import printing
from coterie.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    JsonOption,
    QuietOption,
    RoundsOption,
    RunFileArgument,
    SeedOption,
    SettingsOption,
    StrategyOption,
    load_run,
)
from coterie.cli.remote import Remote, ServerOption
from coterie.core.errors import RunError


def run(
    file: RunFileArgument = None,
    task: Annotated[str | None, typer.Option(help="A task's name, as the nodes offer it.")] = None,
    rounds: RoundsOption = None,
    strategy: StrategyOption = None,
    seed: SeedOption = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="Ask only nodes that have this tag; may be repeated.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="The queued run with the highest goes first; default 0.")] = None,
    settings: SettingsOption = None,
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run on the nodes of a server what `coterie simulate` runs on this machine, and watch. Ctrl-C stops watching only.

    Example: coterie run run.toml --tag eu --set federation.min_clients=4
    """
    from coterie.cli.progress import RunProgress
    from coterie.core.events import EventKind

    options = {
        "task.name": task,
        "rounds": rounds,
        "strategy": strategy,
        "seed": seed,
        "federation.tags": tags,
        "federation.priority": priority,
    }
    config = load_run(file, options, settings)
    remote = Remote(server, home)
    run_id = remote.post("/runs", {"config": config.to_toml()})["run"]
    console = printing.beside(as_json)
    stopped = f"no longer watching: run {run_id} goes on (`coterie status`); `coterie cancel {run_id}` ends it"
    result: dict[str, Any] = {}
    with RunProgress(config.rounds, config.name or config.strategy, home, console, quiet, stopped) as progress:
        for event in remote.events(run_id):
            progress(event)
            if event.kind is EventKind.RUN_FAILED:
                raise RunError(f"run {run_id} failed: {event.data['reason']}")
            if event.kind is EventKind.RUN_FINISHED:
                result = dict(event.data)
    ending = {"run": run_id, "status": "finished", "rounds": result["rounds"], "seconds": result["seconds"]}
    printing.tell(ending | {"metrics": result["metrics"], "model": {"sha256": result["sha256"]}}, console, as_json)


def cancel(
    run: Annotated[str, typer.Argument(help="The run's id, the beginning of it, or 'last'.", metavar="RUN")],
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """End a run that is queued or running, for good.

    Example: coterie cancel last
    """
    Remote(server, home).post(f"/runs/{run}/cancel")


def status(
    run: Annotated[str | None, typer.Argument(help="Only this run: its id, its beginning, or 'last'.")] = None,
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """What a server is doing: its nodes, its runs, what they wait for, and every failure with its cause.

    The ten newest runs, or the one that is named. Failures that are alike are one line.

    Example: coterie status last
    """
    remote = Remote(server, home)
    nodes = remote.get("/nodes")
    runs = [remote.get(f"/runs/{run}")] if run else remote.get("/runs")[:10]
    for one in runs:
        events = remote.get(f"/runs/{one['run']}/events")
        failures = [event for event in events if event["kind"] in ("client.failed", "update.refused")]
        # The latest word: a run that has started waits no longer.
        words = [e["data"].get("reason") for e in events if "reason" in e["data"] or e["kind"] == "run.started"]
        one["reason"] = words[-1] if words and one["status"] != "finished" else None
        one["failures"] = [{"round": event["round"], **event["data"]} for event in failures]
    if as_json:
        printing.echo_json({"nodes": nodes, "runs": runs})
        return
    here = [node["name"] for node in nodes if node["here"]]
    typer.echo(f"{len(here)} of {len(nodes)} nodes are here: {', '.join(here) or 'none'}")
    table = printing.table(
        printing.whole("run", (one["run"] for one in runs)), "task", "status", "rounds", "since", "failures", "reason"
    )
    for one in runs:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["created"]))
        done = f"{one['rounds_done']}/{one['rounds']}"
        row = (one["run"], one["task"], one["status"], done, since, str(len(one["failures"])), one["reason"] or "")
        table.add_row(*map(printing.text, row))
    printing.console().print(table)
    for one in runs:
        if one["failures"] and (run or one["status"] != "finished"):
            _failures(one)


def _failures(run: Mapping[str, Any]) -> None:
    """Every failed client and refused update of a run, those that are alike in one line."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for one in run["failures"]:
        alike.setdefault((one["client_id"], one["kind"], one["reason"]), []).append(one["round"])
    typer.echo(f"\nfailures of {run['run']}")
    table = printing.table("client", "what", "times", "rounds", "reason")
    for (client, kind, reason), rounds in sorted(alike.items()):
        span = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        table.add_row(*map(printing.text, (client, kind, str(len(rounds)), span, reason)))
    printing.console().print(table)
