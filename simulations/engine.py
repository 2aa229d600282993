"""One simulation: its task, partition and worker processes, put together into a run."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.client.worker_process import WorkerProcess
from coterie.core.events import Listener
from coterie.core.messages import Channel
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.server.assembly import make_rules
from coterie.server.conduct import Parts, conduct
from coterie.server.coordinator import Evaluate, Outcome
from coterie.server.run_directory import RunDirectory
from coterie.server.store import RunRecord, Store
from coterie.simulations.partitions import Partition
from coterie.simulations.preparation import (
    attackers,
    check_choices,
    choose_partition,
    complete_config,
    make_channel,
    make_partition,
)
from coterie.tasks import Task, load_task
from coterie.tasks.task import initial_model, measure


@dataclass(frozen=True)
class Result:
    """A finished run: its id, its directory and what it ended with."""

    run_id: str
    directory: Path
    config: RunConfig
    outcome: Outcome


def execute(
    config: RunConfig,
    record: RunRecord | None,
    run_id: str,
    store: Store,
    directory: RunDirectory,
    workers: Sequence[WorkerProcess],
    listeners: Sequence[Listener],
) -> Result:
    """Set up and run. record: of a run to resume, else None."""
    config = check_choices(config)
    task = load_task(config.task)
    config = choose_partition(task, config)
    partition = make_partition(task, config)
    if record is None:
        config = complete_config(config, list(partition))
    rule, server_optimizer = make_rules(config)
    attacking = attackers(config, list(partition))

    @contextlib.contextmanager
    def channel(model: ModelState) -> Generator[tuple[Channel, Evaluate]]:
        with contextlib.closing(make_channel(task, partition, config, model, workers, directory.log)) as channel:

            def evaluate(model: ModelState) -> dict[str, float]:
                return measure(channel.outputs(model), task.test.targets, task.loss, task.metrics)

            with _one_thread():
                yield channel, evaluate

    parts = Parts(
        config,
        rule,
        server_optimizer,
        initial_model(task, config.seed),
        records={"train": task.train.sha256(), "test": task.test.sha256()},
        described={
            "num_clients": len(partition),
            "partition": _holdings(task, partition),
            "attackers": [client_id for client_id in partition if client_id in attacking],
        },
        open=channel,
    )
    return Result(run_id, directory.path, config, conduct(parts, run_id, record is None, store, directory, listeners))


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    """The workers fill the cores: torch's own threads in this process would spin beside them and cost a third of the
    speed."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def _holdings(task: Task, partition: Partition) -> dict[str, Any]:
    """Records per client and, for class labels, per client and label."""
    sizes = {client_id: len(rows) for client_id, rows in partition.items()}
    if task.num_classes is None:
        return {"sizes": sizes}
    targets = task.train.targets.numpy()
    counts = {i: np.bincount(targets[rows], minlength=task.num_classes).tolist() for i, rows in partition.items()}
    return {"sizes": sizes, "labels": list(task.label_names) or list(range(task.num_classes)), "counts": counts}
