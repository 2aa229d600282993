"""What a run file means: its choices checked, its records dealt out, its clients put into a channel."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from coterie.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from coterie.client.algorithms import LOCAL_ALGORITHMS, OPTIMIZERS, SCHEDULES
from coterie.client.devices import choose_device
from coterie.client.shared_tensor import SharedTensor
from coterie.client.training import LocalPlan
from coterie.client.worker_process import WorkerProcess
from coterie.core.choice import Choice, Table, build, complete, given
from coterie.core.errors import ConfigError
from coterie.core.model_state import ModelState
from coterie.core.records import num_training, own_order
from coterie.core.run_config import RunConfig
from coterie.core.seeding import numpy_generator
from coterie.server.assembly import make_rules
from coterie.simulations.attacks import ATTACKS, Attack
from coterie.simulations.partitions import PARTITIONS, Partition, Population
from coterie.simulations.process_channel import Clock, ProcessChannel
from coterie.simulations.virtual_time import SLOWNESS, Factors, at_least_one
from coterie.simulations.worker import ClientSlice, Setup
from coterie.tasks import TASKS, Task

DEFAULT_CLIENTS = 100

TABLES: dict[str, Table] = {
    "task": TASKS,
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


def check_choices(config: RunConfig) -> RunConfig:
    """Check every choice that is set and fill in its defaults. Raises ConfigError."""
    choose_device(config.local.device)
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
    LocalPlan.from_config(config.local, config.rounds)
    make_attack(config)
    make_slowness(config, len(ids))
    make_rules(config)
    return config


def make_attack(config: RunConfig) -> Attack:
    """What the attackers do. Raises ConfigError."""
    attack: Attack = build(ATTACKS, config.simulation.attack, "simulation.attack", expects=Attack)
    return attack


def make_slowness(config: RunConfig, num_clients: int) -> Factors:
    """Each client's slowness, float64[num_clients]. Raises ConfigError."""
    choice = config.simulation.slowness
    rng = numpy_generator(config.seed, "slowness")
    found = build(SLOWNESS, choice, "simulation.slowness", num_clients, rng)
    try:
        factors: Factors = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        factors = np.zeros(0)
    if factors.shape != (num_clients,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(
            f"simulation.slowness = {choice.name!r}: it must give a finite factor above 0 for each of the "
            f"{num_clients} clients"
        )
    return factors


def make_partition(task: Task, config: RunConfig) -> Partition:
    """Who holds which of the task's training records. `config` names a partition, see `choose_partition`."""
    clients = config.simulation.clients
    rng = numpy_generator(config.seed, "partition")
    choice = given(config.simulation.partition)
    found = build(PARTITIONS, choice, "simulation.partition", _population(task), clients, rng)
    return _checked(found, len(task.train), f"simulation.partition = {choice.name!r}")


def _checked(found: object, num_records: int, where: str) -> Partition:
    """A partition as the user's own function may have made it. Raises ConfigError."""
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"{where} gives a {type(found).__name__}: return at least one client id with its records")
    taken = np.zeros(num_records, bool)
    partition: Partition = {}
    for client_id, given_rows in cast("Mapping[object, Any]", found).items():
        rows = np.asarray(given_rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not len(rows):
            raise ConfigError(f"{where}: client {client_id!r} needs at least one record, as int[N] of their numbers")
        if rows.min() < 0 or rows.max() >= num_records:
            raise ConfigError(
                f"{where}: client {client_id!r} has records {rows.min()} to {rows.max()}, "
                f"the task has 0 to {num_records - 1}"
            )
        if taken[rows].any() or len(np.unique(rows)) < len(rows):
            raise ConfigError(f"{where}: client {client_id!r} has a record twice, or one that another client has")
        taken[rows] = True
        partition[str(client_id)] = rows.astype(np.int64)
    return partition


def choose_partition(task: Task, config: RunConfig) -> RunConfig:
    """The run with a partition and, where the partition asks for one, a number of clients."""
    population = _population(task)
    choice = config.simulation.partition or Choice(name=_default_partition(population))
    clients = config.simulation.clients or (None if choice.name == "natural" else DEFAULT_CLIENTS)
    simulation = config.simulation.model_copy(update={"partition": choice, "clients": clients})
    return config.model_copy(update={"simulation": simulation})


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
    slowness = make_slowness(config, len(ids))
    order: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    clients: list[ClientSlice] = []
    start = 0
    for client_id, rows in partition.items():
        count = num_training(len(rows), config.evaluation.client_holdout)
        training = evaluation = slice(start, start + count)
        if config.evaluation.client_holdout:  # who has one record only evaluates on none
            evaluation = slice(start + count, start + len(rows))
        clients.append(ClientSlice(client_id, training, evaluation))
        order.append(rows[own_order(len(rows), seed, client_id)])
        start += len(rows)
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
        attack=make_attack(config),
        attackers=attackers(config, ids),
        tensors={},
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output_shape = tuple(task.model().eval()(task.test.inputs[:2]).shape[1:])
    rows = torch.from_numpy(np.concatenate(order))
    records = {
        "inputs": SharedTensor.copy_of(task.train.inputs, rows),
        "targets": SharedTensor.copy_of(task.train.targets, rows),
        "test_inputs": SharedTensor.copy_of(task.test.inputs),
    }
    return ProcessChannel(workers, setup, records, output_shape, Clock(seconds, simulation.dropout), log)


def attackers(config: RunConfig, ids: Sequence[str]) -> frozenset[str]:
    """The clients that attack: the named ones, or a random share under the run's seed."""
    wanted = config.simulation.attackers
    if not isinstance(wanted, list):
        rng = numpy_generator(config.seed, "attackers")
        count = at_least_one(wanted, len(ids), "simulation.attackers")
        chosen: list[int] = rng.choice(len(ids), count, replace=False).tolist()
        return frozenset(ids[i] for i in chosen)
    unknown = [client_id for client_id in wanted if client_id not in set(ids)]
    if unknown:
        raise ConfigError(
            f"simulation.attackers: there is no client {unknown[0]!r}: the clients are {ids[0]!r} .. {ids[-1]!r}"
        )
    return frozenset(wanted)


def _examples_per_round(num_examples: int, config: RunConfig) -> int:
    local = config.local
    if local.steps is None:
        return num_examples * (local.epochs or 0)
    return local.steps * min(local.batch_size, num_examples)


def _population(task: Task) -> Population:
    records = task.train
    labels = records.targets.numpy() if task.num_classes is not None else None
    return Population(len(records), labels, records.keys)


def _default_partition(population: Population) -> str:
    if population.keys is not None:
        return "natural"
    return "dirichlet" if population.labels is not None else "iid"
