"""The runs of a server: a queue in the store, one run at a time, carried out over the nodes that are here.

Everything that must last is in the store and in the runs' directories before it is acted on. A server that starts again
goes on with what was running, from its last complete round, and with what was queued.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path

import torch

from coterie.aggregation import AGGREGATORS, SERVER_OPTIMIZERS, Aggregator, ServerOptimizer
from coterie.core.choice import build
from coterie.core.errors import ConfigError, CoterieError, RunError
from coterie.core.events import EventKind
from coterie.core.messages import Channel
from coterie.core.model_state import ModelState
from coterie.core.records import num_training
from coterie.core.run_config import RunConfig
from coterie.server.conduct import Parts, conduct, register
from coterie.server.coordinator import Evaluate
from coterie.server.enrolment import Enrolment, NodeStatus
from coterie.server.exchange import Exchange
from coterie.server.federation_channel import FederationChannel
from coterie.server.journal import Journal
from coterie.server.roster import Roster
from coterie.server.run_directory import RunDirectory, run_path
from coterie.server.store import RunKind, RunRecord, RunStatus, Store
from coterie.server.superlink import SuperLink
from coterie.tasks import Task, load_task
from coterie.tasks.task import initial_model, measure

EVALUATION_BATCH = 256
"""Held-out records per forward pass."""

_log = logging.getLogger(__name__)


class Federation:
    """One server's nodes and runs. `start` begins to work, `stop` leaves everything resumable."""

    def __init__(self, home: Path, fingerprint: str) -> None:
        """fingerprint: of the CA that nodes shall pin, "-" without TLS."""
        self.home = home
        self.store = Store(home / "coterie.db")
        self.enrolment = Enrolment(self.store, fingerprint)
        self.roster = Roster()
        self.superlink = SuperLink()
        self.exchange = Exchange(home / "exchange")
        self.superlink.replied = self.exchange.answered
        self._changed = threading.Condition()
        self._queue: list[str] = []
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
        # What was running goes first.
        self._queue = [run.id for run in sorted(runs, key=lambda run: (run.status is RunStatus.QUEUED, run.created))]
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
        self._parts_of(config)
        run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        with contextlib.closing(RunDirectory(run_path(self.home, run_id))) as directory:
            register(config, run_id, self.store, directory, RunKind.FEDERATION, RunStatus.QUEUED)
        with self._changed:
            self._queue.append(run_id)
            self._changed.notify_all()
        return run_id

    def cancel(self, run_id: str) -> None:
        """End a run for good. Raises RunError when it has ended already."""
        with self._changed:
            if self._running and self._running[0] == run_id:
                self._running[1].set("cancel")
                return
            if run_id not in self._queue:
                raise RunError(f"run {run_id} is neither queued nor running")
            self._queue.remove(run_id)
        self._tell(run_id, EventKind.RUN_FAILED, reason="cancelled before it began")

    def revoke(self, name: str) -> None:
        """Refuse a node from now on, its present session too."""
        node = next((node for node in self.enrolment.nodes() if node.name == name), None)
        self.enrolment.revoke(name)
        if node is not None:
            self.superlink.unregister(self.superlink.register(node.public_key.encode(), name))
        self.roster.close(name)

    def _work(self) -> None:
        torch.set_num_threads(1)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                run_id, stop = self._queue.pop(0), _Stop()
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
        config = RunConfig.from_toml(record.config, f"the stored run {record.id}")
        try:
            task = load_task(config.task)
            clients = self._clients(record.id, config, stop)
            config = config.resolve(len(clients))
            aggregator, server_optimizer = self._parts_of(config)
            check = getattr(aggregator, "check", None)
            if check is not None:
                check(config.cohort.min_replies or 1)
        except CoterieError as error:
            self._tell(record.id, EventKind.RUN_FAILED, reason=f"{type(error).__name__}: {error}")
            raise
        counts = {name: num_training(count, config.evaluation.client_holdout) for name, count in clients.items()}

        @contextlib.contextmanager
        def channel(_: ModelState) -> Generator[tuple[Channel, Evaluate]]:
            yield (
                FederationChannel(record.id, config, counts, self.roster, self.superlink, self.exchange, stop.check),
                _held_out(task),
            )

        parts = Parts(
            config,
            aggregator,
            server_optimizer,
            initial_model(task, config.seed),
            records={"test": task.test.sha256()},
            described={"num_clients": len(clients), "clients": clients, "partition": {"sizes": clients}},
            open=channel,
        )
        with contextlib.closing(RunDirectory(run_path(self.home, record.id))) as directory:
            conduct(parts, record.id, False, self.store, directory)

    def _clients(self, run_id: str, config: RunConfig, stop: "_Stop") -> dict[str, int]:
        """Who takes part, with the records that each holds: those of the start, or those who are here now.

        Waits for enough of them, and says so. Raises RunError when they do not come.
        """
        begun = [e.data["clients"] for e in self.store.events(run_id) if e.kind is EventKind.RUN_STARTED]
        known: dict[str, int] | None = dict(begun[0]) if begun else None
        wanted = config.federation.min_clients or config.cohort.size or 1
        if known is not None:
            wanted = min(wanted, len(known))
        end, said, task = time.monotonic() + config.federation.wait, "", config.task.name
        while True:
            offers = {session.name: session.offers.get(task, 0) for session in self.roster.here()}
            here = {name: count for name, count in offers.items() if count and (known is None or name in known)}
            if len(here) >= wanted:
                return here if known is None else known
            reason = f"{len(here)} of {wanted} nodes with records for task {task!r} are here"
            if time.monotonic() > end:
                wait = config.federation.wait
                raise RunError(f"{reason} after {wait:g} s: start more, or lower federation.min_clients")
            if reason != said:
                said = reason
                self._tell(run_id, EventKind.RUN_WAITING, reason=reason)
            stop.check()
            time.sleep(0.2)

    def _tell(self, run_id: str, kind: EventKind, **data: str) -> None:
        history = self.store.events(run_id)
        journal = Journal(self.store, run_id, last_seq=history[-1].seq if history else 0)
        journal.emit(kind, history[-1].round if history else 0, **data)
        journal.commit()

    def _parts_of(self, config: RunConfig) -> tuple[Aggregator, ServerOptimizer]:
        """Rule and server optimizer of a run, resolved or not. Raises ConfigError."""
        config = config.resolve(max(2, config.federation.min_clients or config.cohort.size or 2))
        if config.aggregator is None or config.server_optimizer is None:
            raise ConfigError("aggregator and server_optimizer must be set")
        return (
            build(AGGREGATORS, config.aggregator, "aggregator", expects=Aggregator),
            build(SERVER_OPTIMIZERS, config.server_optimizer, "server_optimizer", expects=ServerOptimizer),
        )


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


def _held_out(task: Task) -> Evaluate:
    """Measures a model on the task's held-out set, in this process."""
    with torch.random.fork_rng(devices=[]):
        module = task.model()

    @torch.no_grad()
    def evaluate(model: ModelState) -> Mapping[str, float]:
        model.load_into(module)
        module.eval()
        outputs = torch.cat([module(block).float() for block in task.test.inputs.split(EVALUATION_BATCH)])
        return measure(outputs, task.test.targets, task.loss, task.metrics)

    return evaluate
