"""The small models: which shapes they take, and how large images are averaged down."""

import pytest
import torch
from torch import nn

from coterie.tasks.models import cnn


@pytest.mark.parametrize("size", [4, 5, 28, 35, 36, 47, 64, 68, 100, 224, 257])
def test_images_of_any_size_become_scores(size):
    model = cnn(1, size, 3)
    assert model(torch.zeros(2, 1, size, size)).shape == (2, 3)
    assert model[-1].in_features <= 32 * 8**2


@pytest.mark.parametrize("size", [4, 28, 35])
def test_small_images_are_not_averaged(size):
    assert [type(layer) for layer in cnn(1, size, 10)] == [
        *[nn.Conv2d, nn.ReLU, nn.MaxPool2d] * 2, nn.Flatten, nn.Linear,
    ]  # fmt: skip


@pytest.mark.parametrize("size", [36, 47, 64, 96, 224])
def test_large_images_are_averaged_in_whole_windows(size):
    pool = cnn(1, size, 3)[-3]
    assert isinstance(pool, nn.AvgPool2d)
    assert torch.equal(pool(torch.ones(1, 32, size // 4, size // 4)).unique(), torch.ones(1))
    if size // 4 % 8 == 0:
        features = torch.randn(2, 32, size // 4, size // 4)
        torch.testing.assert_close(pool(features), nn.functional.adaptive_avg_pool2d(features, 8))
