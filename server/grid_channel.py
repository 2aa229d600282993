"""A channel to the nodes of a stock Flower SuperLink, over the public `Grid`: what is asked and answered is messages.

A node is known by the name that it answers when it is first asked. Stock supernodes look for work every three seconds
and start a process for every message: a round takes several seconds, however small its model is.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from coterie.core import interrupts
from coterie.core.flower_records import bytes_of, packed, raw, values_of
from coterie.core.messages import SURPLUS, ClientInfo, Failure, Reply, Request
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.server.questions import Result, question, result

LOOK_SECONDS = 1.0
"""Between looks for answers: each costs the SuperLink a request."""

ANSWER_SECONDS = 60.0
"""How long a node may take to say who it is before a run goes on without it."""

GRACE_SECONDS = 60.0
"""Flower forgets a message so long after the round's deadline."""


def pause(seconds: float = LOOK_SECONDS) -> None:
    """Wait until the next look. Ctrl-C and SIGTERM are taken here."""
    with interrupts.allowed():
        time.sleep(seconds)


@dataclass(frozen=True)
class _Site:
    """What a node says of itself."""

    name: str
    num_examples: int


@dataclass
class GridNodes:
    """The nodes that hold records of a task, by the names that they say. Every node is asked once."""

    grid: Grid
    task: str
    warn: Callable[[str], None]
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    _sites: dict[int, _Site] = field(default_factory=dict[int, _Site])
    _refusals: dict[int, str] = field(default_factory=dict[int, str])

    def here(self) -> dict[str, int]:
        """Records by name, once every node that is here has answered or has had the time to."""
        while True:
            found = self.look()
            now = time.monotonic()
            if all(now > asked + ANSWER_SECONDS for _, asked in self._asked.values()):
                return {self._sites[node].name: self._sites[node].num_examples for node in found.values()}
            pause()

    def look(self) -> dict[str, int]:
        """The nodes that are here and have answered, by name; asks those that are new, without waiting for them."""
        present = set(self.grid.get_node_ids())
        # Who comes back may hold other records.
        self._sites = {node: site for node, site in self._sites.items() if node in present}
        self._refusals = {node: why for node, why in self._refusals.items() if node in present}
        self._asked = {message: asked for message, asked in self._asked.items() if asked[0] in present}
        new = sorted(present - self._sites.keys() - self._refusals.keys() - {node for node, _ in self._asked.values()})
        messages = [Message(packed({"task": self.task}), node, MessageType.QUERY) for node in new]
        for node, message_id in zip(new, pushed(self.grid, messages), strict=True):
            if message_id:
                self._asked[message_id] = (node, time.monotonic())
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node, _ = self._asked.pop(message.metadata.reply_to_message_id)
            self._take(node, message)
        found: dict[str, int] = {}
        for node, site in self._sites.items():  # in the order of their answers: a node started again is the later one
            found[site.name] = node
        return found

    def refusals(self) -> str:
        """Why some nodes are not counted, for the end of a sentence."""
        return "".join(f"; node {node}: {why}" for node, why in self._refusals.items())

    def _take(self, node: int, message: Message) -> None:
        values = values_of(message.content) if message.has_content() else {}
        name, count = values.get("name"), values.get("num_examples")
        if isinstance(name, str) and name and isinstance(count, int):
            if name in {site.name for site in self._sites.values()}:
                self.warn(f"node {node} says that it is {name!r}, as another did: the other is not asked any more")
            self._sites[node] = _Site(name, count)
            return
        why = error_of(message) or str(values.get("reason", "its answer cannot be read"))[:1000]
        self._refusals[node] = why
        self.warn(f"node {node} does not take part: {why}")


class GridChannel:
    """`Channel` over the nodes of a grid."""

    def __init__(self, run_id: str, config: RunConfig, clients: Mapping[str, int], nodes: GridNodes) -> None:
        """clients: num_examples by name."""
        self._run_id = run_id
        self._config = config
        self._clients = dict(sorted(clients.items()))
        self._nodes = nodes

    def clients(self) -> Sequence[ClientInfo]:
        return [ClientInfo(name, count) for name, count in self._clients.items()]

    def dispatch(
        self, requests: Sequence[Request], deadline: float | None = None, enough: int | None = None
    ) -> Iterator[Reply]:
        """See `Channel.dispatch`. All requests of one call start from the same model."""
        if not requests:
            return
        began = time.monotonic()
        end = math.inf if deadline is None else began + deadline
        owed: dict[str, Request] = {}
        for request, message_id, why in self._asked(requests, deadline):
            if message_id:
                owed[message_id] = request
            else:
                yield Reply(Failure(request.client_id, request.round, "offline", why), time.monotonic() - began)
        missing = len(requests) if enough is None else enough
        while owed and missing and time.monotonic() < end:
            pause(max(0.0, min(LOOK_SECONDS, end - time.monotonic())))
            for message in self._nodes.grid.pull_messages(list(owed)):
                request = owed.pop(message.metadata.reply_to_message_id)
                found = _result(request, message)
                missing -= not isinstance(found, Failure)
                yield Reply(found, time.monotonic() - began)
        for request in owed.values():
            why = f"no answer within {deadline:g} s" if missing else f"{enough} others were faster"
            failure = Failure(request.client_id, request.round, "late" if missing else SURPLUS, why)
            yield Reply(failure, time.monotonic() - began)

    def close(self) -> None:
        """Nothing is held between rounds."""

    def _asked(self, requests: Sequence[Request], deadline: float | None) -> list[tuple[Request, str, str]]:
        """Each request with its message's id, or with why there is none."""
        nodes, model = self._nodes.look(), raw(_encoded(requests[0].model))
        ttl = None if deadline is None else deadline + GRACE_SECONDS
        away = [(request, "", "the node is not here") for request in requests if request.client_id not in nodes]
        there = [request for request in requests if request.client_id in nodes]
        messages = [self._message(request, nodes[request.client_id], model, ttl) for request in there]
        sent = zip(there, pushed(self._nodes.grid, messages), strict=True)
        return away + [(request, message_id, "Flower does not take a message for it") for request, message_id in sent]

    def _message(self, request: Request, node: int, model: ArrayRecord, ttl: float | None) -> Message:
        content = packed(question(self._run_id, self._config, request), model)
        return Message(content, node, request.purpose.value, ttl=ttl, group_id=str(request.round))


def pushed(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages; the id of each, or "" for one that Flower does not take."""
    taken: Iterable[str | None] = grid.push_messages(messages) if messages else ()
    ids = [message_id or "" for message_id in taken]
    return ids or [""] * len(messages)  # none at all: together they are too large


def _encoded(model: ModelState) -> bytes:
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        path = Path(folder) / "model"
        model.save(path)
        return path.read_bytes()


def error_of(message: Message) -> str:
    """Why Flower has no answer, or empty."""
    if not message.has_error():
        return ""
    return f"{message.error.reason or 'no reason given'} (Flower's error {message.error.code})"


def _result(request: Request, message: Message) -> Result:
    error = error_of(message)

    def delta() -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(bytes_of(message.content), "<f4").astype(np.float32))

    return result(request, {} if error else values_of(message.content), error, delta)
