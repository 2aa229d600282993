"""Processes of a benchmark: started in a group, measured through /proc, ended by their id."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Rounds:
    """What a run showed. ended: moments (s); cpu: the server's processor time so far (s); used: updates, by round."""

    ended: Sequence[float]
    cpu: Sequence[float]
    used: Sequence[int]

    def seconds(self) -> Sequence[float]:
        """Of each round but the first."""
        return [after - before for before, after in zip(self.ended, self.ended[1:], strict=False)]

    def server_cpu(self) -> float:
        """Of the server for one round (s), the first left out."""
        return (self.cpu[-1] - self.cpu[0]) / (len(self.cpu) - 1)


class Processes:
    """What a benchmark has started. Leaving the context ends all of it."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # Flower's programs start each other by name
        self._env = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "PATH": path} | dict(env or {})
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        """Start a program of this environment; what it says goes to NAME.log."""
        program, *arguments = map(str, command)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [BIN / program, *arguments], env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        self._running.append(process)
        return process

    def call(self, *command: object, folder: Path | None = None) -> str:
        """Run a program of this environment to its end; what it printed. Raises RuntimeError with its last words."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [BIN / program, *arguments], env=self._env, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments[:2])}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done.stdout

    def log(self, name: str) -> str:
        """What a program has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def check(self) -> None:
        """Raise RuntimeError when one of the processes has ended."""
        for process in self._running:
            if process.poll() is not None:
                logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"{process.args} has ended:\n{logs}")

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self._running):
            process.terminate()
        end = time.monotonic() + 15.0
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            # What a program leaves behind: stock supernodes are asked to end before their children have.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120.0, pause: float = 0.02) -> None:
    """Until it holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(pause)


def family(pid: int) -> Sequence[int]:
    """A process and its descendants that live."""
    found = [pid]
    for parent in found:
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its descendants, those that have ended too, have had."""
    total = 0.0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICKS
    return total


def resident_mb(pid: int) -> float:
    """Memory of one process, its share of what it shares (MB)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} tells no Pss")
