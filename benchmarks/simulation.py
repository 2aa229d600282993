"""Seconds per round of a simulation against the tight sequential loop, measured side by side in one run.

200 clients of 300 random 28 x 28 images, 20 per round, 1 local epoch, batch 20, SGD 0.05; an MLP 784-128-10 and a CNN
of two 5 x 5 convolutions. After each of Coterie's rounds the same work is done by a plain torch loop in this process
while the workers are idle, so that both see the same machine. The loop's time is divided by the number of cores: the
target is what perfect scaling would give.

    python benchmarks/simulation.py            # full, about three minutes on two cores
    python benchmarks/simulation.py --quick --json
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from coterie.core.cores import available_cores
from coterie.core.events import Event, EventKind
from coterie.core.run_config import RunConfig
from coterie.simulations import simulate
from coterie.tasks import Records, Task

CLIENTS, COHORT, RECORDS, BATCH, LR = 200, 20, 300, 20, 0.05
CORES = available_cores()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}


def random_images(model: str = "mlp") -> Task:
    """Random images with random labels: only the time matters."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(CLIENTS * RECORDS, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (CLIENTS * RECORDS,), generator=generator)
    return Task(
        name="random-images",
        model=MODELS[model],
        train=Records(inputs, targets),
        test=Records(inputs[:256], targets[:256]),
        loss=F.cross_entropy,
        metrics={"accuracy": lambda outputs, answers: float((outputs.argmax(1) == answers).float().mean())},
        num_classes=10,
    )


def tight_round(model: nn.Module, task: Task, round: int) -> None:
    """The tight sequential loop: FedAvg over one cohort with plain torch, nothing else."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for client in range(round % 10 * COHORT, round % 10 * COHORT + COHORT):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        rows = slice(client * RECORDS, (client + 1) * RECORDS)
        inputs, targets, order = task.train.inputs[rows], task.train.targets[rows], torch.randperm(RECORDS)
        for i in range(0, RECORDS, BATCH):
            batch = order[i : i + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        for name, tensor in model.state_dict().items():
            total[name] += tensor / COHORT
    model.load_state_dict(total)


class SideBySide:
    """Listens to a run: times its rounds, and after each (until there are enough) the tight loop in the same place."""

    def __init__(self, model: str, loops: int) -> None:
        self.task = random_images(model)
        self.model = MODELS[model]()
        self.loops = loops
        self.rounds: list[float] = []
        self.tight: list[float] = []
        self.memory: dict[int, float] = {}
        self._started: float | None = None

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if event.kind is EventKind.ROUND_STARTED:
            # From the start of one round to the start of the next, less what this listener took: events and checkpoints
            # count.
            if self._started is not None:
                self.rounds.append(now - self._started)
            if len(self.tight) < self.loops:
                begin = time.perf_counter()
                tight_round(self.model, self.task, event.round)
                self.tight.append(time.perf_counter() - begin)
            self.memory[event.round] = resident_bytes()
            self._started = time.perf_counter()


def resident_bytes() -> float:
    """Memory of this process without what it shares with the workers; not a number where there is no /proc."""
    if not Path("/proc/self/statm").exists():
        return math.nan
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


def measure(model: str, rounds: int, loops: int) -> SideBySide:
    config = RunConfig.load(overrides={
        "task": {"name": "__main__:random_images", "model": model},
        "rounds": rounds,
        "cohort.size": COHORT,
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR},
        "simulation.clients": CLIENTS,
        "simulation.partition": "iid",
        "evaluation.every": 0,
    })  # fmt: skip
    listener = SideBySide(model, loops)
    with tempfile.TemporaryDirectory() as home:
        simulate(config, Path(home), [listener])
    return listener


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 150 s on two cores")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    plan = {"mlp": (100, 40), "cnn": (15, 15)} if arguments.quick else {"mlp": (200, 100), "cnn": (40, 40)}
    ratios: dict[str, Any] = {}
    for model, (rounds, loops) in plan.items():
        seen = measure(model, rounds, loops)
        ours, loop = statistics.median(seen.rounds[1:]), statistics.median(seen.tight[1:])
        ratios[f"{model}_round_vs_tight_loop_per_core"] = entry(ours / (loop / CORES), 1.15)
        print(f"{model}: {ours:.4f} s per round; tight loop {loop:.4f} s, over {CORES} cores {loop / CORES:.4f} s")
        if rounds >= 100 and not math.isnan(seen.memory[100]):
            growth = seen.memory[100] / seen.memory[10]
            ratios["parent_memory_round_100_vs_10"] = entry(growth, 1.02)
            early, late = seen.memory[10] / 1e6, seen.memory[100] / 1e6
            print(f"{model}: parent {early:.1f} MB at round 10, {late:.1f} MB at round 100")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['value']:.3f} (target {ratio['target']}){'' if ratio['met'] else '  MISSED'}")
    if arguments.json:
        print(json.dumps({"ratios": ratios}))


def entry(value: float, most: float) -> dict[str, Any]:
    return {"value": round(value, 4), "target": f"<= {most}", "met": value <= most}


if __name__ == "__main__":
    main()
