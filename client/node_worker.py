"""What a node's worker process does: trains and evaluates this site's own records, one request after the other.

It holds the data and torch; the daemon has neither. A request names a run's settings, never code: a choice of the kind
``package.module:Name`` is refused, because importing it would run what the server names.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.client.devices import choose_device
from coterie.client.node_config import OwnTask
from coterie.client.training import LocalPlan, LocalTrainer
from coterie.core.choice import Choice
from coterie.core.errors import ConfigError, TaskError
from coterie.core.model_state import ModelState, read_archive
from coterie.core.records import num_training, own_order
from coterie.core.run_config import LocalConfig
from coterie.tasks import Records, Task, load_task


class NodeWorker:
    """Does the requests of one node. A request is the record of a message, see `server.questions`."""

    def __init__(self, name: str, tasks: Mapping[str, OwnTask]) -> None:
        self._name = name
        self._tasks = {name: own_records(load_task(own.task), own.client) for name, own in tasks.items()}
        self._trainer: tuple[object, LocalTrainer] | None = None

    def offers(self) -> dict[str, int]:
        """How many records of each task this node holds."""
        return {name: len(task.train) for name, task in self._tasks.items()}

    def train(self, request: Mapping[str, Any], model: str, update: str) -> dict[str, Any]:
        """Train from the model in a file; leave the update, raw little-endian float32[D], in another."""
        task, trainer, state = self._prepared(request, model)
        records = self._records(task, request, training=True)
        start = state.flat.to(trainer.model.device)
        metrics = trainer.train(start, records.inputs, records.targets, int(request["round"]), self._name)
        delta = (trainer.model.values - start).cpu()
        delta.numpy().astype("<f4", copy=False).tofile(update)
        return {"num_examples": len(records), "metrics": metrics}

    def evaluate(self, request: Mapping[str, Any], model: str) -> dict[str, Any]:
        """Evaluate the model in a file."""
        task, trainer, state = self._prepared(request, model)
        records = self._records(task, request, training=not request["client_holdout"])
        if not len(records):
            raise TaskError("its only record is for training: none is left to evaluate on")
        values = state.flat.to(trainer.model.device)
        metrics = trainer.evaluate(
            values, records.inputs, records.targets, task.metrics, int(request["round"]), self._name
        )
        return {"num_examples": len(records), "metrics": metrics}

    def _prepared(self, request: Mapping[str, Any], model: str) -> tuple[Task, LocalTrainer, ModelState]:
        name = str(request["task"])
        if name not in self._tasks:
            raise ConfigError(
                f"this site does not take part in task {name!r}: it has {', '.join(self._tasks) or 'none'}"
            )
        task = self._tasks[name]
        key = (name, request["local"], request["rounds"], request["seed"])
        if self._trainer is None or self._trainer[0] != key:
            local = LocalConfig.model_validate(tomllib.loads(str(request["local"])))
            _refuse_code(local)
            plan = LocalPlan.from_config(local, int(request["rounds"]))
            device = choose_device(local.device)
            self._trainer = key, LocalTrainer(task.model(), task.loss, plan, device, int(request["seed"]))
        trainer = self._trainer[1]
        state, _, _ = read_archive(Path(model))
        trainer.model.load(state)
        return task, trainer, state

    def _records(self, task: Task, request: Mapping[str, Any], training: bool) -> Records:
        """The records of one purpose, in the order that a simulation has them."""
        records = task.train
        order = own_order(len(records), int(request["seed"]), self._name)
        count = num_training(len(records), float(request["client_holdout"]))
        rows = torch.from_numpy(order[:count] if training else order[count:])
        return Records(records.inputs[rows], records.targets[rows])


def own_records(task: Task, client: str | None) -> Task:
    """The task with the training records of one client key, or as it is. Raises ConfigError."""
    if client is None:
        return task
    keys = task.train.keys
    rows = np.flatnonzero(keys == client) if keys is not None else np.zeros(0, np.int64)
    if not len(rows):
        known = ", ".join(sorted(set(keys.tolist()))[:10]) if keys is not None else "none"
        raise ConfigError(f"client = {client!r}: task {task.name!r} has no records with that key: it has {known}")
    chosen = torch.from_numpy(rows)
    records = Records(task.train.inputs[chosen], task.train.targets[chosen])
    return Task(task.name, task.model, records, task.test, task.loss, task.metrics, task.num_classes, task.label_names)


def _refuse_code(local: LocalConfig) -> None:
    for key in ("algorithm", "optimizer", "lr_schedule"):
        choice: Choice | None = getattr(local, key)
        if choice is not None and ":" in choice.name:
            raise ConfigError(f"local.{key} = {choice.name!r}: this site runs no code that a server names")
