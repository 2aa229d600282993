"""From a run file to a finished run: task, partition, workers, coordinator."""

import contextlib
import secrets
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.aggregation import AGGREGATORS, SERVER_OPTIMIZERS, PreconditionError
from coterie.client import LOCAL_ALGORITHMS, OPTIMIZERS, SCHEDULES, measure
from coterie.core.choice import Choice, Table, build, complete
from coterie.core.cores import available_cores
from coterie.core.errors import ConfigError, RunError, RunInterrupted
from coterie.core.events import EventKind, Listener
from coterie.core.model_state import ModelState, save_state_dict
from coterie.core.run_config import RunConfig
from coterie.core.seeding import derive_seed, numpy_generator
from coterie.server.checkpoint import Checkpoint, CheckpointWriter, write_safely
from coterie.server.coordinator import Coordinator, Outcome, explain
from coterie.server.journal import Journal
from coterie.server.run_directory import RunDirectory, run_path
from coterie.server.store import RunRecord, RunStatus, Store
from coterie.simulations.attacks import ATTACKS
from coterie.simulations.partitions import PARTITIONS, Partition, Population
from coterie.simulations.process_channel import Clock, ProcessChannel
from coterie.simulations.virtual_time import SLOWNESS
from coterie.simulations.worker import ClientSlice, Setup
from coterie.simulations.worker_process import WorkerProcess
from coterie.tasks import Task, load_task

DEFAULT_CLIENTS = 100

TABLES: dict[str, Table] = {
    "local.algorithm": LOCAL_ALGORITHMS,
    "local.optimizer": OPTIMIZERS,
    "local.lr_schedule": SCHEDULES,
    "aggregator": AGGREGATORS,
    "server_optimizer": SERVER_OPTIMIZERS,
    "simulation.partition": PARTITIONS,
    "simulation.slowness": SLOWNESS,
    "simulation.attack": ATTACKS,
}
"""Which table each choice of a run file is made from."""


@dataclass(frozen=True)
class Result:
    """A finished run: its id, its directory and what it ended with."""

    run_id: str
    directory: Path
    config: RunConfig
    outcome: Outcome


def simulate(config: RunConfig, home: Path, listeners: Sequence[Listener] = ()) -> Result:
    """Run a simulation from its first round. Everything it leaves lies under `home`. Raises CoterieError."""
    run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    with contextlib.closing(Store(home / "coterie.db")) as store:
        return _execute(config, None, run_id, home, store, listeners)


def resume(reference: str, home: Path, listeners: Sequence[Listener] = (), workers: int | None = None) -> Result:
    """Go on with a run from its last complete checkpoint; the end is that of an undisturbed run, bit by bit.

    reference: the run's id, the beginning of it, or "last". workers: another number of worker processes than before.
    """
    with contextlib.closing(Store(home / "coterie.db")) as store:
        record = store.find(reference)
        if record.status is RunStatus.FINISHED:
            raise RunError(f"run {record.id} is finished: `coterie runs show {record.id}` shows it")
        overrides = {} if workers is None else {"simulation.workers": workers}
        config = RunConfig.from_toml(record.config, f"the stored run {record.id}", overrides)
        return _execute(config, record, record.id, home, store, listeners)


def _execute(
    config: RunConfig,
    record: RunRecord | None,
    run_id: str,
    home: Path,
    store: Store,
    listeners: Sequence[Listener],
) -> Result:
    """Set up, run, and leave the store and the directory telling how it ended."""
    check_choices(config)
    with _directory(run_path(home, run_id), fresh=record is None) as directory, _workers(config, directory) as workers:
        task = load_task(config.task)
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
            last_seq = 0
        else:
            events = store.events(run_id)
            last_seq = events[-1].seq if events else 0
        journal = Journal(store, run_id, listeners, last_seq)
        checkpoints = CheckpointWriter(directory.checkpoint)
        try:
            outcome = _rounds(config, task, partition, workers, directory, journal, checkpoints, record is not None)
            checkpoints.close()
            save_state_dict(outcome.model, directory.model)
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
    resumed: bool,
) -> Outcome:
    """Put the parts together and run the rounds."""
    checkpoint = Checkpoint.load(directory.checkpoint) if resumed else None
    if checkpoint is None:
        checkpoint = Checkpoint(0, initial_model(task, config.seed))
    channel = make_channel(task, partition, config, checkpoint.model, workers, directory.log)
    aggregator = build(AGGREGATORS, _given(config.aggregator), "aggregator")
    server_optimizer = build(SERVER_OPTIMIZERS, _given(config.server_optimizer), "server_optimizer")
    if resumed:
        journal.emit(EventKind.RUN_RESUMED, checkpoint.round, from_round=checkpoint.round)
    else:
        layout = checkpoint.model.layout
        journal.emit(
            EventKind.RUN_STARTED,
            0,
            num_clients=len(partition),
            num_parameters=layout.num_parameters,
            partition=_describe(task, partition),
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


def check_choices(config: RunConfig) -> RunConfig:
    """Check every choice that is set and fill in its defaults. Raises ConfigError."""
    data = config.to_dict()
    for key, table in TABLES.items():
        *parents, last = key.split(".")
        section: Any = data
        for part in parents:
            section = section[part]
        if last in section:
            section[last] = complete(table, Choice(**section[last]), key).model_dump()
    return RunConfig.from_dict(data)


def complete_config(config: RunConfig, ids: Sequence[str]) -> RunConfig:
    """The run with every default visible, checked as far as it can be before it starts. Raises ConfigError."""
    config = check_choices(config.resolve(len(ids)))
    attackers(config, ids)
    aggregator = build(AGGREGATORS, _given(config.aggregator), "aggregator")
    replies = config.cohort.min_replies or 1
    check = getattr(aggregator, "check", None)  # a rule of one's own may go without
    try:
        # A rule that cannot work with the fewest replies a round may have would fail in the middle of the run.
        if check is not None:
            check(replies)
    except PreconditionError as error:
        raise ConfigError(
            f"aggregator = {config.aggregator!r} with cohort.size = {config.cohort.size}: {error}"
        ) from None
    return config


def make_partition(task: Task, config: RunConfig) -> Partition:
    """Who holds which of the task's training records."""
    records = task.train
    labels = records.targets.numpy() if task.num_classes is not None else None
    population = Population(len(records), labels, records.keys)
    choice = config.simulation.partition or Choice(name=_default_partition(population))
    clients = config.simulation.clients or (None if choice.name == "natural" else DEFAULT_CLIENTS)
    rng = numpy_generator(config.seed, "partition")
    partition: Partition = build(PARTITIONS, choice, "simulation.partition", population, clients, rng)
    return partition


def initial_model(task: Task, seed: int) -> ModelState:
    """The model of round 0, drawn under the run's seed without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        return ModelState.from_module(task.model())


def make_channel(
    task: Task,
    partition: Partition,
    config: RunConfig,
    initial: ModelState,
    workers: Sequence[WorkerProcess],
    log: Path | None = None,
) -> ProcessChannel:
    """A channel to the clients of a partition, each with its records, speed and intentions."""
    simulation, seed = config.simulation, config.seed
    ids = list(partition)
    order: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    clients: list[ClientSlice] = []
    start = 0
    for client_id, rows in partition.items():
        rows = numpy_generator(seed, "holdout", client_id).permutation(rows)
        kept = min(len(rows) - 1, round(config.evaluation.client_holdout * len(rows)))
        clients.append(ClientSlice(client_id, start, start + len(rows) - kept, start + len(rows)))
        order.append(rows)
        start += len(rows)
    rows = torch.from_numpy(np.concatenate(order))
    records = {
        "inputs": task.train.inputs[rows],
        "targets": task.train.targets[rows],
        "test_inputs": task.test.inputs,
    }
    slowness = build(SLOWNESS, simulation.slowness, "simulation.slowness", len(ids), numpy_generator(seed, "slowness"))
    seconds = {
        client.id: float(factor) * simulation.seconds_per_example * _examples_per_round(client.num_examples, config)
        for client, factor in zip(clients, slowness, strict=True)
    }
    setup = Setup(
        model=task.model,
        initial=initial,
        loss=task.loss,
        metrics=task.metrics,
        num_classes=task.num_classes,
        local=config.local,
        rounds=config.rounds,
        seed=seed,
        clients=tuple(clients),
        attack=build(ATTACKS, simulation.attack, "simulation.attack"),
        attackers=attackers(config, ids),
        tensors={},
    )
    with torch.no_grad():
        output_shape = tuple(task.model().eval()(task.test.inputs[:2]).shape[1:])
    return ProcessChannel(workers, setup, records, output_shape, Clock(seconds, simulation.dropout), log)


def attackers(config: RunConfig, ids: Sequence[str]) -> frozenset[str]:
    """The clients that attack: the named ones, or a random share under the run's seed."""
    wanted = config.simulation.attackers
    if not isinstance(wanted, list):
        rng = numpy_generator(config.seed, "attackers")
        chosen: list[int] = rng.choice(len(ids), round(wanted * len(ids)), replace=False).tolist()
        return frozenset(ids[i] for i in chosen)
    unknown = [client_id for client_id in wanted if client_id not in set(ids)]
    if unknown:
        raise ConfigError(
            f"simulation.attackers: there is no client {unknown[0]!r}: the clients are {ids[0]!r} .. {ids[-1]!r}"
        )
    return frozenset(wanted)


def num_workers(config: RunConfig) -> int:
    """Worker processes: as asked, or one for each core that this process may use."""
    return config.simulation.workers or available_cores()


@contextlib.contextmanager
def _directory(path: Path, fresh: bool) -> Generator[RunDirectory]:
    """Hold the run's directory; one that never got as far as a run is removed again."""
    directory = RunDirectory(path)
    try:
        yield directory
    finally:
        if fresh and not (path / "run.toml").exists():
            shutil.rmtree(path, ignore_errors=True)
        directory.release()


@contextlib.contextmanager
def _workers(config: RunConfig, directory: RunDirectory) -> Generator[list[WorkerProcess]]:
    """Start the workers at once: their imports take as long as loading the task."""
    workers = [WorkerProcess(directory.log) for _ in range(num_workers(config))]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def _examples_per_round(num_examples: int, config: RunConfig) -> int:
    local = config.local
    return local.steps * local.batch_size if local.steps is not None else num_examples * (local.epochs or 0)


def _default_partition(population: Population) -> str:
    if population.keys is not None:
        return "natural"
    return "dirichlet" if population.labels is not None else "iid"


def _describe(task: Task, partition: Partition) -> dict[str, Any]:
    """Records per client and, for class labels, per client and label; for the report."""
    sizes = {client_id: len(rows) for client_id, rows in partition.items()}
    if task.num_classes is None:
        return {"sizes": sizes}
    targets = task.train.targets.numpy()
    counts = {i: np.bincount(targets[rows], minlength=task.num_classes).tolist() for i, rows in partition.items()}
    return {"sizes": sizes, "labels": list(task.label_names) or list(range(task.num_classes)), "counts": counts}


def _given(choice: Choice | None) -> Choice:
    if choice is None:
        raise ValueError("the run is not resolved: call RunConfig.resolve first")
    return choice
