"""The round loop: the same for simulated and for real clients, which it reaches through a `Channel`.

sample the cohort > dispatch > gate each reply > aggregate > server optimizer > evaluate > events > checkpoint.
No client can end a round or change another's result; a round without enough usable replies keeps the model and says so.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from coterie.aggregation import Aggregator, Gate, LinearAggregator, ServerOptimizer, mean_metrics
from coterie.core.errors import CoterieError, QuorumError, RunError
from coterie.core.events import EventKind
from coterie.core.messages import SURPLUS, Channel, Evaluation, Failure, Purpose, Reply, Request, Update
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.core.seeding import numpy_generator
from coterie.server.checkpoint import Checkpoint, CheckpointWriter
from coterie.server.journal import Journal

Evaluate = Callable[[ModelState], Mapping[str, float]]


@dataclass(frozen=True)
class Outcome:
    """What a run ends with. metrics: on the held-out set; clock: virtual seconds; seconds: real ones of this
    process."""

    model: ModelState
    metrics: Mapping[str, float]
    rounds: int
    clock: float
    seconds: float


@dataclass
class _Round:
    """What one round gathered."""

    used: int = 0
    examples: int = 0
    failed: int = 0
    refused: int = 0
    surplus: list[str] = field(default_factory=list[str])
    elapsed: float = 0.0
    empty_because: str = ""


class Coordinator:
    """Runs the rounds of one run, from a fresh model or from a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        channel: Channel,
        aggregator: Aggregator,
        server_optimizer: ServerOptimizer,
        journal: Journal,
        checkpoints: CheckpointWriter,
        evaluate: Evaluate,
    ) -> None:
        """`config` is resolved. `evaluate` measures a model on the held-out global set."""
        self.config = config
        self._channel = channel
        self._aggregator = aggregator
        self._server_optimizer = server_optimizer
        self._journal = journal
        self._checkpoints = checkpoints
        self._evaluate = evaluate
        self._clients = {client.id: client for client in channel.clients()}
        self._rows: Tensor | None = None
        self._deadline = None if math.isinf(config.cohort.deadline) else config.cohort.deadline
        self._rule = f"aggregator {config.aggregator.name!r}" if config.aggregator else "the aggregator"
        self._why = ""

    def run(self, start: Checkpoint) -> Outcome:
        """Go on after `start.round` complete rounds until the last. Raises QuorumError after too many empty rounds.

        KeyboardInterrupt passes through once the last complete round is safe on disk.
        """
        began = time.monotonic()
        state = start
        if not state.optimizer:
            state = replace(state, optimizer=self._server_optimizer.init(state.model.layout.num_parameters))
        metrics: Mapping[str, float] = {}
        gate = Gate(
            state.model.layout.size,
            self.config.gate,
            {client.id: client.num_examples for client in self._clients.values()},
        )
        every = self.config.evaluation
        for round in range(state.round + 1, self.config.rounds + 1):
            last = round == self.config.rounds
            state = self._round(round, state, gate)
            if last or (every.every and round % every.every == 0):
                metrics = self._measure(round, state.model)
            if last or (every.clients_every and round % every.clients_every == 0):
                self._measure_clients(round, state)
            # Events first: a checkpoint never knows of a round that the store has not seen.
            self._journal.commit()
            if last or round % self.config.checkpoint.every == 0:
                self._checkpoints.put(state)
            if not last:
                self._check_learning(state)
        self._check_learning(state)
        if not metrics:
            metrics = self._measure(state.round, state.model)
        return Outcome(state.model, metrics, state.round, state.clock, time.monotonic() - began)

    def _check_learning(self, state: Checkpoint) -> None:
        """Raise QuorumError after too many empty rounds, and at the end of a run without one good round: it has learned
        nothing and must not pass for finished, however often it is resumed."""
        empty, over = state.empty_rounds, state.round == self.config.rounds
        if empty >= self.config.cohort.max_empty_rounds or (over and empty == state.round):
            why = f" (round {state.round}: {self._why})" if self._why else ""
            raise QuorumError(
                f"{empty} rounds in a row had too few usable replies{why}: the model is that of the last good round"
            )

    def _round(self, round: int, state: Checkpoint, gate: Gate) -> Checkpoint:
        config = self.config
        cohort = self._sample(round)
        self._journal.emit(EventKind.ROUND_STARTED, round, cohort=cohort)
        gate.open(round, round - 1, cohort)
        requests = [Request(client_id, round, Purpose.TRAIN, round - 1, state.model) for client_id in cohort]
        gathered = _Round()
        reasons: Counter[str] = Counter()
        metrics: dict[str, tuple[Mapping[str, float], float]] = {}
        collector = self._collector(state.model.layout.size, cohort)
        started = time.perf_counter()
        enough = config.cohort.size if config.cohort.over_selection else None
        for reply in self._channel.dispatch(requests, self._deadline, enough):
            gathered.elapsed = max(gathered.elapsed, reply.elapsed)
            update = self._usable(round, reply, gate, gathered, reasons)
            if update is None:
                continue
            with self._naming_rule():
                collector.add(update)
            gathered.used += 1
            gathered.examples += update.num_examples
            metrics[update.client_id] = (update.metrics, update.num_examples)
        trained = time.perf_counter()
        model, optimizer = state.model, state.optimizer
        quorum = config.cohort.min_replies or 1
        if gathered.used < quorum:
            common = reasons.most_common(1)
            detail = f", most often {common[0][0]}" if common else ""
            gathered.empty_because = f"{gathered.used} usable replies, the quorum is {quorum}{detail}"
        else:
            model, optimizer = self._move(state, self._aggregate(collector, state.model.layout.size))
            if not bool(torch.isfinite(model.flat).all()):
                gathered.empty_because = f"{self._rule} gave values that are not finite"
                model, optimizer = state.model, state.optimizer
        self._why = gathered.empty_because
        clock = state.clock + gathered.elapsed
        self._journal.emit(
            EventKind.ROUND_FINISHED,
            round,
            used=gathered.used,
            examples=gathered.examples,
            failed=gathered.failed,
            refused=gathered.refused,
            surplus=gathered.surplus,
            empty=gathered.empty_because,
            metrics=mean_metrics(metrics[client_id] for client_id in cohort if client_id in metrics),
            clock=clock,
            seconds={"train": trained - started, "aggregate": time.perf_counter() - trained},
        )
        empty_rounds = state.empty_rounds + 1 if gathered.empty_because else 0
        return Checkpoint(round, model, optimizer, clock, empty_rounds)

    def _usable(self, round: int, reply: Reply, gate: Gate, gathered: _Round, reasons: Counter[str]) -> Update | None:
        """The update of a reply, or None after saying in the events why there is none."""
        result = reply.result
        if isinstance(result, Failure) and result.kind == SURPLUS:
            gathered.surplus.append(result.client_id)
            return None
        if isinstance(result, Failure) and result.round != round:  # what comes after its round has closed
            about = {"client_id": result.client_id, "kind": result.kind, "reason": result.reason}
            self._journal.emit(EventKind.UPDATE_REFUSED, round, **about)
            return None
        if isinstance(result, Failure):
            gathered.failed += 1
            reasons[f"{result.kind}: {result.reason}"] += 1
            self._journal.emit(
                EventKind.CLIENT_FAILED, round, client_id=result.client_id, kind=result.kind, reason=result.reason
            )
            return None
        if isinstance(result, Evaluation):
            raise TypeError(f"the channel answered a training request of {result.client_id} with an evaluation")
        refusal = gate.judge(result)
        if refusal is None:
            return result
        gathered.refused += 1
        reasons[f"{refusal.kind}: {refusal.reason}"] += 1
        self._journal.emit(
            EventKind.UPDATE_REFUSED, round, client_id=result.client_id, kind=refusal.kind, reason=refusal.reason
        )
        return None

    def _aggregate(self, collector: "_Stream | _Rows", size: int) -> Tensor:
        """The rule's vector, float32[size]. Raises RunError when a rule of the user's own gives something else."""
        with self._naming_rule():
            found = cast("object", collector.result())
        if not isinstance(found, Tensor) or found.shape != (size,):
            shape = list(found.shape) if isinstance(found, Tensor) else ""
            raise RunError(f"{self._rule} gave a {type(found).__name__}{shape}: it must be a Tensor[{size}]")
        return found.detach().to("cpu", torch.float32)

    @contextlib.contextmanager
    def _naming_rule(self) -> Generator[None]:
        """What a rule of the user's own raises becomes a RunError with its name."""
        try:
            yield
        except CoterieError:
            raise
        except Exception as error:
            raise RunError(f"{self._rule} raised {type(error).__name__}: {error}") from error

    def _move(self, state: Checkpoint, aggregate: Tensor) -> tuple[ModelState, Mapping[str, Tensor]]:
        """The server optimizer moves the parameters; floating buffers take the aggregate as it is."""
        count = state.model.layout.num_parameters
        old = state.model.flat
        params, optimizer = self._server_optimizer.step(old[:count], aggregate[:count], state.optimizer)
        flat = torch.cat([params, old[count:] + aggregate[count:]])
        return state.model.with_flat(flat), optimizer

    def _sample(self, round: int) -> list[str]:
        """The cohort of a round: without replacement, uniformly, in the channel's order."""
        ids = list(self._clients)
        rng = numpy_generator(self.config.seed, "cohort", round)
        cohort = self.config.cohort
        asked = min(len(ids), math.ceil((cohort.size or len(ids)) * (1 + cohort.over_selection)))
        chosen = rng.choice(len(ids), asked, replace=False)
        return [ids[i] for i in sorted(chosen)]

    def _collector(self, size: int, cohort: Sequence[str]) -> "_Stream | _Rows":
        if isinstance(self._aggregator, LinearAggregator):
            cap = self.config.gate.max_num_examples
            most = sum(min(cap, self._clients[client_id].num_examples or cap) for client_id in cohort)
            return _Stream(self._aggregator, size, most)
        if self._rows is None or self._rows.shape != (len(cohort), size):
            self._rows = torch.empty(len(cohort), size)
        return _Rows(self._aggregator, self._rows, cohort)

    def _measure(self, round: int, model: ModelState) -> Mapping[str, float]:
        began = time.perf_counter()
        metrics = dict(self._evaluate(model))
        self._journal.emit(EventKind.EVALUATED, round, metrics=metrics, seconds=time.perf_counter() - began)
        return metrics

    def _measure_clients(self, round: int, state: Checkpoint) -> None:
        began = time.perf_counter()
        requests = [Request(client_id, round, Purpose.EVALUATE, round, state.model) for client_id in self._clients]
        answers: dict[str, Evaluation] = {}
        failed: dict[str, str] = {}
        for reply in self._channel.dispatch(requests, self._deadline):
            result = reply.result
            if isinstance(result, Evaluation):
                answers[result.client_id] = result
            elif isinstance(result, Failure):
                failed[result.client_id] = result.reason
        ordered = [answers[client_id] for client_id in self._clients if client_id in answers]
        self._journal.emit(
            EventKind.CLIENTS_EVALUATED,
            round,
            metrics=mean_metrics((answer.metrics, answer.num_examples) for answer in ordered),
            per_client={answer.client_id: dict(answer.metrics) for answer in ordered},
            failed=failed,
            on="held-out records" if self.config.evaluation.client_holdout else "training records",
            seconds=time.perf_counter() - began,
        )


class _Stream:
    """Feeds a linear rule as updates come, in O(D) memory."""

    def __init__(self, aggregator: LinearAggregator, size: int, max_total_weight: float) -> None:
        self._sum = aggregator.stream(size, max_total_weight)

    def add(self, update: Update) -> None:
        self._sum.accumulate(update.delta, update.num_examples)

    def result(self) -> Tensor:
        return self._sum.result()


class _Rows:
    """Keeps the updates for a rule that needs all of them, each in its client's row: the order of arrival leaves no
    trace."""

    def __init__(self, aggregator: Aggregator, rows: Tensor, cohort: Sequence[str]) -> None:
        self._aggregator = aggregator
        self._rows = rows
        self._row = {client_id: i for i, client_id in enumerate(cohort)}
        self._weights = torch.zeros(len(cohort))

    def add(self, update: Update) -> None:
        row = self._row[update.client_id]
        self._rows[row] = update.delta
        self._weights[row] = update.num_examples

    def result(self) -> Tensor:
        present = self._weights > 0
        if bool(present.all()):
            return self._aggregator(self._rows, self._weights)
        kept = present.nonzero().flatten()
        return self._aggregator(self._rows[kept], self._weights[kept])


def explain(outcome: Outcome) -> dict[str, Any]:
    """The outcome as the last event and the command line tell it."""
    return {
        "metrics": dict(outcome.metrics),
        "sha256": outcome.model.sha256(),
        "rounds": outcome.rounds,
        "clock": outcome.clock,
        "seconds": outcome.seconds,
    }
