"""A Coterie federation, as its own commands make it: coterie server, coterie client run, a run over its API."""

import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from processes import Processes, Rounds, cpu_seconds, wait_for

from coterie.cli.remote import Remote
from coterie.client.join import join
from coterie.core.errors import CoterieError
from coterie.core.events import EventKind
from coterie.core.run_config import RunConfig

LIGHT = Path(__file__).parent / "light_nodes.py"
TASK = "noop_task:make"


class Coterie:
    """A server that runs, with defaults: node keys, SQLite, and TLS unless told otherwise."""

    def __init__(self, processes: Processes, folder: Path, secure: bool) -> None:
        self.processes, self.folder = processes, folder
        options = [] if secure else ["--insecure"]
        self.process = processes.start("server", "coterie", "server", "--port", 0, "--home", folder, *options)
        url = folder / "server" / "url"
        wait_for(lambda: url.exists() and url.read_text(), "server")
        self.url = url.read_text()
        self.remote = Remote(self.url, folder)

    def join(self, name: str, values: int = 10) -> Path:
        """Enrol a node; its directory."""
        token = self.remote.post("/tokens", {"name": name, "tags": [], "valid_seconds": 3600, "rotate": False})["token"]
        directory = self.folder / "nodes" / name
        join(self.url, token, directory, {TASK: {"task": {"name": TASK, "values": values}}})
        return directory

    def node(self, name: str, values: int = 10) -> int:
        """Start a node's daemon; its process."""
        directory = self.join(name, values)
        return self.processes.start(name, "coterie", "client", "run", "-d", directory).pid

    def light(self, count: int) -> None:
        """Light nodes, all in one process, and wait until they are here."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.join, [f"node-{index:03d}" for index in range(count)]))
        self.processes.start("light", "python", LIGHT, "coterie", self.folder / "nodes")
        self.wait(count)

    def wait(self, count: int) -> None:
        """Until so many nodes are here."""

        def here() -> bool:
            self.processes.check()
            return sum(node["here"] for node in self.remote.get("/nodes")) >= count

        wait_for(here, f"{count} nodes", 240, 0.5)

    def run(self, nodes: int, rounds: int, values: int = 10) -> Rounds:
        """A run over the nodes that are here. Raises CoterieError when a round lacks one of them."""
        config = RunConfig.load(overrides={
            "task": {"name": TASK, "values": values},
            "rounds": rounds,
            "local.steps": 1,
            "evaluation.every": 0,
            "federation.min_clients": nodes,
        })  # fmt: skip
        run = self.remote.post("/runs", {"config": config.to_toml()})["run"]
        ended: list[float] = []
        cpu: list[float] = []
        used: list[int] = []
        for event in self.remote.events(run):
            if event.kind is EventKind.ROUND_FINISHED:
                ended.append(event.time)
                cpu.append(cpu_seconds(self.process.pid))
                used.append(int(event.data["used"]))
            elif event.kind in (EventKind.RUN_FAILED, EventKind.CLIENT_FAILED):
                raise CoterieError(str(event.data))
        return Rounds(ended, cpu, used)

    def idle_cpu(self, seconds: float) -> float:
        """The share of one core that the server takes while nothing is asked of it."""
        began, before = time.monotonic(), cpu_seconds(self.process.pid)
        time.sleep(seconds)
        return (cpu_seconds(self.process.pid) - before) / (time.monotonic() - began)


@contextmanager
def coterie(secure: bool = True) -> Generator[Coterie]:
    """A server in a folder of its own, for a while."""
    with tempfile.TemporaryDirectory(prefix="coterie-") as name:
        folder = Path(name)
        with Processes(folder, {"PYTHONPATH": str(Path(__file__).parent)}) as processes:
            yield Coterie(processes, folder, secure)


def workers_of(pids: Sequence[int]) -> Sequence[int]:
    """The worker processes of these daemons."""
    found: list[int] = []
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
