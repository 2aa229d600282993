"""A run's directory: ``run.toml``, ``checkpoint.safetensors``, ``model.safetensors``, ``workers.log`` and the lock.

One process holds a run's directory at a time.
"""

import fcntl
import os
import secrets
import time
from pathlib import Path

from coterie.core.errors import RunInUseError, StorageError

_PATIENCE = 0.3
"""Seconds to wait for a lock: `is_in_use` holds it for a moment."""


def default_home() -> Path:
    """Where runs are kept when nothing else is said: $COTERIE_HOME, else ~/.coterie (.coterie without a home)."""
    if named := os.environ.get("COTERIE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".coterie"
    except RuntimeError:
        return Path(".coterie")


def new_run_id() -> str:
    """An id that no run has: when it was made, and a few random digits."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def run_path(home: Path, run_id: str) -> Path:
    """Where a run's files lie."""
    return home / "runs" / run_id


class RunDirectory:
    """Holds a run's directory for this process. Raises RunInUseError when another process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"cannot use the run directory {path}: {error.strerror}") from None
        patience = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < patience:
                    time.sleep(0.02)
                    continue
                holder = (path / "lock").read_text().strip() or "unknown"
                os.close(self._lock)
                raise RunInUseError(
                    f"the run directory {path} is in use by process {holder}: wait for it or stop it"
                ) from None
        os.truncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def close(self) -> None:
        """Let others use it."""
        os.close(self._lock)

    @property
    def log(self) -> Path:
        """Where the workers' output goes."""
        return self.path / "workers.log"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def model(self) -> Path:
        """The final model, a plain safetensors file."""
        return self.path / "model.safetensors"


def is_in_use(path: Path) -> bool:
    """Whether some process holds a run's directory; True as well where this user may not look."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
