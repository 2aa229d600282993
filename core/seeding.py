"""Every random choice draws from a generator derived from (run seed, purpose, round, client).

Two choices never share a stream, and none depends on the order in which others were made: a run gives the same
numbers with one worker or with many, and after a crash and resume.
"""

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive_seed(7, "batches", round, client_id)``."""
    text = repr((seed, *purpose))
    return (
        int.from_bytes(hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest(), "little") >> 1
    )


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose. Draw on the CPU and move, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, *purpose))
