"""The same run file under stock Flower: flower-superlink, flower-supernode and flwr run give a simulation's bits."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import tomli_w

from ..commands import COTERIE, wait_for

APP = Path(__file__).parents[2] / "examples" / "flower-app"
BIN = COTERIE.parent
SITES = ("site0", "site1")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class Flower:
    """A SuperLink and its supernodes."""

    def __init__(self, cli, folder):
        self.cli, self.folder, self.port, self.processes = cli, folder, free_port(), []
        home = folder / "flwr"
        home.mkdir()
        connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "here", "here": connection}}))
        self.env = cli.env | {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(Path.cwd())}
        self.env["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.start("superlink", "flower-superlink", "--insecure", "--port", self.port,
                   "--disable-runtime-dependency-installation")  # fmt: skip
        wait_for(self.listens, "the SuperLink", 90)

    def start(self, name, program, *args):
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [BIN / program, *map(str, args)]
            self.processes.append(
                subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
            )

    def node(self, name):
        self.start(
            name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}", "--port", free_port(),
            "--node-config", f'name="{name}" client="{name}" task.name="tiny_task:make" task.sites={len(SITES)}',
        )  # fmt: skip

    def listens(self):
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def run(self, app, *options):
        command = [BIN / "flwr", "run", str(app), "here", *options]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def runs(self):
        done = self.cli("runs", "list", "--json")
        return json.loads(done.stdout)

    def said(self):
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))

    def close(self):
        for process in reversed(self.processes):
            process.terminate()
        end = time.monotonic() + 20
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture
def flower(cli, tiny_task, tmp_path):
    folder = tmp_path / "stock"
    folder.mkdir()
    one = Flower(cli, folder)
    yield one
    one.close()


def test_the_same_run_file_gives_the_same_bits_under_stock_flower(flower, tmp_path, simulated):
    app = tmp_path / "app"
    shutil.copytree(APP, app)
    run = {"task": {"name": "tiny_task:make", "sites": 2}, "rounds": 2, "seed": 3, "federation": {"min_clients": 2}}
    (app / "run.toml").write_text(tomli_w.dumps(run))
    for name in SITES:
        flower.node(name)
    flower.run(app)
    ended = ("finished", "failed")
    (found,) = wait_for(lambda: [r for r in flower.runs() if r["status"] in ended], "the run's end", 180)
    assert found["status"] == "finished", flower.said()
    assert found["sha256"] == simulated(2, 2)
    flower.run(app, "--run-config", 'rounds="1" seed="4"')
    newest = wait_for(lambda: [r for r in flower.runs() if r["status"] in ended][:-1], "the second run's end", 180)[0]
    assert (newest["status"], newest["rounds_done"]) == ("finished", 1), flower.said()
