"""Handwritten digits: 5,000 images of MNIST, 500 of each digit. LeCun et al. 1998."""

import gzip
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from coterie.core.errors import ConfigError
from coterie.tasks.datasets import MNIST
from coterie.tasks.fetch import fetch
from coterie.tasks.metrics import accuracy
from coterie.tasks.models import cnn, mlp
from coterie.tasks.splits import stratified_split
from coterie.tasks.task import Records, Task


def mnist(model: str = "cnn") -> Task:
    """Handwritten digits, 4,000 images of 28 x 28 for the clients and 1,000 held out.

    model: "cnn" (28,938 parameters) or "mlp" (784-128-10). inputs float32[N, 1, 28, 28], pixels normalised; targets 0
    to 9. The split is the same for every seed. Raises DataError when the data cannot be fetched.
    """
    with gzip.open(fetch(MNIST)) as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    # Mean and deviation of MNIST's pixels, as published with it: with them training needs half as many rounds.
    inputs = (torch.from_numpy(table[:, :-1]).reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081
    targets = torch.from_numpy(table[:, -1].astype(np.int64))
    train, test = stratified_split([targets.numpy()], test_fraction=0.2)
    return Task(
        name="mnist",
        model=image_model(model, "mnist"),
        train=Records(inputs[train], targets[train]),
        test=Records(inputs[test], targets[test]),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        num_classes=10,
    )


def image_model(name: str, task: str) -> "partial[torch.nn.Module]":
    """The factory of a model for 28 x 28 images of ten classes. Raises ConfigError for an unknown name."""
    models = {"cnn": partial(cnn, 1, 28, 10), "mlp": partial(mlp, 784, [128], 10)}
    if name not in models:
        raise ConfigError(f"task.model = {name!r}: {task} has {', '.join(models)}")
    return models[name]
