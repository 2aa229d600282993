"""The node's daemon: holds a request open to the server, fetches what is asked, and has a worker process do it.

It imports neither torch nor the data: those live in the worker process, whose death is a named failure and no more. A
result that could not be delivered is kept and delivered when the same work is asked again.
"""

import hashlib
import json
import logging
import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

from coterie.client.fleet import Fleet, Task
from coterie.client.link import Link, RefusedError
from coterie.client.node_config import NodeDirectory
from coterie.client.node_setup import NodeSetup
from coterie.client.supervised import Supervised
from coterie.core.errors import CoterieError, RunError
from coterie.core.protocol import HEARTBEAT_SECONDS

MOST_PAUSE = 30.0
"""Seconds between attempts to reach a server that is not there; the first pauses are shorter."""

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """Does what `NodeWorker` does. call: what a method of it returns; TaskError for what it raises, RunError when the
    worker dies at it."""

    def call(self, method: str, *arguments: Any) -> Any: ...

    def stop(self) -> None: ...


class Daemon:
    """One node. `run` works until it is interrupted."""

    def __init__(self, directory: NodeDirectory, worker: Worker | None = None) -> None:
        """worker: what trains and evaluates; default a process of its own that holds the site's tasks."""
        self._config = directory.config()
        key = directory.key()
        ca = None if self._config.insecure else directory.ca
        self._link = Link(self._config.server, ca, key)
        self._fleet = Fleet(self._config.address, key, ca)
        self._worker = worker or Supervised(NodeSetup(self._config.name, self._config.tasks), directory.log)
        self._spool = directory.path / "spool"
        self._spool.mkdir(exist_ok=True, mode=0o700)
        self._wanted = threading.Event()
        self._ended = threading.Event()
        self._failed: Exception | None = None
        self._stale = False

    def run(self) -> None:
        """Serve until interrupted. Raises RefusedError when the server will not have this node, and TaskError when the
        site's own tasks cannot be loaded."""
        pauses = _Pauses()
        try:
            offers = self._worker.call("offers")
            _log.info("%s offers %s", self._config.name, offers)
            for work in (self._beat, self._work):
                threading.Thread(target=work, name=work.__name__, daemon=True).start()
            while True:
                try:
                    self._serve(offers, pauses)
                except RefusedError as error:
                    # No session any more; another process with this key, or a server of another version.
                    if error.status not in (401, 409):
                        raise
                    self._tell(pauses, str(error))
                except (httpx.HTTPError, OSError, ValueError) as error:
                    self._tell(pauses, f"no connection to {self._config.server}: {type(error).__name__}: {error}")
        finally:
            self._ended.set()
            self._wanted.set()
            self._worker.stop()
            self._link.leave()
            self._link.close()
            self._fleet.close()

    def _serve(self, offers: Mapping[str, int], pauses: "_Pauses") -> None:
        """One session: until it breaks."""
        self._link.open(offers)
        self._fleet.activate(HEARTBEAT_SECONDS)
        self._stale = False
        _log.info("%s is connected to %s", self._config.name, self._config.server)
        pauses.reset()
        self._wanted.set()  # what came while nobody was here
        calls = 0
        while True:
            now = self._link.wake(calls)
            if self._failed is not None:
                raise self._failed
            if self._stale:
                raise ConnectionError("a request was cut")
            if now != calls:
                calls = now
                self._wanted.set()

    def _beat(self) -> None:
        """Heartbeats, whatever training does."""
        while not self._ended.wait(HEARTBEAT_SECONDS * random.uniform(0.7, 0.9)):  # noqa: S311 - no secret
            try:
                self._stale = self._stale or not self._fleet.heartbeat(HEARTBEAT_SECONDS)
            except (httpx.HTTPError, OSError, ValueError) as error:
                _log.warning("heartbeat failed: %s", error)

    def _work(self) -> None:
        """Do what is asked, one message after the other, for as long as the daemon lives."""
        while not self._ended.is_set():
            try:
                task = self._fleet.pull()
            except (httpx.HTTPError, OSError, ValueError):
                # A message may have been lost on the way: in a new session the server asks again.
                task, self._stale = None, True
            if task is None:
                self._wanted.wait()
                self._wanted.clear()
                continue
            try:
                self._do(task)
            except Exception as error:  # a fault of this program: the daemon ends with it
                self._failed = error
                return

    def _do(self, task: Task) -> None:
        """Answer a message; while the server is away, keep the answer and try again."""
        record, began, pauses = task.record, time.monotonic(), _Pauses()
        what = f"{task.kind} round {record.get('round')} of run {record.get('run')}"
        answer: dict[str, Any] | None = None
        failed = False
        while not self._ended.is_set():
            try:
                if failed:  # the server may be another process by now, which knows nothing of this message
                    self._link.received(task.message_id)
                answer = answer or self._answer(task)
                self._fleet.reply(task, answer)
                _log.info("%s: %s (%.2f s)", what, answer.get("reason", "done"), time.monotonic() - began)
                return
            except RefusedError as error:
                if error.status == 410 or (error.status != 401 and answer):
                    _log.warning("%s: %s", what, error)
                    return
                if error.status != 401:  # 401: the session is about to be opened again
                    answer = {"failure": "refused", "reason": str(error)}
            except RunError as error:
                answer = {"failure": "crashed", "reason": str(error)}
                continue
            except CoterieError as error:
                answer = {"failure": "raised", "reason": str(error)}
                continue
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:  # the server knows nothing of this message any more
                    _log.warning("%s: nobody waits for the answer", what)
                    return
            except (httpx.HTTPError, OSError):
                pass  # told by the thread that holds the session
            failed = True
            self._ended.wait(pauses.next())

    def _answer(self, task: Task) -> dict[str, Any]:
        """Train or evaluate, and deliver the update."""
        record = task.record
        model = self._spool / f"{_name(record['model'])}.model"
        result_of = self._spool / _name(f"{record['run']}|{record['round']}|{record['model']}")
        update, note = result_of.with_suffix(".update"), result_of.with_suffix(".json")
        # The newest model may be evaluated and then trained; the newest result may have to be delivered again.
        kept = {model.stem, result_of.stem}
        for old in self._spool.iterdir():
            if old.name.partition(".")[0] not in kept:
                old.unlink(missing_ok=True)
        if task.kind == "evaluate":
            self._fetch(record, model)
            result = self._worker.call("evaluate", dict(record), str(model))
            return {"num_examples": result["num_examples"], "metrics": json.dumps(result["metrics"])}
        start = 0
        if note.exists():
            result, start = json.loads(note.read_text()), self._link.received(task.message_id)
        else:
            self._fetch(record, model)
            result = self._worker.call("train", dict(record), str(model), str(update))
            note.write_text(json.dumps(result))
        return {
            "update": self._link.upload(task.message_id, update, start),
            "version": record["version"],
            "num_examples": result["num_examples"],
            "metrics": json.dumps(result["metrics"]),
        }

    def _fetch(self, record: Mapping[str, Any], model: Path) -> None:
        if not model.exists():
            self._link.download(str(record["model"]), model)

    def _tell(self, pauses: "_Pauses", why: str) -> None:
        pause = pauses.next()
        _log.warning("%s: trying again in %.1f s", why, pause)
        time.sleep(pause)


def _name(text: object) -> str:
    """A file's name of our own: what a server sends does not become a path."""
    return hashlib.sha256(str(text).encode(errors="replace")).hexdigest()[:32]


class _Pauses:
    """Growing pauses between attempts, not the same for all nodes."""

    def __init__(self) -> None:
        self._last = 0.0

    def reset(self) -> None:
        self._last = 0.0

    def next(self) -> float:
        """Seconds to wait now."""
        self._last = min(MOST_PAUSE, max(0.2, self._last * 2))
        return self._last * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
