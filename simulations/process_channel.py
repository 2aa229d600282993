"""A channel whose clients live in worker processes on this machine, one worker per core.

Records, the global model and the updates lie in shared memory; a job and its answer are a hundred bytes. Each worker is
always one job ahead, so that it never waits for the coordinator. Largest clients go first, which evens out the end of
the round. A worker that dies is replaced, and the job it was at is done once more by another: only a client that ends
its worker twice is lost.
"""

import contextlib
import logging
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

from coterie.client.shared_tensor import SharedTensor
from coterie.client.training import EVALUATION_BATCH
from coterie.client.worker_process import WorkerProcess
from coterie.core import interrupts
from coterie.core.errors import RunError, TaskError
from coterie.core.messages import SURPLUS, ClientInfo, Evaluation, Failure, Purpose, Reply, Request, Update
from coterie.core.model_state import ModelState
from coterie.simulations.virtual_time import drops_out
from coterie.simulations.worker import Setup

_log = logging.getLogger(__name__)

READ_AHEAD_BYTES = 64 << 20
"""Updates larger than this are not computed ahead: one slot per worker is enough memory."""

MAX_DEAD_STARTS = 3
"""Workers in a row that may be killed before they are ready."""

SILENT_SECONDS = 10.0
"""After so long without an answer a worker that something has stopped is named."""


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
    tries: int = 1


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
        self._shared = dict(records)
        self._free = list(range(num_slots))
        self._index = {client.id: i for i, client in enumerate(setup.clients)}
        self._closed = False
        self._dead_starts = 0
        self._named: set[int] = set()
        try:
            for name, shape in (
                ("global", (size,)),
                ("updates", (num_slots, size)),
                ("outputs", (len(records["test_inputs"].tensor), *output_shape)),
            ):
                self._shared[name] = SharedTensor.create(shape, torch.float32)
            self._payload = self._pickled()
            for worker in self._workers:
                self._configure(worker)
        except BaseException:
            self.close()
            raise

    def clients(self) -> Sequence[ClientInfo]:
        """All simulated clients, in the partition's order."""
        return [ClientInfo(client.id, client.num_examples) for client in self._setup.clients]

    def dispatch(
        self, requests: Sequence[Request], deadline: float | None = None, enough: int | None = None
    ) -> Iterator[Reply]:
        """See `Channel.dispatch`. All requests of one call start from the same model."""
        jobs: list[_Job] = []
        failed: list[Reply] = []
        for request in requests:
            client = self._setup.clients[self._index[request.client_id]]
            seconds = self._seconds(request)
            if request.purpose is Purpose.TRAIN:
                if drops_out(self._setup.seed, request.round, client.id, self._clock.dropout):
                    reason = "vanished in this round (simulated dropout)"
                    failed.append(Reply(Failure(client.id, request.round, "dropped", reason), deadline or seconds))
                    continue
                if deadline is not None and seconds > deadline:
                    reason = f"would have answered after {seconds:.1f} s, the deadline is {deadline:.1f} s (virtual)"
                    failed.append(Reply(Failure(client.id, request.round, "late", reason), deadline))
                    continue
            elif not client.num_evaluation_examples:
                reason = "its only record is for training: none is left to evaluate on"
                failed.append(Reply(Failure(client.id, request.round, "no_records", reason)))
                continue
            arguments = (self._index[client.id], request.round)
            if request.purpose is Purpose.TRAIN:
                jobs.append(_Job("train", arguments, client.num_examples, request, takes_slot=True))
            else:
                jobs.append(_Job("evaluate", arguments, client.num_evaluation_examples, request))
        if jobs:
            self._publish(requests[0].model)
        # With more clients than are needed those go first that are first on the virtual clock; another one is asked for
        # each that fails.
        waiting = deque(jobs if enough is None else sorted(jobs, key=lambda job: self._seconds(job.about)))
        missing = len(jobs) if enough is None else enough
        while waiting and missing:
            asked = [waiting.popleft() for _ in range(min(missing, len(waiting)))]
            for answer in self._run(asked):
                missing -= answer.status == "done"
                yield self._reply(answer)
        for reply in failed:  # nobody waits for them when there are enough others
            yield reply if missing or enough is None else replace(reply, elapsed=0.0)
        for job in waiting:
            yield Reply(Failure(job.about.client_id, job.about.round, SURPLUS, f"{enough} others were faster"))

    def outputs(self, model: ModelState) -> Tensor:
        """Outputs[N, ...] of a model on the held-out records, computed by all workers. The memory is reused by the next
        call."""
        outputs = self._shared["outputs"].tensor
        self._publish(model)
        # One forward pass per job, so that the outputs do not depend on the number of workers.
        starts = range(0, len(outputs), EVALUATION_BATCH)
        jobs = [_Job("outputs", (start, start + EVALUATION_BATCH), 1, start) for start in starts]
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
        elapsed = self._seconds(request)
        if answer.status != "done":
            return Reply(Failure(client_id, round, answer.status, answer.value), elapsed)
        client = self._setup.clients[self._index[client_id]]
        if request.purpose is Purpose.EVALUATE:
            return Reply(Evaluation(client_id, round, client.num_evaluation_examples, answer.value), elapsed)
        assert answer.slot is not None  # noqa: S101
        delta = self._shared["updates"].tensor[answer.slot]
        return Reply(Update(client_id, round, request.version, delta, client.num_examples, answer.value), elapsed)

    def _seconds(self, request: Request) -> float:
        return self._clock.seconds[request.client_id]

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
        while True:
            with interrupts.allowed():
                ready = wait(list(by_connection), SILENT_SECONDS)
            if ready:
                break
            for worker in self._workers:
                if worker.is_stopped() and worker.pid not in self._named:
                    self._named.add(worker.pid)
                    _log.warning("worker process %d is stopped: `kill -CONT %d` lets it go on", worker.pid, worker.pid)
        return [by_connection[c] for c in ready if isinstance(c, Connection)]

    def _receive(self, worker: WorkerProcess, pending: deque[_Job]) -> _Answer | None:
        """One message of a worker: an answer, or None for a sign of life. A dead worker is replaced."""
        try:
            status, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            return self._bury(worker, pending)
        if status == "ready":
            worker.ready = True
            self._dead_starts = 0
            return None
        if status == "setup failed":
            raise TaskError(f"the task cannot be set up in a worker process: {value}")
        job, slot = worker.jobs.popleft()
        return _Answer(job, status, value, slot)

    def _bury(self, worker: WorkerProcess, pending: deque[_Job]) -> _Answer | None:
        ending = worker.how_it_ended()
        if not worker.ready:
            self._dead_starts += 1
            if not worker.was_killed() or self._dead_starts > MAX_DEAD_STARTS:
                raise RunError(f"a worker process ended while it was starting: {ending}")
        jobs = list(worker.jobs)
        guilty = jobs.pop(0) if jobs and worker.ready else None
        self._replace(worker)
        if guilty and guilty[0].tries == 1:
            jobs.append((replace(guilty[0], tries=2), guilty[1]))
            guilty = None
        for job, slot in jobs:
            pending.appendleft(job)
            if slot is not None:
                self._free.append(slot)
        if guilty is None:
            return None
        job, slot = guilty
        return _Answer(job, "crashed", f"its worker process ended, twice: {ending}", slot)

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
