"""Many light nodes in one process: the real protocol and no training, so that the server alone is under load.

    python light_nodes.py coterie FOLDER              # a daemon for every joined node under FOLDER
    python light_nodes.py stock HOST:PORT COUNT       # supernodes' side of Flower's Fleet protocol, polling as they do

Prints "ready" when all are there. Ends at SIGTERM.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

POLL_SECONDS = 3.0
"""Between looks of a stock supernode."""


class Idle:
    """Stands for `NodeWorker`: an update of zeros, as large as the model."""

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "offers":
            return {"noop_task:make": 1}
        if method == "train":
            _, model, update = arguments
            from coterie.core.model_state import read_archive  # torch: only here

            size = read_archive(Path(model))[0].layout.size
            with Path(update).open("wb") as file:
                file.truncate(size * 4)
        return {"num_examples": 1, "metrics": {}}

    def stop(self) -> None:
        pass


def coterie(folder: Path) -> None:
    """One daemon per node's directory."""
    from coterie.client.daemon import Daemon
    from coterie.client.node_config import NodeDirectory

    for directory in sorted(path.parent for path in folder.glob("*/node.toml")):
        daemon = Daemon(NodeDirectory(directory), Idle())
        threading.Thread(target=daemon.run, name=directory.name, daemon=True).start()


def stock(address: str, count: int) -> None:
    """Supernodes without the app's process."""
    here = threading.Semaphore(0)
    for _ in range(count):
        threading.Thread(target=_supernode, args=(address, here), daemon=True).start()
    for _ in range(count):
        here.acquire()


def _supernode(address: str, here: threading.Semaphore) -> None:
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects, push_objects
    from flwr.supernode.fleet_http_connection import http_request_response

    with http_request_response(address, True) as (_, receive, send, get_run, get_fab, pull, push, confirm):
        here.release()
        while True:
            found = receive()
            if found is None:
                time.sleep(POLL_SECONDS)
                continue
            asked, tree = found
            run_id = asked.metadata.run_id
            get_fab(get_run(run_id).fab_hash, run_id)
            ids = [node.object_id for node in iterate_object_tree(tree)]
            contents = pull_objects(ids, lambda one, run_id=run_id: pull(run_id, one))
            confirm(run_id, tree.object_id)
            message = inflate_object_from_contents(tree.object_id, contents)
            assert isinstance(message, Message)
            message.metadata.__dict__["_message_id"] = asked.metadata.message_id
            metrics = MetricRecord({"num-examples": 1})
            reply = Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                wanted, session = send(reply, get_object_tree(reply), 0.0)
                objects = get_all_nested_objects(reply)
                push_objects(
                    objects,
                    lambda one, data, run_id=run_id, session=session: push(run_id, session, one, data),
                    object_ids_to_push=wanted,
                )


if __name__ == "__main__":
    if sys.argv[1] == "coterie":
        coterie(Path(sys.argv[2]))
    else:
        stock(sys.argv[2], int(sys.argv[3]))
    print("ready", flush=True)
    threading.Event().wait()
