"""The real command, in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

COTERIE = Path(sys.executable).parent / "coterie"
DEADLINE = 600.0


class Cli:
    """Runs `coterie` with its home in this test's folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = os.environ | {"COTERIE_HOME": str(home), "COLUMNS": "200", "NO_COLOR": "1"}

    def __call__(self, *args: object, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [COTERIE, *map(str, args)], env=self.env, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *args: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [COTERIE, *map(str, args)], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def wait_for(condition, what: str, deadline: float = DEADLINE):
    """The condition's value as soon as it is true."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline} s: {what}")
