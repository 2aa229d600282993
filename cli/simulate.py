"""`coterie simulate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coterie.cli.options import DEFAULT_HOME, HomeOption, JsonOption, QuietOption, command, parse_settings

if TYPE_CHECKING:
    from coterie.core.run_config import RunConfig
    from coterie.simulations.engine import Result

EXAMPLES = """
Train one model on clients simulated on this machine.

Examples:

    coterie simulate --task mnist --clients 200 --cohort 20 --rounds 60

    coterie simulate --task heart --strategy fedprox --set local.algorithm.mu=0.01

    coterie simulate run.toml --set simulation.workers=2 --json

A run file (`coterie init` writes one) holds every setting; options and --set override it.
"""


def simulate(
    file: Annotated[Path | None, typer.Argument(help="The run file.", metavar="[RUN.toml]", show_default=False)] = None,
    task: Annotated[
        str | None, typer.Option(help="A task's name (see `coterie tasks`) or package.module:function.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients asked in each round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    strategy: Annotated[str | None, typer.Option(help="fedavg, fedprox or trimmed_mean.")] = None,
    seed: Annotated[int | None, typer.Option(help="Every random choice derives from it.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 0: one per core.")] = None,
    name: Annotated[str | None, typer.Option(help="A label for the run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file; may be repeated.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from coterie.core.run_config import RunConfig

    options = {
        "task.name": task,
        "simulation.clients": clients,
        "cohort.size": cohort,
        "rounds": rounds,
        "strategy": strategy,
        "seed": seed,
        "simulation.workers": workers,
        "name": name,
    }
    overrides = {key: value for key, value in options.items() if value is not None} | parse_settings(settings or [])
    run_and_tell(RunConfig.load(file, overrides), home, as_json, quiet)


simulate.__doc__ = EXAMPLES


def run_and_tell(config: "RunConfig", home: Path, as_json: bool, quiet: bool) -> None:
    """Run a simulation with progress and print how it ended."""
    from coterie.cli.progress import RunProgress
    from coterie.simulations import simulate as run

    console = Console(stderr=as_json)
    with RunProgress(config.rounds, config.name or config.strategy, home, console, quiet) as progress:
        result = run(config, home, [progress])
    tell(result, home, console, as_json)


def tell(result: "Result", home: Path, console: Console, as_json: bool) -> None:
    """The final table, and the JSON line when asked for."""
    from coterie.server.store import jsonable

    if as_json:
        typer.echo(json.dumps(jsonable(summary(result)), allow_nan=False))
        return
    outcome = result.outcome
    rows = {metric: f"{value:.4f}" for metric, value in outcome.metrics.items()}
    rows["rounds"] = f"{outcome.rounds} in {outcome.seconds:.1f} s (the clients' virtual clock: {outcome.clock:.1f} s)"
    rows |= {"weights": f"sha256 {outcome.model.sha256()}", "run": result.run_id, "files": str(result.directory)}
    for key, value in rows.items():
        console.print(f"{key:<18} {value}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        "next:", command(home, "runs", "report", result.run_id), highlight=False, markup=False, soft_wrap=True
    )


def summary(result: "Result") -> dict[str, Any]:
    """A finished run as one JSON object."""
    outcome = result.outcome
    return {
        "run": result.run_id,
        "status": "finished",
        "directory": str(result.directory),
        "rounds": outcome.rounds,
        "seconds": round(outcome.seconds, 3),
        "virtual_seconds": round(outcome.clock, 3),
        "metrics": dict(outcome.metrics),
        "model": {"sha256": outcome.model.sha256(), "file": str(result.directory / "model.safetensors")},
    }
