"""`coterie demo-federation`: a server and four hospitals in processes of their own, and the simulation beside them."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.core.errors import RunError

HOSPITALS = ("cleveland", "hungary", "switzerland", "va")
START_SECONDS = 120.0


def demo_federation(
    rounds: Annotated[int, typer.Option(help="Rounds of the run.")] = 20,
    seed: Annotated[int, typer.Option(help="Every random choice derives from it.")] = 7,
) -> None:
    """Four real hospitals train one model, each in a process that alone has its patients' records.

    A server and four nodes on loopback with TLS, enrolled with one-time tokens; then the same run as a simulation,
    which ends with the same weights. About a minute on two cores.
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="coterie-federation-") as folder, contextlib.ExitStack() as processes:
        home = Path(folder) / "server"
        env = os.environ | {"COTERIE_HOME": str(home)}
        console.print("starting a server on loopback with TLS ...")
        processes.enter_context(_process(["server", "--port", "0"], env, Path(folder) / "server.log"))
        url = _when(lambda: (home / "server" / "url").read_text(), Path(folder) / "server.log")
        for name in HOSPITALS:
            token = _told(["enroll", "new", "--name", name], env).strip()
            site = Path(folder) / name
            _told(["client", "join", url, token, "-d", str(site), "--task", f"heart,client={name}"], env)
            processes.enter_context(_process(["client", "run", "-d", str(site)], env, site / "daemon.log"))
            console.print(f"{name} has joined: its key was made there, its patients stay there")
        command = ["run", "--task", "heart", "--rounds", str(rounds), "--seed", str(seed), "--json"]
        done = _result([*command, "--set", "federation.min_clients=4"], env)
        simulated = _result(["simulate", *command[1:], "--home", str(Path(folder) / "simulation")], env)
        table = Table("", "AUC on 184 held-out patients", "sha256 of the weights")
        for label, result in (("four hospitals", done), ("simulation", simulated)):
            table.add_row(label, f"{result['metrics']['auc']:.4f}", result["model"]["sha256"][:16])
        console.print(table)
    if done["model"]["sha256"] != simulated["model"]["sha256"]:
        raise RunError("the federation and the simulation ended with different weights")
    console.print("The same weights, bit by bit. docs/federation.md: how to set up your own.")


@contextlib.contextmanager
def _process(arguments: list[str], env: dict[str, str], log: Path) -> Generator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(_command(arguments), env=env, stdout=output, stderr=output)  # noqa: S603 - ourselves
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _told(arguments: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(_command(arguments), env=env, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
    if done.returncode:
        raise RunError(f"coterie {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _result(arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
    """The JSON of a run; its progress goes to the terminal."""
    done = subprocess.run(_command(arguments), env=env, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - ourselves
    if done.returncode:
        raise RunError(f"coterie {arguments[0]} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "coterie.cli", *arguments]


def _when(read: Any, log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if text := read():
                return text
        time.sleep(0.1)
    raise RunError(f"the server did not start: {log.read_text()[-500:]}")
