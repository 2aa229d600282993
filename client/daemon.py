"""The node's daemon: holds a request open to the server, fetches what is asked, and has a worker process do it.

It imports neither torch nor the data: those live in the worker process, whose death is a named failure and no more. A
result that could not be delivered is kept and delivered when the same work is asked again.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx

from coterie.client.fleet import Fleet, Task
from coterie.client.link import Link, RefusedError
from coterie.client.node_config import NodeDirectory
from coterie.client.node_setup import NodeSetup
from coterie.client.supervised import Supervised
from coterie.core.errors import CoterieError, RunError

HEARTBEAT_SECONDS = 10.0
MOST_PAUSE = 30.0
"""Seconds between attempts to reach a server that is not there; the first pauses are shorter."""

_log = logging.getLogger(__name__)


class Daemon:
    """One node. `run` works until it is interrupted."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._config = directory.config()
        key = directory.key()
        ca = None if self._config.insecure else directory.ca
        self._link = Link(self._config.server, ca, key)
        self._fleet = Fleet(self._config.address, key, ca)
        self._worker = Supervised(NodeSetup(self._config.name, self._config.tasks), directory.log)
        self._spool = directory.path / "spool"
        self._spool.mkdir(exist_ok=True, mode=0o700)
        self._pause = 0.0

    def run(self) -> None:
        """Serve until interrupted. Raises RefusedError when the server will not have this node, and TaskError when the
        site's own tasks cannot be loaded."""
        try:
            offers = self._worker.call("offers")
            _log.info("%s offers %s", self._config.name, offers)
            while True:
                try:
                    self._serve(offers)
                except RefusedError as error:
                    if error.status not in (401, 409):  # no session any more, or another process with this key
                        raise
                    self._wait(str(error))
                except (httpx.HTTPError, OSError, ValueError) as error:
                    self._wait(f"no connection to {self._config.server}: {type(error).__name__}: {error}")
        finally:
            self._worker.stop()
            self._link.leave()
            self._link.close()
            self._fleet.close()

    def _serve(self, offers: Mapping[str, int]) -> None:
        """One session: until it breaks."""
        self._link.open(offers)
        self._fleet.activate(HEARTBEAT_SECONDS)
        _log.info("%s is connected to %s", self._config.name, self._config.server)
        self._pause = 0.0
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), name="heartbeat", daemon=True)
        work = threading.Thread(target=self._work, args=(ended,), name="work", daemon=True)
        self._wanted = threading.Event()
        self._wanted.set()  # what came while nobody was here
        self._failed: Exception | None = None
        beat.start()
        work.start()
        calls = 0
        try:
            while self._failed is None:
                now = self._link.wake(calls)
                if now != calls:
                    calls = now
                    self._wanted.set()
            if self._failed is not None:
                raise self._failed
        finally:
            ended.set()
            self._wanted.set()
            work.join(1.0)

    def _beat(self, ended: threading.Event) -> None:
        """Heartbeats, whatever training does."""
        while not ended.wait(HEARTBEAT_SECONDS * random.uniform(0.7, 0.9)):  # noqa: S311 - no secret
            try:
                self._fleet.heartbeat(HEARTBEAT_SECONDS)
            except (httpx.HTTPError, OSError) as error:
                _log.warning("heartbeat failed: %s", error)

    def _work(self, ended: threading.Event) -> None:
        """Do what is asked, one message after the other."""
        try:
            while not ended.is_set():
                task = self._fleet.pull()
                if task is None:
                    self._wanted.wait()
                    self._wanted.clear()
                    continue
                self._do(task)
        except Exception as error:  # told by the thread that holds the session
            self._failed = error

    def _do(self, task: Task) -> None:
        record = task.record
        began = time.monotonic()
        try:
            answer = self._answer(task)
        except RefusedError as error:
            if error.status == 410:
                _log.warning("round %s of run %s is over: %s", record.get("round"), record.get("run"), error)
                return
            raise
        except RunError as error:
            answer = {"failure": "crashed", "reason": str(error)}
        except CoterieError as error:
            answer = {"failure": "raised", "reason": str(error)}
        try:
            self._fleet.reply(task, answer)
            self._link.answered(task.message_id)
        except RefusedError as error:
            if error.status != 410:
                raise
            _log.warning("the answer comes too late: %s", error)
        seconds = time.monotonic() - began
        _log.info("%s round %s of run %s: %s (%.2f s)", task.kind, record["round"], record["run"],
                  answer.get("reason", "done"), seconds)  # fmt: skip

    def _answer(self, task: Task) -> dict[str, Any]:
        """Train or evaluate, and deliver the update."""
        record = task.record
        model = self._spool / "model"
        name = f"{record['run']}-{record['round']}-{record['model'][:16]}"
        update, note = self._spool / f"{name}.update", self._spool / f"{name}.json"
        if task.kind == "train" and note.exists():
            result = json.loads(note.read_text())
        else:
            self._link.download(str(record["model"]), model)
            if task.kind == "evaluate":
                result = self._worker.call("evaluate", dict(record), str(model))
                return {"num_examples": result["num_examples"], "metrics": json.dumps(result["metrics"])}
            result = self._worker.call("train", dict(record), str(model), str(update))
            note.write_text(json.dumps(result))
        digest = self._link.upload(task.message_id, update)
        for kept in self._spool.glob("*-*-*.*"):  # only the newest result may still have to be delivered again
            if kept not in (update, note):
                kept.unlink(missing_ok=True)
        return {
            "update": digest,
            "version": record["version"],
            "num_examples": result["num_examples"],
            "metrics": json.dumps(result["metrics"]),
        }

    def _wait(self, why: str) -> None:
        """A growing pause, not the same for all nodes."""
        self._pause = min(MOST_PAUSE, max(0.2, self._pause * 2))
        pause = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        _log.warning("%s: trying again in %.1f s", why, pause)
        time.sleep(pause)
