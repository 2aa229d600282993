"""`coterie run`, `coterie status` and `coterie cancel`: what an operator does with a server that runs."""

import time
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


def status(server: ServerOption = None, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """What a server is doing: its nodes, its runs, and what they wait for or failed of.

    Example: coterie status
    """
    remote = Remote(server, home)
    nodes, runs = remote.get("/nodes"), remote.get("/runs")
    for run in runs[:10]:
        events = remote.get(f"/runs/{run['run']}/events")
        reasons = [e["data"]["reason"] for e in events if e["kind"] in ("run.waiting", "run.failed", "client.failed")]
        run["reason"] = reasons[-1] if reasons and run["status"] != "finished" else None
    if as_json:
        printing.echo_json({"nodes": nodes, "runs": runs})
        return
    here = [node["name"] for node in nodes if node["here"]]
    typer.echo(f"{len(here)} of {len(nodes)} nodes are here: {', '.join(here) or 'none'}")
    table = printing.table(
        printing.whole("run", (run["run"] for run in runs[:10])), "task", "status", "rounds", "since", "reason"
    )
    for run in runs[:10]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["created"]))
        done = f"{run['rounds_done']}/{run['rounds']}"
        table.add_row(*map(printing.text, (run["run"], run["task"], run["status"], done, since, run["reason"] or "")))
    printing.console().print(table)
