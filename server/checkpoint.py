"""A run made safe on disk.

A checkpoint is written beside the old one, flushed to disk and renamed over it, so that there is a complete one at
every moment.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from coterie.core.errors import ModelError, RunError, StorageError
from coterie.core.model_state import ModelState, read_archive


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on after `round` complete rounds.

    optimizer: the server optimizer's tensors; clock: virtual seconds so far; empty_rounds: how many in a row.
    """

    round: int
    model: ModelState
    optimizer: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    clock: float = 0.0
    empty_rounds: int = 0

    def save(self, path: Path) -> None:
        """Write it, in one go."""
        note = {"round": self.round, "clock": self.clock, "empty_rounds": self.empty_rounds}
        self.model.save(path, self.optimizer, note)

    @classmethod
    def load(cls, path: Path) -> "Checkpoint | None":
        """The last complete checkpoint, or None before the first. Raises RunError when it cannot be read."""
        try:
            model, optimizer, note = read_archive(path)
            # Copies: windows on this file would keep its space on the disk after the next one has replaced it.
            model = replace(model, flat=model.flat.clone())
            optimizer = {name: tensor.clone() for name, tensor in optimizer.items()}
            return cls(int(note["round"]), model, optimizer, float(note["clock"]), int(note["empty_rounds"]))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"cannot read the checkpoint {path}: {error.strerror}") from None
        except (ModelError, LookupError, TypeError, ValueError) as error:
            raise RunError(f"the checkpoint {path} is damaged: {error}: restore it or start a new run") from error


def write_safely(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside, flush it to disk, rename it: readers see the old file or the new one.

    Raises StorageError, leaving the old one.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(b"")
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        why = getattr(error, "strerror", error)
        raise StorageError(
            f"cannot write {path}: {why}: free space or mend permissions, then go on with "
            f"`coterie runs resume`; the last complete checkpoint is kept"
        ) from error


class CheckpointWriter:
    """Writes checkpoints on a thread of its own. A disk slower than the rounds makes checkpoints rarer, never the
    rounds slower."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next: Checkpoint | None = None
        self._error: Exception | None = None
        self._change = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def put(self, checkpoint: Checkpoint) -> None:
        """Hand over the newest state; it must not be changed afterwards. Raises what an earlier write raised."""
        with self._change:
            self._raise()
            self._next = checkpoint
            self._change.notify()

    def close(self) -> None:
        """Wait until the newest state is on disk. Raises StorageError when it cannot be."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._next is not None or self._closing)
                checkpoint, self._next = self._next, None
            if checkpoint is None:
                return
            try:
                write_safely(self._path, checkpoint.save)
            except Exception as error:
                self._error = error
