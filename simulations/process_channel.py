"""A channel whose clients live in worker processes on this machine, one worker per core.

Records, the global model and the updates lie in shared memory; a job and its answer are a hundred bytes. Each worker is
always one job ahead, so that it never waits for the coordinator. Largest clients go first, which evens out the end of
the round. A worker that dies takes one client's result with it and is replaced.
"""

import contextlib
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from coterie.client.training import EVALUATION_BATCH
from coterie.core.errors import RunError, TaskError
from coterie.core.messages import ClientInfo, Evaluation, Failure, Purpose, Reply, Request, Update
from coterie.core.model_state import ModelState
from coterie.simulations.shared_tensor import SharedTensor
from coterie.simulations.virtual_time import drops_out
from coterie.simulations.worker import Setup
from coterie.simulations.worker_process import WorkerProcess

READ_AHEAD_BYTES = 64 << 20
"""Updates larger than this are not computed ahead: one slot per worker is enough memory."""

EVALUATION_ROWS = EVALUATION_BATCH
"""Held-out records per job: one forward pass, so that the outputs do not depend on the number of workers."""


@dataclass(frozen=True)
class Clock:
    """Virtual time. seconds: per client for one round, by id; dropout: chance that a client vanishes in a round."""

    seconds: Mapping[str, float]
    dropout: float = 0.0


@dataclass(frozen=True)
class _Job:
    """name and arguments are the worker's method; weight orders the jobs; slot is appended to the arguments."""

    name: str
    arguments: tuple[Any, ...]
    weight: int
    about: Any
    takes_slot: bool = False


@dataclass(frozen=True)
class _Answer:
    """status: done, raised or crashed. value: what the method returned, or the reason."""

    job: _Job
    status: str
    value: Any
    slot: int | None


class ProcessChannel:
    """`Channel` over worker processes. `workers` were started earlier so that their imports overlap other work."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        setup: Setup,
        records: Mapping[str, SharedTensor],
        output_shape: tuple[int, ...],
        clock: Clock,
        log: Path | None = None,
    ) -> None:
        """`setup` without its `tensors`; records: inputs, targets, test_inputs."""
        self._workers = list(workers)
        self._setup = setup
        self._clock = clock
        self._log = log
        size = setup.initial.layout.size
        ahead = 2 if size * 4 <= READ_AHEAD_BYTES else 1
        self._depth = ahead
        num_slots = len(workers) * ahead + 1
        self._shared = dict(records) | {
            "global": SharedTensor.create((size,), torch.float32),
            "updates": SharedTensor.create((num_slots, size), torch.float32),
            "outputs": SharedTensor.create((len(records["test_inputs"].tensor), *output_shape), torch.float32),
        }
        self._free = list(range(num_slots))
        self._payload = self._pickled()
        self._index = {client.id: i for i, client in enumerate(setup.clients)}
        self._closed = False
        for worker in self._workers:
            self._configure(worker)

    def clients(self) -> Sequence[ClientInfo]:
        """All simulated clients, in the partition's order."""
        return [ClientInfo(client.id, client.num_examples) for client in self._setup.clients]

    def dispatch(self, requests: Sequence[Request], deadline: float | None = None) -> Iterator[Reply]:
        """See `Channel.dispatch`. All requests of one call start from the same model."""
        jobs: list[_Job] = []
        for request in requests:
            client = self._setup.clients[self._index[request.client_id]]
            seconds = self._clock.seconds[client.id]
            if request.purpose is Purpose.TRAIN:
                if drops_out(self._setup.seed, request.round, client.id, self._clock.dropout):
                    reason = "vanished in this round (simulated dropout)"
                    yield Reply(Failure(client.id, request.round, "dropped", reason), deadline or seconds)
                    continue
                if deadline is not None and seconds > deadline:
                    reason = f"would have answered after {seconds:.1f} s, the deadline is {deadline:.1f} s (virtual)"
                    yield Reply(Failure(client.id, request.round, "late", reason), deadline)
                    continue
            index = self._index[client.id]
            if request.purpose is Purpose.TRAIN:
                jobs.append(_Job("train", (index, request.round), client.num_examples, request, takes_slot=True))
            else:
                jobs.append(_Job("evaluate", (index,), client.num_examples, request))
        if jobs:
            self._publish(requests[0].model)
        for answer in self._run(jobs):
            yield self._reply(answer)

    def outputs(self, model: ModelState) -> Tensor:
        """Outputs[N, ...] of a model on the held-out records, computed by all workers. The memory is reused by the next
        call."""
        outputs = self._shared["outputs"].tensor
        self._publish(model)
        starts = range(0, len(outputs), EVALUATION_ROWS)
        jobs = [_Job("outputs", (start, start + EVALUATION_ROWS), 1, start) for start in starts]
        for answer in self._run(jobs):
            if answer.status != "done":
                raise TaskError(f"evaluating the held-out records failed: {answer.value}")
        return outputs

    def close(self) -> None:
        """End the workers and release the shared memory."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.stop()
        for shared in self._shared.values():
            shared.close()

    def _reply(self, answer: _Answer) -> Reply:
        request: Request = answer.job.about
        client_id, round = request.client_id, request.round
        elapsed = self._clock.seconds[client_id]
        if answer.status != "done":
            return Reply(Failure(client_id, round, answer.status, answer.value), elapsed)
        client = self._setup.clients[self._index[client_id]]
        if request.purpose is Purpose.EVALUATE:
            rows = client.evaluation
            return Reply(Evaluation(client_id, round, rows.stop - rows.start, answer.value), elapsed)
        assert answer.slot is not None  # noqa: S101
        delta = self._shared["updates"].tensor[answer.slot]
        return Reply(Update(client_id, round, request.version, delta, client.num_examples, answer.value), elapsed)

    def _publish(self, model: ModelState) -> None:
        self._shared["global"].tensor.copy_(model.flat)

    def _run(self, jobs: Sequence[_Job]) -> Iterator[_Answer]:
        """Spread jobs over the workers; yield answers as they come. A slot is free again when the next answer is
        taken."""
        pending = deque(sorted(jobs, key=lambda job: -job.weight))
        outstanding = len(pending)
        finished = False
        try:
            while outstanding:
                for depth in range(1, self._depth + 1):
                    for worker in self._workers:
                        while pending and len(worker.jobs) < depth:
                            self._send(worker, pending.popleft())
                for worker in self._ready_workers():
                    answer = self._receive(worker, pending)
                    if answer is None:
                        continue
                    if pending and worker in self._workers:
                        self._send(worker, pending.popleft())
                    outstanding -= 1
                    yield answer
                    if answer.slot is not None:
                        self._free.append(answer.slot)
            finished = True
        finally:
            if not finished and not self._closed:
                # Left in the middle: answers on their way belong to nobody, so the workers that owe them are replaced.
                for worker in list(self._workers):
                    if worker.jobs:
                        self._replace(worker)
                self._free = list(range(len(self._shared["updates"].tensor)))

    def _send(self, worker: WorkerProcess, job: _Job) -> None:
        slot = self._free.pop() if job.takes_slot else None
        worker.jobs.append((job, slot))
        arguments = job.arguments if slot is None else (*job.arguments, slot)
        # A worker that died is noticed when the end of its stream is read; its jobs then go to another.
        with contextlib.suppress(ConnectionError):
            worker.connection.send((job.name, arguments))

    def _ready_workers(self) -> list[WorkerProcess]:
        by_connection = {worker.connection: worker for worker in self._workers}
        return [by_connection[c] for c in wait(list(by_connection)) if isinstance(c, Connection)]

    def _receive(self, worker: WorkerProcess, pending: deque[_Job]) -> _Answer | None:
        """One message of a worker: an answer, or None for a sign of life. A dead worker is replaced."""
        try:
            status, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            return self._bury(worker, pending)
        if status == "ready":
            worker.ready = True
            return None
        if status == "setup failed":
            raise TaskError(f"the task cannot be set up in a worker process: {value}")
        job, slot = worker.jobs.popleft()
        return _Answer(job, status, value, slot)

    def _bury(self, worker: WorkerProcess, pending: deque[_Job]) -> _Answer | None:
        ending = worker.how_it_ended()
        if not worker.ready:
            raise RunError(f"a worker process ended while it was starting ({ending}): see {self._log or 'its output'}")
        jobs = list(worker.jobs)
        self._replace(worker)
        for job, slot in jobs[1:]:
            pending.appendleft(job)
            if slot is not None:
                self._free.append(slot)
        if not jobs:
            return None
        job, slot = jobs[0]
        return _Answer(job, "crashed", f"its worker process ended: {ending}", slot)

    def _replace(self, worker: WorkerProcess) -> None:
        worker.stop()
        fresh = WorkerProcess(self._log)
        self._workers[self._workers.index(worker)] = fresh
        self._configure(fresh)

    def _configure(self, worker: WorkerProcess) -> None:
        worker.configure(self._payload, [shared.fd for shared in self._shared.values()])

    def _pickled(self) -> bytes:
        tensors = {name: (tuple(s.tensor.shape), s.tensor.dtype) for name, s in self._shared.items()}
        setup = replace(self._setup, tensors=tensors)
        try:
            return cloudpickle.dumps(setup)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TaskError(
                f"the task cannot be sent to worker processes: {error}: build the model, loss and metrics from "
                f"importable functions, without open files, locks or database connections"
            ) from error
