"""`coterie simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    command,
    load_run,
)

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
    file: RunFileArgument = None,
    task: Annotated[
        str | None, typer.Option(help="A task's name (see `coterie tasks`) or package.module:function.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients asked in each round.")] = None,
    rounds: RoundsOption = None,
    strategy: StrategyOption = None,
    seed: SeedOption = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 0: one per core.")] = None,
    name: Annotated[str | None, typer.Option(help="A label for the run.")] = None,
    settings: SettingsOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
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
    run_and_tell(load_run(file, options, settings), home, as_json, quiet)


simulate.__doc__ = EXAMPLES


def run_and_tell(config: "RunConfig", home: Path, as_json: bool, quiet: bool) -> None:
    """Run a simulation with progress and print how it ended."""
    from coterie.cli.progress import RunProgress
    from coterie.simulations import simulate as run

    console = printing.beside(as_json)
    with RunProgress(config.rounds, config.name or config.strategy, home, console, quiet) as progress:
        result = run(config, home, [progress])
    printing.tell(told(result), console, as_json, command(home, "runs", "report", result.run_id))


def told(result: "Result") -> dict[str, Any]:
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
