"""One simulation from its first event to its last: put the parts together, run the rounds, leave everything told."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.client.worker_process import WorkerProcess
from coterie.core.errors import ModelError, RunError, RunInterrupted
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
    attackers,
    check_choices,
    choose_partition,
    complete_config,
    initial_model,
    make_channel,
    make_partition,
    make_rules,
)
from coterie.simulations.process_channel import ProcessChannel
from coterie.tasks import Task, load_task
from coterie.tasks.task import measure


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
    config = check_choices(config)
    task = load_task(config.task)
    config = choose_partition(task, config)
    partition = make_partition(task, config)
    if record is None:
        config = complete_config(config, list(partition))
    records = {"train": task.train.sha256(), "test": task.test.sha256()}
    history = store.events(run_id)
    begun = [event for event in history if event.kind is EventKind.RUN_STARTED]
    if begun and begun[0].data["records"] != records:
        raise RunError(
            f"the records of task {config.task.name!r} are not those that run {run_id} started with: "
            f"restore them, or start a new run"
        )
    start = _checkpoint(directory, task, config, run_id)
    journal = Journal(store, run_id, listeners, last_seq=history[-1].seq if history else 0)
    checkpoints = CheckpointWriter(directory.checkpoint)
    try:
        if record is None:
            _register(config, run_id, store, directory)
        with contextlib.closing(make_channel(task, partition, config, start.model, workers, directory.log)) as channel:
            if begun:
                journal.emit(EventKind.RUN_RESUMED, start.round, from_round=start.round)
            else:
                journal.emit(EventKind.RUN_STARTED, 0, **_describe(task, partition, config, start), records=records)
            journal.commit()
            outcome = _rounds(config, task, channel, journal, checkpoints, start)
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


def _checkpoint(directory: RunDirectory, task: Task, config: RunConfig, run_id: str) -> Checkpoint:
    """Where to go on: the run's last complete checkpoint, or the initial model. Raises RunError."""
    initial = initial_model(task, config.seed)
    saved = Checkpoint.load(directory.checkpoint)
    if saved is None:
        return Checkpoint(0, initial)
    try:
        saved.model.check_fits(initial.layout, initial.fixed)
    except ModelError as error:
        raise RunError(
            f"the model of task {config.task.name!r} is not the one that run {run_id} started with: {error}: "
            f"restore it, or start a new run"
        ) from None
    return saved


def _register(config: RunConfig, run_id: str, store: Store, directory: RunDirectory) -> None:
    """Put a new run into the store and its run file into its directory."""
    text = config.to_toml()
    store.create_run(
        run_id, name=config.name, task=config.task.name, strategy=config.strategy, rounds=config.rounds, config=text
    )
    write_safely(directory.path / "run.toml", text.encode())


def _rounds(
    config: RunConfig,
    task: Task,
    channel: ProcessChannel,
    journal: Journal,
    checkpoints: CheckpointWriter,
    start: Checkpoint,
) -> Outcome:
    """Run the rounds over the channel."""
    aggregator, server_optimizer = make_rules(config)

    def evaluate(model: ModelState) -> dict[str, float]:
        return measure(channel.outputs(model), task.test.targets, task.loss, task.metrics)

    threads = torch.get_num_threads()
    try:
        # The workers fill the cores; torch's own threads in this process would spin beside them and cost a third of the
        # speed.
        torch.set_num_threads(1)
        return Coordinator(config, channel, aggregator, server_optimizer, journal, checkpoints, evaluate).run(start)
    finally:
        torch.set_num_threads(threads)


def _describe(task: Task, partition: Partition, config: RunConfig, start: Checkpoint) -> dict[str, Any]:
    """What the report says about a run before its first round."""
    attacking = attackers(config, list(partition))
    return {
        "num_clients": len(partition),
        "num_parameters": start.model.layout.num_parameters,
        "rounds": config.rounds,
        "partition": _holdings(task, partition),
        "attackers": [client_id for client_id in partition if client_id in attacking],
    }


def _holdings(task: Task, partition: Partition) -> dict[str, Any]:
    """Records per client and, for class labels, per client and label."""
    sizes = {client_id: len(rows) for client_id, rows in partition.items()}
    if task.num_classes is None:
        return {"sizes": sizes}
    targets = task.train.targets.numpy()
    counts = {i: np.bincount(targets[rows], minlength=task.num_classes).tolist() for i, rows in partition.items()}
    return {"sizes": sizes, "labels": list(task.label_names) or list(range(task.num_classes)), "counts": counts}
