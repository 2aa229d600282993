"""A channel to real nodes: Flower's messages carry what is asked and answered, models travel as files beside them.

The global model is one file, named by its hash and sent to every node straight from disk. An update comes back as the
raw little-endian float32 values of the flat vector. A node that goes away is a named failure within seconds.
"""

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from coterie.core.messages import SURPLUS, ClientInfo, Failure, Purpose, Reply, Request
from coterie.core.run_config import RunConfig
from coterie.server.exchange import Exchange
from coterie.server.questions import Result, question, result
from coterie.server.roster import Roster, Session
from coterie.server.superlink import Answer, SuperLink

CHECK_SECONDS = 0.5
"""How often nodes that owe an answer are looked after."""


@dataclass
class _Owed:
    """A request that waits for its answer. session: the token of the node's session that was asked last."""

    request: Request
    message_id: str = ""
    session: str = ""

    def fails(self, kind: str, reason: str) -> Failure:
        return Failure(self.request.client_id, self.request.round, kind, reason)


class FederationChannel:
    """`Channel` over the nodes that were here when the run began and hold records of its task."""

    def __init__(
        self, run_id: str, config: RunConfig, clients: Mapping[str, int], roster: Roster, superlink: SuperLink,
        exchange: Exchange, check: Callable[[], None],
    ) -> None:  # fmt: skip
        """clients: num_examples by name. check: called while it waits; what it raises ends the round."""
        self._run_id = run_id
        self._config = config
        self._clients = dict(sorted(clients.items()))
        self._roster = roster
        self._superlink = superlink
        self._exchange = exchange
        self._check = check
        self._answered: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._late: queue.SimpleQueue[Failure] = queue.SimpleQueue()

    def clients(self) -> Sequence[ClientInfo]:
        return [ClientInfo(name, count) for name, count in self._clients.items()]

    def dispatch(
        self, requests: Sequence[Request], deadline: float | None = None, enough: int | None = None
    ) -> Iterator[Reply]:
        """See `Channel.dispatch`. All requests of one call start from the same model."""
        if not requests:
            return
        began = time.monotonic()
        owed = {request.client_id: _Owed(request) for request in requests}
        model = self._exchange.publish(requests[0].model.save)
        try:
            looked, missing = -math.inf, len(requests) if enough is None else enough
            while owed and missing:
                self._check()
                while requests[0].purpose is Purpose.TRAIN and not self._late.empty():
                    yield Reply(self._late.get(), time.monotonic() - began)
                now = time.monotonic()
                if deadline is not None and now >= began + deadline:
                    break
                if now >= looked + CHECK_SECONDS:
                    looked = now
                    for one in [one for one in owed.values() if not self._attend(one, model)]:
                        yield self._settle(owed, one, one.fails("offline", "the node is not here"), began)
                left = CHECK_SECONDS if deadline is None else min(CHECK_SECONDS, began + deadline - now)
                for one, result in self._results(owed, left):
                    missing -= not isinstance(result, Failure)
                    yield self._settle(owed, one, result, began)
            for one in list(owed.values()):
                why = f"no answer within {deadline:g} s" if missing else f"{enough} others were faster"
                failure = one.fails("late" if missing else SURPLUS, why)
                self._withdraw(one, late=True)
                yield self._settle(owed, one, failure, began)
        finally:
            for one in owed.values():
                self._withdraw(one, late=True)
            self._exchange.withdraw(model)

    def close(self) -> None:
        """Nothing is held between rounds."""

    def _attend(self, one: "_Owed", model: str) -> bool:
        """Ask a node that has not been asked in its present session; False when it has been away too long.

        A question may be lost with the session that it went to. A node that has worked on it already knows the answer.
        """
        name = one.request.client_id
        if self._roster.is_gone(name):
            return False
        session = self._roster.get(name)
        if session and session.token != one.session:
            self._withdraw(one)
            self._ask(one, session, model)
        return True

    def _ask(self, one: "_Owed", session: Session, model: str) -> None:
        request = one.request
        record = question(self._run_id, self._config, request) | {"model": model}
        message_id = self._superlink.push(session.node_id, request.purpose.value, record)
        if message_id is None:  # it has a session and is about to say hello: the next look is soon enough
            return
        one.message_id, one.session = message_id, session.token
        self._exchange.expect(one.message_id, session.name, request.model.layout.size * 4, self._answered.put)
        self._roster.wake(session.name)

    def _results(self, owed: Mapping[str, "_Owed"], seconds: float) -> Iterator[tuple["_Owed", Result]]:
        """An answer that comes within so many seconds."""
        try:
            message_id = self._answered.get(timeout=seconds)
        except queue.Empty:
            return
        for one in [one for one in owed.values() if one.message_id == message_id]:
            for answer in self._superlink.pull({message_id}):
                yield one, self._result(one.request, answer)

    def _settle(self, owed: dict[str, "_Owed"], one: "_Owed", result: Result, began: float) -> Reply:
        """The reply to a request that is owed nothing any more. Its update's file is read already."""
        del owed[one.request.client_id]
        self._withdraw(one)
        return Reply(result, time.monotonic() - began)

    def _withdraw(self, one: "_Owed", late: bool = False) -> None:
        """Take no answer any more. late: tell when one comes nevertheless."""
        closed, round = time.monotonic(), one.request.round

        def tell() -> None:
            seconds = time.monotonic() - closed
            reason = f"its answer to round {round} came {seconds:.1f} s after that round had closed: it is not used"
            self._late.put(one.fails("late", reason))

        if one.message_id:
            self._exchange.drop(one.message_id, tell if late and one.request.purpose is Purpose.TRAIN else None)
            self._superlink.forget({one.message_id})
            one.message_id = ""

    def _result(self, request: Request, answer: Answer) -> Result:
        def delta() -> torch.Tensor:
            path = self._exchange.update(answer.message_id, str(answer.record["update"]))
            return torch.from_numpy(np.memmap(path, "<f4", "c"))  # stays when the file is removed

        return result(request, answer.record, answer.error, delta)
