"""`coterie demo`: what attackers do to a mean, and what a robust rule does about them."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coterie.cli.options import DEFAULT_HOME, HomeOption

ATTACK = {"simulation.attack": {"name": "sign_flip", "scale": 10.0}, "simulation.attackers": 0.1}

RUNS = {
    "FedAvg, 20 attackers": {"strategy": "fedavg"} | ATTACK,
    "trimmed mean, 20 attackers": {"strategy": "trimmed_mean"} | ATTACK,
    "trimmed mean, no attackers": {"strategy": "trimmed_mean"},
}


def demo(
    home: HomeOption = DEFAULT_HOME,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 40,
    seed: Annotated[int, typer.Option(help="Every random choice derives from it.")] = 7,
) -> None:
    """200 clients learn to read digits; 20 of them send their update turned round and ten times as large.

    Three runs: FedAvg and the trimmed mean under attack, and the trimmed mean with no attackers. One to two minutes on
    two cores.
    """
    from coterie.cli.progress import RunProgress
    from coterie.cli.runs import make_report
    from coterie.core.run_config import RunConfig
    from coterie.simulations import simulate

    console = Console()
    console.print(
        "200 clients with 20 real images each on average (Dirichlet 0.3 by label),\n"
        "20 clients per round. In the first two runs 20 clients attack: they send -10\n"
        "times their update.",
        highlight=False,
    )
    base = {
        "task": "mnist",
        "rounds": rounds,
        "seed": seed,
        "cohort.size": 20,
        "simulation.clients": 200,
        "simulation.partition": {"name": "dirichlet", "alpha": 0.3},
    }
    results = {}
    for label, changes in RUNS.items():
        config = RunConfig.load(overrides=base | changes | {"name": label})
        with RunProgress(config.rounds, f"{label:<28}", home, console) as progress:
            results[label] = simulate(config, home, [progress])
    table = Table("", "accuracy on 1,000 held-out images", "loss")
    for label, result in results.items():
        metrics = result.outcome.metrics
        table.add_row(label, f"{metrics['accuracy']:.3f}", f"{metrics['loss']:.3g}")
    console.print(table, highlight=False)
    mean, robust, clean = (result.outcome.metrics["accuracy"] for result in results.values())
    console.print(
        f"20 attackers in 200 bring the mean down to {mean:.0%} (guessing gives 10%).\n"
        f"The trimmed mean drops the 5 smallest and the 5 largest values of each\n"
        f"coordinate: {robust:.1%} with the attackers, {clean:.1%} without.",
        highlight=False,
    )
    runs = [result.run_id for result in results.values()]
    report = make_report(home, runs)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    console.print(
        f"next:\n"
        f"  coterie runs compare {' '.join(runs)}\n"
        f"  coterie simulate --task heart --strategy fedprox     four real hospitals\n"
        f"  coterie init study                                   your own task and run file",
        highlight=False,
        soft_wrap=True,
    )
