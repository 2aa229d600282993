"""What a node's worker process needs once. Light: only the worker process itself imports torch and the tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coterie.client.node_config import OwnTask

if TYPE_CHECKING:
    from coterie.client.node_worker import NodeWorker


@dataclass(frozen=True)
class NodeSetup:
    """The node's name and its tasks by name."""

    name: str
    tasks: Mapping[str, OwnTask]
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def start(self, shared: Mapping[str, Any]) -> "NodeWorker":
        """The worker, in its own process; loads every task."""
        from coterie.client.node_worker import NodeWorker

        return NodeWorker(self.name, self.tasks)
