"""Tensors that the coordinator and its workers see in the same memory.

The memory has no name: it is a memory file (or an unlinked temporary one where the system has none), so nothing is left
behind however a process ends. Its descriptor travels over a Unix socket.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.errors import RunError


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in shared memory and the descriptor that reaches it. tensor: contiguous, page-aligned."""

    fd: int
    tensor: Tensor

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "SharedTensor":
        """Zeros of that shape in fresh shared memory. Raises RunError when the system gives none."""
        num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
        try:
            if hasattr(os, "memfd_create"):
                fd = os.memfd_create("coterie")
            else:
                with tempfile.TemporaryFile() as file:
                    fd = os.dup(file.fileno())
            os.truncate(fd, num_bytes)
            return cls.attach(fd, shape, dtype)
        except OSError as error:
            raise RunError(f"cannot share {num_bytes:,} bytes with the worker processes: {error.strerror}") from error

    @classmethod
    def copy_of(cls, source: Tensor, rows: Tensor | None = None) -> "SharedTensor":
        """A copy of a tensor in shared memory; of its `rows` (int64 indices), in that order, when given."""
        shape = tuple(source.shape) if rows is None else (len(rows), *source.shape[1:])
        shared = cls.create(shape, source.dtype)
        if rows is None:
            shared.tensor.copy_(source)
        else:
            torch.index_select(source, 0, rows, out=shared.tensor)
        return shared

    @classmethod
    def attach(cls, fd: int, shape: tuple[int, ...], dtype: torch.dtype) -> "SharedTensor":
        """The tensor behind a descriptor that another process made."""
        count = torch.Size(shape).numel()
        memory = mmap.mmap(fd, max(1, count * dtype.itemsize))
        tensor = torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        return cls(fd, tensor.view(shape))

    def close(self) -> None:
        """Close the descriptor; the memory itself goes with the last tensor on it."""
        os.close(self.fd)
