"""Flower's SuperLink in this process: the one module of the server that knows flwr's inside.

Used of it: nodes known by their public keys, signed requests, heartbeats, and messages to nodes and back (the Fleet
protocol). Its other interfaces, which submit and steer runs, are not reachable from outside. Its state is in memory:
what must last is in Coterie's own store, and nodes are registered anew at every start.
"""

import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DATABASE"] = ":flwr-in-memory:"

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.main import create_app

Scope = MutableMapping[str, Any]
ASGI = Callable[[Scope, Any, Any], Awaitable[None]]

HEARTBEAT_SECONDS = 10.0
"""Between heartbeats of a node; Flower allows no less, and misses two before the node is offline."""

RUN_HEARTBEAT_SECONDS = 5.0

MESSAGE_SECONDS = 30 * 24 * 3600.0
"""How long Flower keeps a message: the deadline is ours."""

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
            if scope["type"] == "http" and not scope["path"].startswith("/v1/fleet/"):
                await send({"type": "http.response.start", "status": 404, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            await self._app(scope, receive, send)

        return fleet

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
            objects, tree = get_all_nested_objects(message), get_object_tree(message)
            session = self._state.start_session(self.run_id)
            stored, missing = self._state.store_message_and_object_tree(
                remove_content_from_message(message), tree, session
            )
            if not stored:
                return None
            for object_id in missing:
                self._state.store_object(self.run_id, session, object_id, objects[object_id].deflate())
        return message_id

    def pull(self, message_ids: set[str]) -> list[Answer]:
        """Replies that have come since the last call to messages that wait for one."""
        answers: list[Answer] = []
        for found in self._state.get_message_res(message_ids, self.run_id):
            asked = found.metadata.reply_to_message_id
            if found.has_error():
                answers.append(Answer(asked, {}, str(found.error.reason)))
                continue
            tree = self._state.object_store.get_object_tree(found.metadata.message_id)
            contents = {
                part.object_id: self._state.get_object(self.run_id, part.object_id)
                for part in iterate_object_tree(tree)
            }
            self._state.object_store.delete(found.metadata.message_id)
            if not all(contents.values()):
                answers.append(Answer(asked, {}, "the reply did not arrive whole"))
                continue
            message = cast("Message", inflate_object_from_contents(found.metadata.message_id, contents))
            answers.append(Answer(asked, dict(message.content.config_records.get(_RECORD, {}))))
        return answers

    def forget(self, message_ids: set[str]) -> None:
        """Drop messages and their objects; what may still come as a reply is refused."""
        self._state.delete_messages(message_ids)
        for message_id in message_ids:
            self._state.object_store.delete(message_id)
