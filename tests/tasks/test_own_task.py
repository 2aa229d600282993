"""A task of a user's own: what is unfit is named before any client sees it."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coterie.core.choice import Choice
from coterie.core.errors import ConfigError, CoterieError, TaskError
from coterie.tasks import Records, Task, load_task
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
        ({"model": lambda: nn.Linear(4, 2)}, "the model on train records raised RuntimeError: mat1 and mat2"),
        ({"model": lambda: nn.Sequential(nn.Linear(3, 2), nn.Flatten(0))}, r"got shape \[8\] for 4 train records"),
        ({"num_classes": 5}, "the model gives 2 scores, num_classes is 5"),
        ({"test": Records(torch.zeros(4, 9), torch.zeros(4).long())}, "the model on test records raised RuntimeError"),
        ({"test": None}, "test is a NoneType: give Records"),
        ({"train": Records(np.zeros((2, 3)), torch.zeros(2).long())}, "train: inputs are a ndarray: make them a torch"),
        ({"train": Records(torch.zeros(2, 3), [0, 1])}, "train: targets are a list: make them a torch"),
        ({"train": Records(torch.tensor(1.0), torch.zeros(1).long())}, r"inputs have shape \[\] on cpu"),
        (
            {"train": Records(torch.zeros(2, 3), torch.zeros(2).long(), ["a", "b"])},
            "client keys are one text per record",
        ),
        (
            {"train": Records(torch.zeros(2, 3), torch.tensor([0.0, torch.inf])), "num_classes": None},
            "train: record 1 has a target that is not finite",
        ),
        ({"metrics": [accuracy]}, "own has no metrics"),
        ({"metrics": {"loss": accuracy}}, "own has a metric named loss"),
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


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=5, max_size=200), st.floats(0.05, 0.5))
def test_the_split_holds_out_every_record_once_or_not_at_all(labels, fraction):
    labels = np.array(labels)
    train, test = stratified_split([labels], fraction)
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in range(5):
        assert abs((labels[test] == label).sum() - fraction * (labels == label).sum()) <= 1
    assert np.array_equal(stratified_split([labels], fraction)[1], test)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(-20, 20), st.booleans()), min_size=4, max_size=40))
def test_one_logit_and_two_scores_say_the_same(records):
    logits = torch.tensor([float(score) for score, _ in records])
    targets = torch.tensor([int(label) for _, label in records])
    pairs = torch.stack([torch.zeros(len(logits)), logits], 1)
    for metric in (accuracy, balanced_accuracy, auc):
        expected = metric(pairs, targets)
        for outputs, labels in (
            (logits, targets),
            (logits[:, None], targets),
            (logits[:, None], targets[:, None].float()),
        ):
            assert metric(outputs, labels) == pytest.approx(expected, nan_ok=True)
    assert auc(pairs * 3 + 1, targets) == pytest.approx(auc(pairs, targets), nan_ok=True)


def test_a_diverged_model_has_no_auc_rather_than_an_error():
    targets = torch.tensor([0, 1, 1, 0])
    assert np.isnan(auc(torch.full((4, 2), torch.inf), targets))
    assert np.isnan(auc(torch.full((4, 3), torch.nan), torch.tensor([0, 1, 2, 0])))


def test_targets_of_another_shape_than_the_predictions_are_refused():
    with pytest.raises(ValueError, match=r"\[4\] predictions and \[4, 1\] targets"):
        accuracy(torch.zeros(4, 2), torch.zeros(4, 1).long())


OWN_MODULE = """
NUMBER = 3
def fails(): raise KeyError("age")
def leaves(): raise SystemExit(0)
def forgets(): return None
"""


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("own_module:fails", TaskError, r"own_module:fails \(.*own_module\.py\) raised KeyError: 'age'"),
        ("own_module:leaves", TaskError, r"own_module:leaves \(.*\) raised SystemExit: 0"),
        ("own_module:forgets", TaskError, r"own_module:forgets returned NoneType: return a coterie\.tasks\.Task"),
        ("own_module:NUMBER", ConfigError, r"task = 'own_module:NUMBER': that is a int"),
        ("own_module:absent", ConfigError, r"the module own_module \(.*\) has no 'absent'"),
        (
            "own_broken:make",
            ConfigError,
            r"importing own_broken failed with ModuleNotFoundError: No module named 'nosuch'",
        ),
        ("own_script:make", TaskError, r"own_script:make: its module called sys\.exit\(2\) when imported"),
        ("minst", ConfigError, r"there is no 'minst': choose one of .*mnist"),
    ],
)
def test_a_function_that_cannot_give_a_task_is_named_with_the_reason(tmp_path, monkeypatch, name, error, message):
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    (tmp_path / "own_broken.py").write_text("import nosuch\n")
    (tmp_path / "own_script.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    with pytest.raises(error, match=message) as raised:
        load_task(Choice(name=name))
    assert isinstance(raised.value, CoterieError)


def test_the_example_in_the_docs_is_a_fit_task(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task(Choice(name="my_module:make", num_records=300))
    assert (len(task.train), len(task.test)) == (200, 100)


def test_importing_tasks_does_not_import_what_only_some_need():
    script = "import sys, coterie.tasks; print([m for m in ('sklearn', 'pyarrow', 'PIL', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
