"""The device: the best that is there, or a clear refusal."""

import pytest
import torch

from coterie.client.devices import choose_device
from coterie.core.errors import ConfigError


def test_auto_takes_a_device_that_is_there():
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert choose_device().type == best


def test_cpu_is_always_there():
    assert choose_device("cpu").type == "cpu"


def test_what_is_no_device_is_refused():
    with pytest.raises(ConfigError, match=r"local\.device = 'cpu:7': this machine has no such device"):
        choose_device("cpu:7")
    with pytest.raises(ConfigError, match=r"local\.device = 'gpu0': write auto, cpu, cuda"):
        choose_device("gpu0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"local\.device = 'cuda': this machine has no such device"):
        choose_device("cuda")
