"""Articles of clothing: Fashion-MNIST, 70,000 images. Xiao et al. 2017, arXiv:1708.07747."""

import gzip

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from coterie.tasks.datasets import (
    FASHION_TEST_IMAGES,
    FASHION_TEST_LABELS,
    FASHION_TRAIN_IMAGES,
    FASHION_TRAIN_LABELS,
    DataFile,
)
from coterie.tasks.fetch import fetch
from coterie.tasks.metrics import accuracy
from coterie.tasks.mnist import image_model
from coterie.tasks.task import Records, Task

LABELS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def fashion_mnist(model: str = "cnn") -> Task:
    """Articles of clothing, 60,000 images of 28 x 28 for the clients and 10,000 held out (from a Debian package).

    model: "cnn" or "mlp", as for mnist. inputs float32[N, 1, 28, 28] in [0, 1]; targets 0 to 9. Raises DataError when
    its package cannot be had.
    """
    return Task(
        name="fashion-mnist",
        model=image_model(model, "fashion-mnist"),
        train=_records(FASHION_TRAIN_IMAGES, FASHION_TRAIN_LABELS),
        test=_records(FASHION_TEST_IMAGES, FASHION_TEST_LABELS),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        num_classes=10,
        label_names=LABELS,
    )


def _records(images: DataFile, labels: DataFile) -> Records:
    pixels = _idx(images, header=16).reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return Records(torch.from_numpy(pixels), torch.from_numpy(_idx(labels, header=8).astype(np.int64)))


def _idx(file: DataFile, header: int) -> NDArray[np.uint8]:
    """The bytes of an IDX file after its header."""
    with gzip.open(fetch(file)) as stream:
        return np.frombuffer(stream.read(), np.uint8, offset=header)
