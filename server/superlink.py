"""Flower's SuperLink in this process: the one module of the server that knows flwr's inside.

Used of it: nodes known by their public keys, signed requests, heartbeats, and messages to nodes and back (the Fleet
protocol). Its other interfaces, which submit and steer runs, are not reachable from outside. Its state is in memory:
what must last is in Coterie's own store, and nodes are registered anew at every start. A message carries its few values
inside: as Flower's objects they would cost both sides four requests more.
"""

import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DATABASE"] = ":flwr-in-memory:"

from flwr.app import ConfigRecord, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree, no_object_id_recompute
from flwr.superlink.main import create_app
from google.protobuf.message import DecodeError

Scope = MutableMapping[str, Any]
ASGI = Callable[[Scope, Any, Any], Awaitable[None]]

RUN_HEARTBEAT_SECONDS = 5.0

MESSAGE_SECONDS = 30 * 24 * 3600.0
"""How long Flower keeps a message: the deadline is ours."""

MOST_BYTES = 1 << 20
"""Of a request to the Fleet protocol: models and updates do not travel here."""

_RECORD = "coterie"


@dataclass(frozen=True)
class Answer:
    """A node's reply to one message. error: why Flower has none (the node is offline, ...), or empty."""

    message_id: str
    record: Mapping[str, Any]
    error: str = ""


class SuperLink:
    """Nodes and messages of one Flower run, which lasts as long as this process."""

    def __init__(self) -> None:
        self.replied: Callable[[str], None] = lambda message_id: None
        """Called with a message's id when a reply to it has come, on the server's event loop."""
        self._app = create_app()
        # Only keys that the server has registered are let in.
        self._app.state.enable_supernode_auth = True
        self._state = self._app.state.linkstate_factory.state()
        self.run_id: int = self._state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
        )
        (run,) = self._state.get_run_info(run_ids=[self.run_id])
        if not (self._state.claim_task(run.primary_task_id) and self._state.activate_task(run.primary_task_id)):
            raise RuntimeError("Flower's SuperLink did not start a run: this version of flwr is not the one pinned")
        # Flower ends a run whose own heartbeats stay away for a minute.
        self._task_id: int = run.primary_task_id
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="superlink", daemon=True).start()

    def close(self) -> None:
        """End the run."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(RUN_HEARTBEAT_SECONDS):
            self._state.acknowledge_task_heartbeat(self._task_id)

    @property
    def fleet(self) -> ASGI:
        """The Fleet protocol and nothing else of the SuperLink's application."""

        async def fleet(scope: Scope, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await self._app(scope, receive, send)
            elif not scope["path"].startswith("/v1/fleet/"):
                await _refuse(send, 404)
            elif (body := await _read(receive)) is None:
                await _refuse(send, 413)
            else:
                await self._app(scope, _replay(body, receive), send)
                if scope["path"] == "/v1/fleet/push-messages":
                    self._announce(body)

        return fleet

    def _announce(self, body: bytes) -> None:
        """Say that a reply is there; whether it is one that Flower has taken, `pull` tells."""
        with contextlib.suppress(DecodeError):
            for message in PushMessagesRequest.FromString(body).messages_list:
                self.replied(message.metadata.reply_to_message_id)

    def register(self, public_key: bytes, name: str) -> int:
        """Let a node in by its public key (PEM); its number in this process."""
        known = self._state.get_node_id_by_public_key(public_key)
        if known is not None:
            return int(known)
        return int(self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, 0, name=name))

    def unregister(self, node_id: int) -> None:
        """Refuse a node from now on."""
        self._state.delete_node(NOOP_FLWR_AID, node_id)

    def release(self, node_id: int) -> None:
        """Let a node activate again although its last process did not say goodbye."""
        self._state.deactivate_node(node_id)

    def push(self, node_id: int, kind: str, record: Mapping[str, Any]) -> str | None:
        """Put a message of plain values into a node's queue; its id, or None while the node has not said hello."""
        metadata = Metadata(
            run_id=self.run_id,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=node_id,
            reply_to_message_id="",
            group_id="",
            created_at=time.time(),
            ttl=MESSAGE_SECONDS,
            message_type=kind,
        )
        message = make_message(metadata, RecordDict({_RECORD: ConfigRecord(dict(record))}))
        with no_object_id_recompute():
            message_id = message.object_id
            metadata.__dict__["_message_id"] = message_id
            session = self._state.start_session(self.run_id)
            stored, _ = self._state.store_message_and_object_tree(message, get_object_tree(message), session)
        return message_id if stored else None

    def pull(self, message_ids: set[str]) -> list[Answer]:
        """Replies that have come since the last call to messages that wait for one."""
        answers: list[Answer] = []
        for found in self._state.get_message_res(message_ids, self.run_id):
            asked = found.metadata.reply_to_message_id
            if found.has_error():
                answers.append(Answer(asked, {}, str(found.error.reason)))
                continue
            self._state.object_store.delete(found.metadata.message_id)
            answers.append(Answer(asked, dict(found.content.config_records.get(_RECORD, {}))))
        return answers

    def forget(self, message_ids: set[str]) -> None:
        """Drop messages; what may still come as a reply is refused."""
        self._state.delete_messages(message_ids)
        self._state.delete_sessions_in_run(self.run_id)  # of objects that nobody is going to send
        for message_id in message_ids:
            self._state.object_store.delete(message_id)


async def _read(receive: Any) -> bytes | None:
    """A request's body, or None when it is too large."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)


def _replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """What gives a body that has been read, and after it what comes next."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return first.pop() if first else await receive()

    return replay


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})
