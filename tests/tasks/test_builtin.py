"""The built-in tasks: real records, the same held-out set every time, and results as good as pooled training."""

import numpy as np
import pytest
import torch

from coterie.core.choice import Choice
from coterie.core.errors import ConfigError, DataError
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.simulations import simulate
from coterie.tasks import load_task
from coterie.tasks.datasets import FASHION_TEST_LABELS
from coterie.tasks.fetch import fetch

ONE_WORKER = {"simulation.workers": 1}
"""The numbers are the same for any number of workers, and one starts sooner."""


def test_mnist_has_4000_images_for_training_and_100_of_each_digit_held_out():
    task = load_task(Choice(name="mnist"))
    assert task.train.inputs.shape == (4000, 1, 28, 28)
    assert torch.bincount(task.test.targets).tolist() == [100] * 10
    assert ModelState.from_module(task.model()).layout.num_parameters == 28_938
    assert abs(float(task.train.inputs.mean())) < 0.1


def test_mnist_holds_out_the_same_images_every_time():
    one, other = load_task(Choice(name="mnist")), load_task(Choice(name="mnist", model="mlp"))
    assert torch.equal(one.test.inputs, other.test.inputs)
    held = {image.numpy().tobytes() for image in one.test.inputs}
    assert not any(image.numpy().tobytes() in held for image in one.train.inputs)


def test_heart_has_four_hospitals_with_their_own_shares_of_the_ill():
    task = load_task(Choice(name="heart"))
    hospitals, counts = np.unique(np.concatenate([task.train.keys, task.test.keys]), return_counts=True)
    assert dict(zip(hospitals.tolist(), counts.tolist(), strict=True)) == {
        "cleveland": 304, "hungary": 293, "switzerland": 123, "va": 200,
    }  # fmt: skip
    ill = {key: float(task.train.targets[task.train.keys == key].float().mean()) for key in hospitals}
    assert ill["switzerland"] > 0.9 > 0.8 > ill["va"] > 0.7 > 0.5 > ill["cleveland"] > ill["hungary"]
    assert set(task.test.keys) == set(hospitals)
    assert torch.isfinite(task.train.inputs).all()


def pooled_auc(task):
    """A logistic regression that sees all hospitals' records at once."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    pooled = LogisticRegression(max_iter=2000).fit(task.train.inputs.numpy(), task.train.targets.numpy())
    return roc_auc_score(task.test.targets.numpy(), pooled.predict_proba(task.test.inputs.numpy())[:, 1])


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "trimmed_mean"])
def test_four_hospitals_together_are_as_good_as_their_pooled_records(home, strategy):
    config = RunConfig.load(
        overrides={"task": "heart", "strategy": strategy, "rounds": 30, "evaluation.every": 0} | ONE_WORKER
    )
    result = simulate(config, home)
    assert result.config.simulation.clients == 4
    assert result.config.cohort.size == 4
    assert result.outcome.metrics["auc"] > pooled_auc(load_task(Choice(name="heart"))) - 0.02


def test_fashion_mnist_is_complete_or_says_how_to_get_it():
    refusal = None
    try:
        fetch(FASHION_TEST_LABELS)
    except DataError as error:
        refusal = str(error)
    if refusal:
        assert "apt-get install dataset-fashion-mnist" in refusal
        return
    task = load_task(Choice(name="fashion-mnist"))
    assert (len(task.train), len(task.test)) == (60_000, 10_000)
    assert torch.bincount(task.test.targets).tolist() == [1000] * 10


@pytest.mark.parametrize("name", ["mnist", "heart"])
def test_an_unknown_model_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"task\.model = 'vgg': .* has .*mlp"):
        load_task(Choice(name=name, model="vgg"))
