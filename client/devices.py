"""Which device trains."""

import torch

from coterie.core.errors import ConfigError


def choose_device(name: str = "auto") -> torch.device:
    """The device for a name: ``auto`` takes the first of cuda, mps and cpu that is there. Raises ConfigError."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"local.device = {name!r}: write auto, cpu, cuda, cuda:N or mps") from None
    available = {"cpu": not device.index, "cuda": cuda and (device.index or 0) < torch.cuda.device_count(), "mps": mps}
    if not available.get(device.type, False):
        raise ConfigError(f"local.device = {name!r}: this machine has no such device for torch: use auto or cpu")
    return device
