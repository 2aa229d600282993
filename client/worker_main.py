"""The worker process's program. Started by `worker_process`, never by hand.

``python -m coterie.client.worker_main SOCKET LIFELINE``: two inherited descriptors. Over the socket come `WorkerSetup`
and shared memory, then jobs: a method's name and its arguments. The lifeline ends the process when its parent is
gone, however it went.
"""

import os
import pickle
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from coterie.client.shared_tensor import SharedTensor
from coterie.client.worker_process import WorkerSetup


def main() -> None:
    """Serve jobs until the parent closes the socket."""
    connection_fd, lifeline_fd = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_exit_with_parent, args=(lifeline_fd,), daemon=True).start()
    torch.set_num_threads(1)
    connection = Connection(os.dup(connection_fd))
    try:
        path, payload = connection.recv()
        sys.path[:] = path
        setup: WorkerSetup = pickle.loads(payload)  # noqa: S301 - our own parent's bytes over an inherited socket
        with socket.socket(fileno=connection_fd) as channel:
            _, fds, _, _ = socket.recv_fds(channel, 1, len(setup.tensors))
        specs = zip(fds, setup.tensors.items(), strict=True)
        shared = {name: SharedTensor.attach(fd, *spec).tensor for fd, (name, spec) in specs}
        worker = setup.start(shared)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        connection.send(("setup failed", describe(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer: tuple[str, Any] = ("done", getattr(worker, name)(*arguments))
        except Exception as error:
            answer = ("raised", describe(error))
        connection.send(answer)


def describe(error: BaseException) -> str:
    """Type, text and the innermost place outside torch, in one line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in f.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}{place}"


def _exit_with_parent(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
