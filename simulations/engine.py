"""One simulation from its first event to its last: put the parts together, run the rounds, leave everything told."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from coterie.client import measure
from coterie.core.choice import build
from coterie.core.errors import RunError, RunInterrupted
from coterie.core.events import EventKind, Listener
from coterie.core.model_state import ModelState, state_dict_bytes
from coterie.core.run_config import RunConfig
from coterie.server.checkpoint import Checkpoint, CheckpointWriter, write_safely
from coterie.server.coordinator import Coordinator, Outcome, explain
from coterie.server.journal import Journal
from coterie.server.run_directory import RunDirectory
from coterie.server.store import RunRecord, Store
from coterie.simulations.partitions import Partition
from coterie.simulations.preparation import (
    check_choices,
    choose_partition,
    complete_config,
    given,
    initial_model,
    make_channel,
    make_partition,
)
from coterie.simulations.worker_process import WorkerProcess
from coterie.tasks import Task, load_task


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
    """Set up, run, and leave store and directory telling how it ended. record: of a run to resume, else None."""
    check_choices(config)
    task = load_task(config.task)
    config = choose_partition(task, config)
    partition = make_partition(task, config)
    if record is None:
        config = complete_config(config, list(partition))
        store.create_run(
            run_id,
            name=config.name,
            task=config.task.name,
            strategy=config.strategy,
            rounds=config.rounds,
            config=config.to_toml(),
        )
        write_safely(directory.path / "run.toml", config.to_toml().encode())
    history = store.events(run_id)
    records = {"train": task.train.sha256(), "test": task.test.sha256()}
    for event in history:
        if event.kind is EventKind.RUN_STARTED and event.data["records"] != records:
            raise RunError(
                f"the records of task {config.task.name!r} are not those that run {run_id} started with: "
                f"restore them, or start a new run"
            )
    journal = Journal(store, run_id, listeners, last_seq=history[-1].seq if history else 0)
    checkpoints = CheckpointWriter(directory.checkpoint)
    try:
        outcome = _rounds(config, task, partition, workers, directory, journal, checkpoints, records, bool(history))
        checkpoints.close()
        write_safely(directory.model, state_dict_bytes(outcome.model))
        journal.emit(EventKind.RUN_FINISHED, outcome.rounds, **explain(outcome))
        journal.commit()
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(RunError):  # what went wrong first is what the user must see
            checkpoints.close()
        with contextlib.suppress(RunError):
            if interrupted:
                journal.emit(EventKind.RUN_INTERRUPTED, journal.last_round)
            else:
                journal.emit(EventKind.RUN_FAILED, journal.last_round, reason=f"{type(error).__name__}: {error}")
            journal.commit()
        if interrupted:
            raise RunInterrupted(run_id) from None
        raise
    return Result(run_id, directory.path, config, outcome)


def _rounds(
    config: RunConfig,
    task: Task,
    partition: Partition,
    workers: Sequence[WorkerProcess],
    directory: RunDirectory,
    journal: Journal,
    checkpoints: CheckpointWriter,
    records: Mapping[str, str],
    started: bool,
) -> Outcome:
    """Put the parts together and run the rounds."""
    checkpoint = Checkpoint.load(directory.checkpoint) or Checkpoint(0, initial_model(task, config.seed))
    channel = make_channel(task, partition, config, checkpoint.model, workers, directory.log)
    aggregator = build(AGGREGATORS, given(config.aggregator), "aggregator")
    server_optimizer = build(SERVER_OPTIMIZERS, given(config.server_optimizer), "server_optimizer")
    if started:
        journal.emit(EventKind.RUN_RESUMED, checkpoint.round, from_round=checkpoint.round)
    else:
        layout = checkpoint.model.layout
        journal.emit(
            EventKind.RUN_STARTED,
            0,
            num_clients=len(partition),
            num_parameters=layout.num_parameters,
            partition=_describe(task, partition),
            records=records,
            rounds=config.rounds,
        )
    journal.commit()

    def evaluate(model: ModelState) -> dict[str, float]:
        return measure(channel.outputs(model), task.test.targets, task.loss, task.metrics)

    threads = torch.get_num_threads()
    try:
        # The workers fill the cores; torch's own threads in this process would spin beside them and cost a third of the
        # speed.
        torch.set_num_threads(1)
        return Coordinator(config, channel, aggregator, server_optimizer, journal, checkpoints, evaluate).run(
            checkpoint
        )
    finally:
        torch.set_num_threads(threads)
        channel.close()


def _describe(task: Task, partition: Partition) -> dict[str, Any]:
    """Records per client and, for class labels, per client and label; for the report."""
    sizes = {client_id: len(rows) for client_id, rows in partition.items()}
    if task.num_classes is None:
        return {"sizes": sizes}
    targets = task.train.targets.numpy()
    counts = {i: np.bincount(targets[rows], minlength=task.num_classes).tolist() for i, rows in partition.items()}
    return {"sizes": sizes, "labels": list(task.label_names) or list(range(task.num_classes)), "counts": counts}
