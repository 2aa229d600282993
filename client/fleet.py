"""A node's end of Flower's Fleet protocol: the one module of the client that knows flwr's inside.

Everything is one request and one answer; what to do when a request fails is the caller's. A message carries its few
values inside, see `server.superlink`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree, no_object_id_recompute
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
        message = message_from_proto(response.messages_list[0])
        record = dict(message.content.config_records[_RECORD])
        return Task(message.metadata.message_id, message.metadata.message_type, record, message)

    def reply(self, task: Task, record: Mapping[str, Any]) -> None:
        """Answer a message with plain values. Tried again it sends the very same reply: what has arrived stays."""
        if task.reply is None:
            task.reply = Message(content=RecordDict({_RECORD: ConfigRecord(dict(record))}), reply_to=task.message)
        reply = task.reply
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self._client.PushMessages(
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(reply)],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                )
            )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
