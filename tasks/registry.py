"""The built-in tasks by name, and how a task is loaded and checked."""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from coterie.core.choice import Choice, complete, find
from coterie.core.errors import CoterieError, TaskError
from coterie.tasks.fashion_mnist import fashion_mnist
from coterie.tasks.heart import heart
from coterie.tasks.mnist import mnist
from coterie.tasks.own_data import arrays, images, table
from coterie.tasks.task import Records, Task

TASKS: Mapping[str, Callable[..., Task]] = {
    "mnist": mnist,
    "heart": heart,
    "fashion-mnist": fashion_mnist,
    "table": table,
    "arrays": arrays,
    "images": images,
}


def load_task(choice: Choice) -> Task:
    """Call the function that a run file names and check what it returns.

    Raises ConfigError for an unknown name, a wrong option or a module that cannot be imported; TaskError for a function
    that raises or returns something unfit; DataError from the built-in tasks.
    """
    function = find(TASKS, choice, "task")
    options = complete(TASKS, choice, "task").options
    try:
        task = function(**options)
    except CoterieError:
        raise
    except Exception as error:
        place = inspect.getsourcefile(function) or "?"
        raise TaskError(f"task {choice.name} ({place}) raised {type(error).__name__}: {error}") from error
    check_task(task, choice.name)
    return task


def check_task(task: object, name: str) -> None:
    """Raise TaskError saying what is wrong with a task, if anything is."""
    if not isinstance(task, Task):
        raise TaskError(f"task {name} returned {type(task).__name__}: return a coterie.tasks.Task")
    for part, records in (("train", task.train), ("test", task.test)):
        _check_records(records, f"task {name}: {part}", task.num_classes)
    if not task.metrics:
        raise TaskError(f"task {name} has no metrics: give at least one")
    _check_model(task, name)


def _check_records(records: Records, where: str, num_classes: int | None) -> None:
    inputs, targets = records.inputs, records.targets
    if len(inputs) == 0:
        raise TaskError(f"{where} has no records")
    if len(inputs) != len(targets):
        raise TaskError(f"{where} has {len(inputs)} inputs and {len(targets)} targets")
    if records.keys is not None and len(records.keys) != len(inputs):
        raise TaskError(f"{where} has {len(inputs)} inputs and {len(records.keys)} client keys")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        row = int((~torch.isfinite(inputs)).reshape(len(inputs), -1).any(1).nonzero()[0])
        raise TaskError(f"{where}: record {row} has an input that is not finite")
    if num_classes is not None:
        if targets.dtype != torch.int64:
            raise TaskError(f"{where}: targets are {targets.dtype}: class labels are torch.int64")
        if int(targets.min()) < 0 or int(targets.max()) >= num_classes:
            raise TaskError(
                f"{where}: targets go from {int(targets.min())} to {int(targets.max())}, num_classes is {num_classes}"
            )


def _check_model(task: Task, name: str) -> None:
    """Put a few records through the model, the loss and the metrics: what fails here would fail in every client."""
    with torch.random.fork_rng(devices=[]):
        module = _attempt(task.model, f"task {name}: the model factory")
    if not isinstance(module, nn.Module):
        raise TaskError(f"task {name}: the model factory returned {type(module).__name__}: return a torch.nn.Module")
    inputs, targets = task.test.inputs[:4], task.test.targets[:4]
    with torch.no_grad():
        outputs = _attempt(lambda: module.eval()(inputs), f"task {name}: the model on test records")
        if not isinstance(outputs, Tensor) or len(outputs) != len(inputs):
            raise TaskError(
                f"task {name}: the model must return one tensor with a row per record, got {type(outputs).__name__}"
            )
        loss = _attempt(lambda: task.loss(outputs, targets), f"task {name}: the loss")
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise TaskError(f"task {name}: the loss must return a scalar tensor, the mean over the batch")
        for metric, function in task.metrics.items():
            _attempt(lambda function=function: float(function(outputs, targets)), f"task {name}: the metric {metric}")


def _attempt(work: Callable[[], object], what: str) -> object:
    try:
        return work()
    except Exception as error:
        raise TaskError(f"{what} raised {type(error).__name__}: {error}") from error
