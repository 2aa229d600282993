"""Small models for the built-in tasks and for own data."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def linear(num_features: int, num_classes: int) -> nn.Module:
    """Logistic regression: inputs[N, F] to scores[N, C], starting at zero."""
    layer = nn.Linear(num_features, num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(num_features: int, hidden: Sequence[int], num_classes: int) -> nn.Module:
    """Flatten, then ReLU layers of the given widths: inputs[N, ...] to scores[N, C]."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = num_features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def cnn(channels: int, size: int, num_classes: int, batch_norm: bool = False) -> nn.Module:
    """Two 5 x 5 convolutions of 16 and 32 channels, each with ReLU and pooling: images[N, channels, size, size] to
    scores[N, C]."""

    def block(inside: int, outside: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outside)] if batch_norm else []
        return [nn.Conv2d(inside, outside, 5, padding=2), *norm, nn.ReLU(), nn.MaxPool2d(2)]

    # Large images are averaged down to at most 8 x 8: a linear layer on thousands of inputs would not bear the usual
    # learning rates. Not by AdaptiveAvgPool2d, whose backward is not deterministic on CUDA.
    window = math.ceil(size // 4 / 8)
    side = math.ceil(size // 4 / window)
    pool = [nn.AvgPool2d(window, ceil_mode=True)] if window > 1 else []
    layers = [*block(channels, 16), *block(16, 32), *pool, nn.Flatten(), nn.Linear(32 * side**2, num_classes)]
    return nn.Sequential(*layers)


class FromBytes(nn.Module):
    """Images kept as bytes: uint8[N, C, H, W] to float32 in [-1, 1], then the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(torch.float32) / 127.5 - 1)
