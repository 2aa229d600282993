"""A worker process that is there when it is needed: started at the first call, and again after it has died."""

import threading
from pathlib import Path
from typing import Any

import cloudpickle

from coterie.client.worker_process import WorkerProcess, WorkerSetup
from coterie.core.errors import RunError, TaskError


class Supervised:
    """Calls methods of the object that a set-up makes, in a process of its own, one after the other."""

    def __init__(self, setup: WorkerSetup, log: Path | None = None) -> None:
        self._payload = cloudpickle.dumps(setup)
        self._log = log
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns. Raises TaskError for what it raises, RunError when the process dies at it."""
        with self._lock:
            process = self._ready()
            try:
                process.connection.send((method, arguments))
                status, value = process.connection.recv()
            except (EOFError, ConnectionError):
                raise self._ended(process) from None
        if status != "done":
            raise TaskError(str(value))
        return value

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _ready(self) -> WorkerProcess:
        if self._process is not None:
            return self._process
        process = WorkerProcess(self._log)
        process.configure(self._payload, [])
        try:
            status, value = process.connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended(process) from None
        if status != "ready":
            process.stop()
            raise TaskError(f"this site's tasks cannot be loaded: {value}")
        self._process = process
        return process

    def _ended(self, process: WorkerProcess) -> RunError:
        ending = process.how_it_ended()
        process.stop()
        self._process = None
        return RunError(f"the worker process ended: {ending}")
