"""A task of a user's own: what is unfit is named before any client sees it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core.errors import TaskError
from coterie.tasks import Records, Task
from coterie.tasks.metrics import accuracy, auc, balanced_accuracy
from coterie.tasks.registry import check_task
from coterie.tasks.splits import stratified_split


def make(**change):
    inputs, targets = torch.zeros(8, 3), torch.tensor([0, 1] * 4)
    parts = {
        "name": "own",
        "model": lambda: nn.Linear(3, 2),
        "train": Records(inputs, targets),
        "test": Records(inputs, targets),
        "loss": F.cross_entropy,
        "metrics": {"accuracy": accuracy},
        "num_classes": 2,
    }
    return Task(**(parts | change))


def test_a_fit_task_passes():
    check_task(make(), "own")


def broken():
    raise OSError("weights.bin is missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": Records(torch.zeros(0, 3), torch.zeros(0).long())}, "own: train has no records"),
        ({"test": Records(torch.zeros(3, 3), torch.zeros(2).long())}, "own: test has 3 inputs and 2 targets"),
        ({"train": Records(torch.zeros(2, 3), torch.zeros(2).long(), np.array(["a"]))}, "2 inputs and 1 client keys"),
        (
            {"train": Records(torch.tensor([[0.0] * 3, [0, torch.nan, 0]]), torch.zeros(2).long())},
            "own: train: record 1 has an input that is not finite",
        ),
        (
            {"train": Records(torch.zeros(2, 3), torch.zeros(2))},
            "targets are torch.float32: class labels are torch.int64",
        ),
        ({"num_classes": 1}, "targets go from 0 to 1, num_classes is 1"),
        ({"metrics": {}}, "own has no metrics"),
        ({"model": broken}, "the model factory raised OSError: weights.bin is missing"),
        ({"model": lambda: "resnet"}, "the model factory returned str: return a torch.nn.Module"),
        ({"model": lambda: nn.Linear(4, 2)}, "the model on test records raised RuntimeError: mat1 and mat2"),
        ({"loss": lambda outputs, targets: outputs}, "the loss must return a scalar tensor"),
        ({"metrics": {"f1": lambda outputs, targets: 1 / 0}}, "the metric f1 raised ZeroDivisionError"),
    ],
)
def test_what_is_unfit_is_named(change, message):
    with pytest.raises(TaskError, match=message):
        check_task(make(**change), "own")


def test_metrics_on_small_cases_by_hand():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 2.0]])
    targets = torch.tensor([0, 0, 1, 1])
    assert accuracy(outputs, targets) == 0.75
    assert balanced_accuracy(outputs, targets) == 0.75
    assert auc(outputs, targets) == pytest.approx(0.875)
    assert np.isnan(auc(outputs, torch.zeros(4).long()))
    assert balanced_accuracy(outputs[:2], targets[:2]) == 0.5
    three = torch.eye(3)
    assert auc(three, torch.tensor([0, 1, 2])) == 1.0


def test_the_split_gives_every_stratum_its_share():
    labels, keys = np.repeat([0, 1], [700, 300]), np.array(list("abcde") * 200)
    train, test = stratified_split([labels, keys], 0.2)
    assert sorted([*train, *test]) == list(range(1000))
    for label in (0, 1):
        for key in "abcde":
            group = (labels == label) & (keys == key)
            assert abs(group[test].sum() - 0.2 * group.sum()) <= 1
