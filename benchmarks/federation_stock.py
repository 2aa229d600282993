"""A plain Flower federation, as its own commands make it: flower-superlink, flower-supernode, flwr run."""

import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import tomli_w
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from processes import Processes, Rounds, cpu_seconds, wait_for

from coterie.server.certificates import ensure

APP = Path(__file__).parent / "stock_app"
LIGHT = Path(__file__).parent / "light_nodes.py"


class Stock:
    """A SuperLink that runs."""

    def __init__(self, processes: Processes, folder: Path, secure: bool) -> None:
        """secure: TLS, node keys and SQLite; otherwise none of the three."""
        self.processes, self.folder = processes, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        options: list[object] = ["--insecure"]
        connection: dict[str, object] = {"address": self.address, "insecure": True}
        self.node_options: list[object] = ["--insecure"]
        verify: str | bool = False
        if secure:
            tls = ensure(folder / "tls", ["127.0.0.1", "localhost"])
            verify = str(tls.ca)
            options = ["--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key, "--ssl-ca-certfile", tls.ca]
            options += ["--enable-supernode-auth", "--database", folder / "state.db"]
            connection = {"address": self.address, "root-certificates": verify}
            self.node_options = ["--root-certificates", tls.ca]
        self.secure = secure
        flower = folder / "flwr"
        flower.mkdir()
        (flower / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": "here", "here": connection}}), encoding="utf-8"
        )
        self.process = processes.start(
            "superlink", "flower-superlink", "--port", self.port, "--disable-runtime-dependency-installation", *options
        )
        scheme = "https" if secure else "http"
        wait_for(lambda: _answers(f"{scheme}://{self.address}/", verify), "SuperLink")

    def node(self, index: int) -> int:
        """Start a supernode; its process."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        options = [*self.node_options]
        if self.secure:
            key = self._key(index)
            self.processes.call("flwr", "supernode", "register", key.with_suffix(".pub"), "here")
            options += ["--auth-supernode-private-key", key]
        command = ["flower-supernode", "--superlink", self.address, "--port", port, *options]
        return self.processes.start(f"supernode-{index}", *command).pid

    def light(self, count: int) -> None:
        """Light supernodes, all in one process, and wait until they are here."""
        self.processes.start("light", "python", LIGHT, "stock", self.address, count)
        wait_for(lambda: "ready" in self.processes.log("light"), f"{count} light supernodes", 240, 0.5)

    def run(self, nodes: int, rounds: int, values: int, seconds: float = 300.0) -> Rounds:
        """`flwr run` over the nodes that are here."""
        progress = self.folder / "progress"
        progress.write_text("")
        config = f'rounds={rounds} values={values} nodes={nodes} progress="{progress}"'
        self.processes.call("flwr", "run", APP, "here", "--run-config", config)
        cpu: list[float] = []

        def done() -> bool:
            lines = progress.read_text().splitlines()
            while len(cpu) < len(lines):
                cpu.append(cpu_seconds(self.process.pid))
            return len(lines) >= rounds

        wait_for(done, f"{rounds} rounds of stock Flower: see {self.folder}", seconds)
        rows = [line.split() for line in progress.read_text().splitlines()]
        return Rounds([float(row[1]) for row in rows], cpu, [int(row[2]) for row in rows])

    def _key(self, index: int) -> Path:
        key = ec.generate_private_key(ec.SECP384R1())
        path = self.folder / f"node-{index}"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            )
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(public)
        return path


@contextmanager
def stock(secure: bool = False) -> Generator[Stock]:
    """A SuperLink in a folder of its own, for a while."""
    with tempfile.TemporaryDirectory(prefix="stock-") as name:
        folder = Path(name)
        env = {"FLWR_HOME": str(folder / "flwr")}
        with Processes(folder, env) as processes:
            yield Stock(processes, folder, secure)


def _answers(url: str, verify: str | bool) -> bool:
    try:
        httpx.get(url, verify=verify, timeout=2)
    except httpx.HTTPError:
        return False
    return True
