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
        ({"metrics": {"f1": lambda outputs, targets: None}}, "the metric f1 must return one number, got NoneType"),
        ({"metrics": {"f1": lambda outputs, targets: "0.5"}}, "the metric f1 must return one number, got str"),
        ({"metrics": {"f1": lambda outputs, targets: 1j}}, "the metric f1 must return one number, got complex"),
        ({"metrics": {"f1": lambda outputs, targets: outputs}}, r"f1 must return one number, got shape \[4, 2\]"),
        ({"metrics": {"f1": lambda outputs, targets: sys.exit(3)}}, "the metric f1 raised SystemExit: 3"),
        ({"model": lambda: sys.exit(3)}, "the model factory raised SystemExit: 3"),
        ({"model": lambda: nn.LazyLinear(2)}, "task own: parameter 'weight' has no shape yet"),
        (
            {"train": Records(torch.zeros(3, 3), torch.zeros(3, 4, 5).long())},
            r"train: targets have shape \[3, 4, 5\]: num_classes is for one label per record: leave num_classes out",
        ),
        (
            {"train": Records(torch.zeros(2, 3), torch.zeros(2).long(), np.array(["a", "b\0c"]))},
            r"train: record 1 has the client key 'b\\x00c', which holds a NUL character",
        ),
    ],
)
def test_what_is_unfit_is_named(change, message):
    with pytest.raises(TaskError, match=message):
        check_task(make(**change), "own")


def double(**change):
    inputs, targets = torch.zeros(8, 3, dtype=torch.float64), torch.tensor([0, 1] * 4)
    return make(**{"train": Records(inputs, targets), "test": Records(inputs, targets)} | change)


def to_number(**change):
    inputs, targets = torch.zeros(8, 3), torch.zeros(8, 1, dtype=torch.float64)
    records, metrics = Records(inputs, targets), {"error": lambda outputs, targets: F.l1_loss(outputs, targets)}
    return make(model=lambda: nn.Linear(3, 1), train=records, test=records, loss=F.huber_loss, metrics=metrics,
                num_classes=None, **change)  # fmt: skip


class InTraining(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(3, 2), act

    def forward(self, x):
        return self.act(self.layer(x)) if self.training else self.layer(x)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (double(model=lambda: nn.Linear(3, 2).double()), "raised RuntimeError.*make the inputs and the model float32"),
        (to_number(), "raised RuntimeError.*: clients compute in float32, make the targets float32"),
        (make(model=lambda: InTraining(lambda x: (x, x))), "raised TypeError"),
        (make(model=lambda: InTraining(lambda x: sys.exit(4))), "raised SystemExit: 4"),
        (make(model=lambda: InTraining(lambda x: x.detach())), "the loss does not depend on the model's parameters"),
        (make(loss=lambda outputs, targets: torch.ones(())), "the loss does not depend on the model's parameters"),
        (
            make(
                model=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
                train=Records(torch.zeros(1, 3), torch.zeros(1).long()),
            ),
            "raised ValueError: Expected more than 1 value per channel",
        ),
    ],
)
def test_what_would_fail_in_every_clients_training_is_named(task, message):
    with pytest.raises(TaskError, match=f"task own: training on train records.*{message}"):
        check_task(task, "own")


def test_inputs_in_double_precision_for_a_model_in_single_are_named():
    with pytest.raises(TaskError, match=r"the model on train records raised RuntimeError.*make the inputs float32$"):
        check_task(double(), "own")


def test_checking_leaves_the_callers_random_state_the_records_and_the_module_alone():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(), nn.ReLU(inplace=True))
    inputs, before = torch.randn(8, 3), {name: tensor.clone() for name, tensor in module.state_dict().items()}
    copy, state = inputs.clone(), torch.get_rng_state()
    model, targets = nn.Sequential(nn.ReLU(inplace=True), module, nn.RReLU()), torch.zeros(8).long()
    check_task(make(model=lambda: model, train=Records(inputs, targets), test=Records(inputs, targets)), "own")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inputs, copy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("value", [float("nan"), 1, np.float32(0.5), torch.tensor(0.5), True])
def test_a_metric_may_return_any_number_even_none_at_all(value):
    check_task(make(metrics={"own": lambda outputs, targets: value}), "own")


def test_masks_are_targets_like_any_other_without_num_classes():
    records = Records(torch.zeros(6, 3, 4, 4), torch.zeros(6, 4, 4).long())
    pixels = {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).double().mean()}
    change = {"model": lambda: nn.Conv2d(3, 2, 1), "train": records, "test": records, "metrics": pixels}
    check_task(make(**change, num_classes=None), "own")


def test_ctrl_c_is_not_taken_for_a_mistake_in_the_task():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_task(make(model=interrupted), "own")


def test_accuracy_counts_every_record():
    outputs = torch.ones(1, 1).expand(2**24 + 4, 1)
    targets = torch.ones(2**24 + 4, dtype=torch.int64)
    targets[0] = 0
    assert accuracy(outputs, targets) == (2**24 + 3) / (2**24 + 4)


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
def interrupted(): raise KeyboardInterrupt
def recurses(): return recurses()
def named(name="mnist"): return None
class Callable:
    def __call__(self): raise KeyError("age")
called = Callable()
def forgets(): return None
"""


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("own_module:fails", TaskError, r"own_module:fails \(.*own_module\.py\) raised KeyError: 'age'"),
        ("own_module:leaves", TaskError, r"own_module:leaves \(.*\) raised SystemExit: 0"),
        ("own_module:recurses", TaskError, r"own_module:recurses \(.*\) raised RecursionError"),
        ("own_module:named", ConfigError, r"own_module:named.: a parameter cannot be called name"),
        ("own_module:called", TaskError, r"own_module:called \(\?\) raised KeyError: 'age'"),
        ("own_module:forgets", TaskError, r"own_module:forgets returned NoneType: return a coterie\.tasks\.Task"),
        ("own_module:NUMBER", ConfigError, r"task = 'own_module:NUMBER': that is a int"),
        ("own_module:absent", ConfigError, r"the module own_module \(.*\) has no 'absent'"),
        (
            "own_broken:make",
            ConfigError,
            r"importing own_broken failed with ModuleNotFoundError: No module named 'nosuch'",
        ),
        ("own_script:make", ConfigError, r"importing own_script failed with SystemExit: 2"),
        ("own_deep:make", ConfigError, r"importing own_deep failed with RecursionError"),
        ("minst", ConfigError, r"there is no 'minst': choose one of .*mnist"),
    ],
)
def test_a_function_that_cannot_give_a_task_is_named_with_the_reason(tmp_path, monkeypatch, name, error, message):
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    (tmp_path / "own_broken.py").write_text("import nosuch\n")
    (tmp_path / "own_script.py").write_text("import sys\nsys.exit(2)\n")
    (tmp_path / "own_deep.py").write_text("def deep(): deep()\ndeep()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    with pytest.raises(error, match=message) as raised:
        load_task(Choice(name=name))
    assert isinstance(raised.value, CoterieError)


def test_ctrl_c_in_a_users_function_is_ctrl_c(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    with pytest.raises(KeyboardInterrupt):
        load_task(Choice(name="own_module:interrupted"))


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
