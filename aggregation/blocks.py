"""Updates[n, D] read in blocks of columns, so that no rule holds a second copy of them, on all cores.

A block's result depends on its columns alone: neither the number of threads nor the width of a block shows in the bits.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.cores import available_cores
from coterie.core.errors import PreconditionError

Array = NDArray[Any]
Result = TypeVar("Result")

WIDTH = 1 << 15
"""Columns in a block: long enough runs of each row for a disk, short enough for the second-level cache."""

_COPIED_VALUES = 1 << 22
"""Most values that are held converted at one time, over all threads: 16 MB of float32, 32 MB of float64."""


def check_updates(updates: Tensor, rule: str) -> None:
    """Raise PreconditionError, naming the rule, unless updates is [n, D] of a floating-point dtype."""
    if updates.dim() != 2 or not updates.is_floating_point():
        raise PreconditionError(
            f"{rule} needs floating-point updates[n, D], got {str(updates.dtype).removeprefix('torch.')}"
            f"{list(updates.shape)}: stack one row per client"
        )


def each_block(updates: Tensor, work: Callable[[Array, int, slice], Result]) -> list[Result]:
    """Call work(array, first, columns) for each block of updates[n, D]; its answers in the order of the columns.

    `columns` is the block's place in the updates; its values are array[:, first:] for as many columns. The array is
    C-contiguous float32 or float64 on the CPU: the updates' own memory where they are that already, a converted copy of
    the block otherwise.
    """
    n, size = updates.shape
    updates = updates.detach()
    native = updates.dtype in (torch.float32, torch.float64)
    whole = updates.numpy() if native and updates.device.type == "cpu" and updates.is_contiguous() else None
    threads = max(1, min(available_cores(), -(-size // WIDTH)))
    width = WIDTH if whole is not None else max(1, min(WIDTH, size, _COPIED_VALUES // (n * threads)))
    # One for each thread, used again: memory that threads free and allocate by turns stays with the process.
    copies: SimpleQueue[Tensor] = SimpleQueue()
    if whole is None:
        for _ in range(threads):
            copies.put(torch.empty(n * width, dtype=updates.dtype if native else torch.float32))

    def block(start: int) -> Result:
        columns = slice(start, min(size, start + width))
        if whole is not None:
            return work(whole, start, columns)
        memory = copies.get()
        try:
            copy = memory[: n * (columns.stop - start)].view(n, -1).copy_(updates[:, columns])
            return work(copy.numpy(), 0, columns)
        finally:
            copies.put(memory)

    starts = range(0, size, width)
    if threads == 1:
        return [block(start) for start in starts]
    # The kernels release the GIL. A pool of its own for each call: threads that live on would not survive a fork.
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(block, starts))
