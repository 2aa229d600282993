"""A PostgreSQL of the tests' own, on loopback, for as long as they run."""

import itertools
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psycopg
import pytest

from .commands import wait_for

_numbers = itertools.count()


class Postgres:
    """A server. `new` gives the URL of an empty database on it."""

    def __init__(self, binaries):
        self._binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="coterie-postgres-"))
        self.password = secrets.token_hex(12)
        # PostgreSQL does not run as root: the Debian package has a user for it.
        self._as = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self.folder, "postgres", "postgres")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (self.folder / "password").write_text(self.password)
        self._run("initdb", "-D", "data", "-U", "coterie", "-A", "scram-sha-256", "--pwfile=password", "--no-sync")
        self.start()

    def start(self):
        options = ["-D", "data", "-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.folder), "-F"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._binaries / "postgres", *options], cwd=self.folder, stdout=log, stderr=log, **self._as
            )
        wait_for(self._answers, "PostgreSQL", 60)

    def stop(self):
        """At once, as a crash."""
        self.process.send_signal(3)  # SIGQUIT
        self.process.wait(timeout=60)

    def url(self, name="postgres"):
        return f"postgresql://coterie:{self.password}@127.0.0.1:{self.port}/{name}"

    def new(self):
        name = f"test{next(_numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def close(self):
        self.stop()
        shutil.rmtree(self.folder)

    def _answers(self):
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            return False
        return True

    def _run(self, program, *arguments):
        done = subprocess.run(
            [self._binaries / program, *arguments], cwd=self.folder, capture_output=True, text=True, check=False,
            **self._as,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def start():
    """A server, or a skip with the reason; no skip where COTERIE_TEST_POSTGRES is "required"."""
    binaries = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("initdb"):
        binaries.append(Path(found).parent)
    if not binaries:
        why = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        assert os.environ.get("COTERIE_TEST_POSTGRES") != "required", why
        pytest.skip(why)
    return Postgres(binaries[0])
