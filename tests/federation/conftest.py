"""A real server and real nodes, each in processes of its own, on loopback."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from ..commands import COTERIE, DEADLINE, wait_for


class Site:
    """A node: its directory and its daemon's process."""

    def __init__(self, fed, name):
        self.fed, self.name = fed, name
        self.directory = fed.cli.home.parent / f"node-{name}"
        self.log = self.directory / "daemon.log"
        self.process = None

    def join(self, *tasks, port=None, tags=()):
        token = self.fed.token(self.name, *[part for tag in tags for part in ("--tag", tag)])
        url = self.fed.url if port is None else self.fed.url.replace(str(self.fed.port), str(port))
        options = [part for task in tasks or [f"tiny_task:make,client={self.name}"] for part in ("--task", task)]
        return self.fed.cli("client", "join", url, token, "-d", self.directory, *options)

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [COTERIE, "client", "run", "-d", str(self.directory)], env=self.fed.cli.env, stdout=log, stderr=log
            )
        self.fed.processes.append(self.process)
        return self

    def stop(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)
        return self.process.wait(timeout=60)

    def said(self):
        return self.log.read_text()


class Fed:
    """A server under the test's home."""

    def __init__(self, cli):
        self.cli = cli
        self.processes = []
        self.process = None
        self.port = 0

    @property
    def url(self):
        return (self.cli.home / "server" / "url").read_text()

    def start(self, *options):
        address = self.cli.home / "server" / "url"
        address.unlink(missing_ok=True)
        self.log = self.cli.home.parent / "server.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [COTERIE, "server", "--port", str(self.port), *options], env=self.cli.env, stdout=log, stderr=log
            )
        self.processes.append(self.process)
        wait_for(lambda: address.exists() and address.read_text(), "the server", 120)
        self.port = int(self.url.rpartition(":")[2])
        return self

    def stop(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)
        return self.process.wait(timeout=60)

    def token(self, name, *options):
        return self.cli("enroll", "new", "--name", name, *options).stdout.strip()

    def site(self, name, *tasks, port=None, tags=()):
        one = Site(self, name)
        one.join(*tasks, port=port, tags=tags)
        return one.start()

    def submit(self, **settings):
        """Start `coterie run` and watch it."""
        options = [part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
        process = self.cli.start(
            "run", "--task", "tiny_task:make", "--seed", 3, "--json", "--quiet", *map(str, options)
        )
        self.processes.append(process)
        return process

    def run(self, **settings):
        return self.result(self.submit(**settings))

    def result(self, process):
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, f"{out}\n{err}\n{self.log.read_text()}"
        return json.loads(out.splitlines()[-1])

    def status(self):
        return json.loads(self.cli("status", "--json").stdout)

    def rounds_done(self):
        runs = self.status()["runs"]
        return runs[0]["rounds_done"] if runs else 0


@pytest.fixture
def fed(cli, tiny_task):
    one = Fed(cli)
    yield one
    for process in one.processes:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=60)


@pytest.fixture
def simulated(cli, tmp_path: Path):
    """The weights of the same run in a simulation."""

    def run(rounds, sites, *options):
        done = cli(
            "simulate", "--task", "tiny_task:make", "--seed", 3, "--rounds", rounds, "--set", f"task.sites={sites}",
            "--json", "--quiet", "--home", tmp_path / "simulated", *options,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])["model"]["sha256"]

    return run
