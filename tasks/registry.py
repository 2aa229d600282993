"""The built-in tasks by name, and how a task is loaded and checked."""

import copy
import inspect
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from coterie.core.choice import Choice, find, options_of
from coterie.core.errors import CoterieError, ModelError, TaskError
from coterie.core.importing import missing_extra
from coterie.core.model_state import split
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
    options = options_of(TASKS, choice, "task")
    try:
        task = function(**options)
    except CoterieError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}{missing_extra(error)}"
        raise TaskError(f"task {choice.name} ({_place(function)}) raised {said}") from error
    check_task(task, choice.name)
    return task


def _place(function: Callable[..., Task]) -> str:
    try:
        return inspect.getsourcefile(function) or "?"
    except TypeError:  # an object that can be called, or no Python at all
        return "?"


def check_task(task: object, name: str) -> None:
    """Raise TaskError saying what is wrong with a task, if anything is."""
    if not isinstance(task, Task):
        raise TaskError(f"task {name} returned {type(task).__name__}: return a coterie.tasks.Task")
    for part, records in (("train", task.train), ("test", task.test)):
        _check_records(records, f"task {name}: {part}", task.num_classes)
    _check_metrics(task.metrics, name)
    _check_model(task, name)


def _check_records(records: object, where: str, num_classes: int | None) -> None:
    if not isinstance(records, Records):
        raise TaskError(f"{where} is a {type(records).__name__}: give Records(inputs, targets, keys)")
    inputs, targets = _tensor(records.inputs, f"{where}: inputs"), _tensor(records.targets, f"{where}: targets")
    if len(inputs) == 0:
        raise TaskError(f"{where} has no records")
    if len(inputs) != len(targets):
        raise TaskError(f"{where} has {len(inputs)} inputs and {len(targets)} targets")
    _check_keys(records.keys, len(inputs), where)
    for what, tensor in (("an input", inputs), ("a target", targets)):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            row = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()[0])
            raise TaskError(f"{where}: record {row} has {what} that is not finite")
    if num_classes is not None:
        if targets.dim() != 1:
            raise TaskError(
                f"{where}: targets have shape {list(targets.shape)}: num_classes is for one label per record: "
                "leave num_classes out for other targets"
            )
        if targets.dtype != torch.int64:
            raise TaskError(f"{where}: targets are {targets.dtype}: class labels are torch.int64")
        if int(targets.min()) < 0 or int(targets.max()) >= num_classes:
            raise TaskError(
                f"{where}: targets go from {int(targets.min())} to {int(targets.max())}, num_classes is {num_classes}"
            )


def _tensor(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TaskError(f"{what} are a {type(value).__name__}: make them a torch.Tensor (torch.from_numpy, say)")
    if value.dim() == 0 or value.device.type != "cpu":
        raise TaskError(
            f"{what} have shape {list(value.shape)} on {value.device}: records are rows on the CPU, "
            "and each batch is moved to the device when it is its turn"
        )
    return value


def _check_keys(keys: object, count: int, where: str) -> None:
    if keys is None:
        return
    if not isinstance(keys, np.ndarray) or keys.dtype.kind != "U" or keys.ndim != 1:
        raise TaskError(f"{where}: client keys are one text per record: make them numpy.array(keys, dtype=str)")
    if len(keys) != count:
        raise TaskError(f"{where} has {count} inputs and {len(keys)} client keys")
    for row, key in enumerate(keys.tolist()):
        if "\0" in key:
            raise TaskError(
                f"{where}: record {row} has the client key {key!r}, which holds a NUL character: take it out"
            )


def _check_metrics(metrics: object, name: str) -> None:
    if not isinstance(metrics, Mapping) or not metrics:
        raise TaskError(f'task {name} has no metrics: give at least one, as {{"accuracy": accuracy}}')
    if "loss" in metrics:
        raise TaskError(f"task {name} has a metric named loss: the loss is reported by that name, choose another")


def _check_model(task: Task, name: str) -> None:
    """Put a few records through the model, the loss and the metrics: what fails here would fail in every client."""
    with torch.random.fork_rng(devices=[]):
        module = _attempt(task.model, f"task {name}: the model factory")
        if not isinstance(module, nn.Module):
            raise TaskError(
                f"task {name}: the model factory returned {type(module).__name__}: return a torch.nn.Module"
            )
        try:
            split(module)
        except ModelError as error:
            raise TaskError(f"task {name}: {error}") from None
        module.eval()
        with torch.no_grad():
            for part, records in (("train", task.train), ("test", task.test)):
                inputs, targets = records.inputs[:4].clone(), records.targets[:4].clone()
                _check_outputs(task, name, module, inputs, targets, f"{part} records")
        _check_training(task, name, module)


def _check_outputs(task: Task, name: str, module: nn.Module, inputs: Tensor, targets: Tensor, part: str) -> None:
    hint = _hint(module, inputs, targets)
    outputs = _attempt(lambda: module(inputs), f"task {name}: the model on {part}", hint)
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != len(inputs):
        got = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TaskError(
            f"task {name}: the model must return one tensor with a row per record, got {got} for {len(inputs)} {part}"
        )
    # A label beyond the last score would only be met in the middle of a run.
    scores = outputs.shape[1] if outputs.dim() > 1 else 1
    if task.num_classes is not None and scores < task.num_classes and (scores, task.num_classes) != (1, 2):
        raise TaskError(f"task {name}: the model gives {scores} scores, num_classes is {task.num_classes}")
    _check_loss(_attempt(lambda: task.loss(outputs, targets), f"task {name}: the loss on {part}", hint), name)
    for metric, function in task.metrics.items():
        value = _attempt(
            lambda function=function: function(outputs, targets), f"task {name}: the metric {metric}", hint
        )
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            float(value)  # pyright: ignore[reportArgumentType]
        except Exception:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(f"task {name}: the metric {metric} must return one number, got {got}") from None


def _check_loss(loss: object, name: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise TaskError(f"task {name}: the loss must return a scalar tensor, the mean over the batch")
    return loss


def _check_training(task: Task, name: str, module: nn.Module) -> None:
    """One step as a client takes it, where what is averaged is float32, whatever dtype the model was made in.

    On the last records: the first have been through the model already.
    """
    what = f"task {name}: training on train records"
    inputs, targets = task.train.inputs[-4:].clone(), task.train.targets[-4:].clone()
    hint = _hint(module, inputs, targets)
    module = _copied(module)
    module.train()
    for tensor in split(module)[1]:
        tensor.data = tensor.data.float()
    with torch.enable_grad():
        loss = _check_loss(_attempt(lambda: task.loss(module(inputs), targets), what, hint), name)
        if not loss.requires_grad:
            raise TaskError(f"{what}: the loss does not depend on the model's parameters: compute it from the outputs")
        _attempt(loss.backward, what, hint)


def _copied(module: nn.Module) -> nn.Module:
    """A copy, in case the factory gives the same module every time; a module that has none is used itself."""
    try:
        return copy.deepcopy(module)
    except Exception:
        return module


def _hint(module: nn.Module, inputs: Tensor, targets: Tensor) -> str:
    """What to make float32 when an error is about dtypes."""
    parts = {"inputs": [inputs], "targets": [targets], "model": list(module.parameters())}
    double = [part for part, tensors in parts.items() if any(tensor.dtype == torch.float64 for tensor in tensors)]
    return f": clients compute in float32, make the {' and the '.join(double)} float32" if double else ""


def _attempt(work: Callable[[], object], what: str, hint: str = "") -> object:
    """hint: added to an error about double precision."""
    try:
        return work()
    except (Exception, SystemExit) as error:
        hint = hint if "double" in str(error).lower() else missing_extra(error)
        raise TaskError(f"{what} raised {type(error).__name__}: {error}{hint}") from error
