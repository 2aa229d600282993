"""A node's end of Flower's Fleet protocol: the one module of the client that knows flwr's inside.

Everything is one request and one answer; what to do when a request fails is the caller's.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

_RECORD = "coterie"


@dataclass
class Task:
    """A message from the server. kind: train or evaluate; record: plain values; reply: once it is made."""

    message_id: str
    kind: str
    record: Mapping[str, Any]
    message: Message
    reply: Message | None = None


class Fleet:
    """Signed requests of one node."""

    def __init__(self, address: str, key: EllipticCurvePrivateKey, ca: Path | None) -> None:
        """address: HOST:PORT. ca: the certificate authority to trust; None: no TLS."""
        self._public_key = public_key_to_bytes(key.public_key())
        signing = NodeAuthHttpInterceptor(key, key.public_key())
        self._client = FleetHttpClient.from_server_address(
            address, ca is None, None if ca is None else ca.read_bytes(), interceptors=[signing]
        )
        self._node = Node()

    def activate(self, heartbeat_seconds: float) -> None:
        """Say hello."""
        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=heartbeat_seconds)
        self._node = Node(node_id=self._client.ActivateNode(request).node_id)

    def heartbeat(self, heartbeat_seconds: float) -> bool:
        """Say that this node is there; False when the server does not know it any more."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=heartbeat_seconds)
        return bool(self._client.SendNodeHeartbeat(request).success)

    def pull(self) -> Task | None:
        """The next message for this node."""
        response = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        head = message_from_proto(response.messages_list[0])
        contents: dict[str, bytes] = {}
        for part in iterate_object_tree(response.message_object_trees[0]):
            request = PullObjectRequest(node=self._node, run_id=head.metadata.run_id, object_id=part.object_id)
            contents[part.object_id] = self._client.PullObject(request).object_content
        message_id = head.metadata.message_id
        message = cast("Message", inflate_object_from_contents(message_id, contents))
        message.metadata.__dict__["_message_id"] = message_id
        record = dict(message.content.config_records[_RECORD])
        return Task(message_id, message.metadata.message_type, record, message)

    def reply(self, task: Task, record: Mapping[str, Any]) -> None:
        """Answer a message with plain values. Tried again it sends the very same reply: what has arrived stays."""
        if task.reply is None:
            task.reply = Message(content=RecordDict({_RECORD: ConfigRecord(dict(record))}), reply_to=task.message)
        reply = task.reply
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
            response = self._client.PushMessages(
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[tree],
                    clientapp_runtime_list=[0.0],
                )
            )
            for object_id in response.objects_to_push:
                self._client.PushObject(
                    PushObjectRequest(
                        node=self._node,
                        run_id=reply.metadata.run_id,
                        session_id=response.session_id,
                        object_id=object_id,
                        object_content=objects[object_id].deflate(),
                    )
                )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
