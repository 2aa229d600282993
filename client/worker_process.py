"""The parent's end of a worker process: start it, hand it its set-up, talk to it, end it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol


class WorkerSetup(Protocol):
    """What a worker process needs once."""

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each shared tensor, in the order of the descriptors."""
        ...

    def start(self, shared: Mapping[str, Any]) -> object:
        """In the worker process: the object whose methods are the jobs, with the shared tensors by name."""
        ...


class WorkerProcess:
    """One worker. It starts importing at once; `configure` sends what it needs as soon as that is known.

    jobs: what it has been sent and not answered yet, oldest first (it answers in order).
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        # One thread per worker and nothing else: two sets of BLAS threads on one core cost more than they give. And a
        # file in the working directory must not stand in for a module of Python's own.
        env = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env["PYTHONSAFEPATH"] = "1"
        with open(log, "ab") if log else open(os.devnull, "ab") as stderr:  # noqa: PTH123
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "coterie.client.worker_main", str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=env,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
            )
        theirs.close()
        os.close(lifeline)
        self._socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self.jobs: deque[Any] = deque()
        self.ready = False

    def configure(self, payload: bytes, fds: Sequence[int]) -> None:
        """Send the pickled `WorkerSetup` and the descriptors of its shared tensors."""
        with contextlib.suppress(ConnectionError):  # that it has ended is noticed when the end of its stream is read
            self.connection.send((list(sys.path), payload))
            socket.send_fds(self._socket, [b"f"], list(fds))

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_stopped(self) -> bool:
        """Whether something (SIGSTOP, a debugger) holds the process; False where the system cannot tell."""
        if not hasattr(os, "waitid"):
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def was_killed(self) -> bool:
        """Whether a signal ended the process, which has ended."""
        return self._process.wait() < 0

    def how_it_ended(self) -> str:
        """Exit status in words."""
        code = self._process.wait()
        if code >= 0:
            return f"exit status {code}{self._last_words()}"
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"

    def _last_words(self) -> str:
        """The last line in the log, which all workers of a run share, and where to read on."""
        if self._log is None:
            return ""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f", {lines[-1].strip()[:300]!r} (see {self._log})" if lines else ""

    def stop(self) -> None:
        """End it and release its descriptors; safe to call twice."""
        if self.connection.closed:
            return
        self._process.kill()
        self._process.wait()
        os.close(self._lifeline)
        self.connection.close()
        self._socket.close()
