"""The runs of a server: a queue in the store, one run at a time, carried out over the nodes that are here.

Everything that must last is in the store and in the runs' directories before it is acted on. A server that starts again
goes on with what was running, from its last complete round, and with what was queued.
"""

import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from coterie.core.errors import CoterieError, RunError
from coterie.core.events import EventKind
from coterie.core.run_config import RunConfig
from coterie.server.assembly import assemble, check_run, tell, telling, wait_for_clients
from coterie.server.conduct import conduct, register
from coterie.server.enrolment import Enrolment, NodeStatus
from coterie.server.exchange import Exchange
from coterie.server.federation_channel import FederationChannel
from coterie.server.roster import Roster
from coterie.server.run_directory import RunDirectory, new_run_id, run_path
from coterie.server.store import RunKind, RunRecord, RunStatus, open_store
from coterie.server.superlink import SuperLink
from coterie.tasks import load_task

LOOK_SECONDS = 0.2
"""Between looks for the nodes that a run waits for."""

_log = logging.getLogger(__name__)


class Federation:
    """One server's nodes and runs. `start` begins to work, `stop` leaves everything resumable."""

    def __init__(self, home: Path, fingerprint: str, database: str | None = None) -> None:
        """fingerprint: of the CA that nodes shall pin, "-" without TLS. database: a PostgreSQL; default SQLite under
        the home."""
        self.home = home
        self.store = open_store(home, database)
        self.enrolment = Enrolment(self.store, fingerprint)
        self.roster = Roster()
        self.superlink = SuperLink()
        self.exchange = Exchange(home / "exchange")
        self.superlink.replied = self.exchange.answered
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, str]] = []  # what goes first is smallest
        self._count = itertools.count()
        self._stopping = False
        self._running: tuple[str, _Stop] | None = None
        self._thread = threading.Thread(target=self._work, name="runs", daemon=True)

    def start(self) -> None:
        """Let the enrolled nodes in and take up the runs that are not finished."""
        for node in self.enrolment.nodes():
            if node.status is NodeStatus.ACTIVE:
                self.superlink.register(node.public_key.encode(), node.name)
        open_runs = (RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.INTERRUPTED)
        runs = [run for run in self.store.runs() if run.kind is RunKind.FEDERATION and run.status in open_runs]
        for run in sorted(runs, key=lambda run: run.created):
            self._enqueue(run.id, math.inf if run.status is not RunStatus.QUEUED else _config(run).federation.priority)
        self._thread.start()

    def stop(self) -> None:
        """End after the message at hand; the run that is going on can be taken up again."""
        with self._changed:
            self._stopping = True
            if self._running:
                self._running[1].set("drain")
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.superlink.close()
        self.store.close()

    def submit(self, text: str) -> str:
        """Queue a run given as TOML; its id. Raises ConfigError."""
        config = RunConfig.from_toml(text, "the run")
        check_run(config)
        run_id = new_run_id()
        with contextlib.closing(RunDirectory(run_path(self.home, run_id))) as directory:
            register(config, run_id, self.store, directory, RunKind.FEDERATION, RunStatus.QUEUED)
        self._enqueue(run_id, config.federation.priority)
        return run_id

    def cancel(self, run_id: str) -> None:
        """End a run for good. Raises RunError when it has ended already."""
        with self._changed:
            if self._running and self._running[0] == run_id:
                self._running[1].set("cancel")
                return
            waiting = [entry for entry in self._queue if entry[2] == run_id]
            if not waiting:
                raise RunError(f"run {run_id} is neither queued nor running")
            self._queue.remove(waiting[0])
            heapq.heapify(self._queue)
        tell(self.store, run_id, EventKind.RUN_FAILED, reason="cancelled before it began")

    def revoke(self, name: str) -> None:
        """Refuse a node from now on, its present session too."""
        node = next((node for node in self.enrolment.nodes() if node.name == name), None)
        self.enrolment.revoke(name)
        if node is not None:
            self.superlink.unregister(self.superlink.register(node.public_key.encode(), name))
        self.roster.close(name)

    def _enqueue(self, run_id: str, priority: float) -> None:
        """What was running goes before all, then the highest priority, then who came first."""
        with self._changed:
            heapq.heappush(self._queue, (-priority, next(self._count), run_id))
            self._changed.notify_all()

    def _work(self) -> None:
        torch.set_num_threads(1)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                run_id, stop = heapq.heappop(self._queue)[2], _Stop()
                self._running = run_id, stop
            try:
                self._execute(self.store.find(run_id), stop)
            except KeyboardInterrupt:
                return
            except CoterieError as error:
                _log.error("run %s failed: %s", run_id, error)
            except Exception:
                _log.exception("run %s failed", run_id)
            finally:
                with self._changed:
                    self._running = None

    def _execute(self, record: RunRecord, stop: "_Stop") -> None:
        config = _config(record)
        task_name, tags = config.task.name, set(config.federation.tags)

        def here() -> dict[str, int]:
            chosen = [session for session in self.roster.here() if tags <= set(session.tags)]
            return {session.name: session.offers.get(task_name, 0) for session in chosen}

        def pause() -> None:
            stop.check()
            time.sleep(LOOK_SECONDS)

        def channel(config: RunConfig, counts: Mapping[str, int]) -> FederationChannel:
            return FederationChannel(record.id, config, counts, self.roster, self.superlink, self.exchange, stop.check)

        with telling(self.store, record.id):
            task = load_task(config.task)
            clients = wait_for_clients(self.store, record.id, config, here, pause)
            parts = assemble(config, task, clients, channel)
        with contextlib.closing(RunDirectory(run_path(self.home, record.id))) as directory:
            conduct(parts, record.id, False, self.store, directory)


def _config(record: RunRecord) -> RunConfig:
    return RunConfig.from_toml(record.config, f"the stored run {record.id}")


class _Stop:
    """Asked for from another thread: to drain (the run can be taken up again) or to cancel it."""

    def __init__(self) -> None:
        self._why = ""

    def set(self, why: str) -> None:
        self._why = self._why or why

    def check(self) -> None:
        """Raise KeyboardInterrupt to drain, RunError when cancelled."""
        if self._why == "drain":
            raise KeyboardInterrupt
        if self._why:
            raise RunError("cancelled")
