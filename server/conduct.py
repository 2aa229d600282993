"""One run from its first event to its last, whoever the clients are: go on from the last checkpoint, run the rounds,
leave store and directory telling how it ended."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from coterie.aggregation import Aggregator, ServerOptimizer
from coterie.core import interrupts
from coterie.core.errors import ModelError, RunError, RunInterrupted
from coterie.core.events import EventKind, Listener
from coterie.core.messages import Channel
from coterie.core.model_state import ModelState, save_state_dict
from coterie.core.run_config import RunConfig
from coterie.server.checkpoint import Checkpoint, CheckpointWriter, write_safely
from coterie.server.coordinator import Coordinator, Evaluate, Outcome, explain
from coterie.server.journal import Journal
from coterie.server.run_directory import RunDirectory
from coterie.server.store import RunKind, RunStatus, Store


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    config: resolved. initial: the model of round 0. records: hashes of what must be the same at a resume, by name.
    described: what the first event says beside. open: the channel to the clients, for models like the given one, and
    how to measure a model on the held-out set while it is open.
    """

    config: RunConfig
    aggregator: Aggregator
    server_optimizer: ServerOptimizer
    initial: ModelState
    records: Mapping[str, str]
    described: Mapping[str, Any]
    open: Callable[[ModelState], AbstractContextManager[tuple[Channel, Evaluate]]]


def conduct(
    parts: Parts, run_id: str, fresh: bool, store: Store, directory: RunDirectory, listeners: Sequence[Listener] = ()
) -> Outcome:
    """Run or go on. fresh: the run is not in the store yet.

    Raises what ended it (RunError when it must not go on because records or model have changed), and RunInterrupted for
    a KeyboardInterrupt, after writing so down. Signals are taken where the channel waits, and nowhere else.
    """
    with interrupts.deferred():
        return _conduct(parts, run_id, fresh, store, directory, listeners)


def _conduct(
    parts: Parts, run_id: str, fresh: bool, store: Store, directory: RunDirectory, listeners: Sequence[Listener]
) -> Outcome:
    config, history = parts.config, store.events(run_id)
    begun = [event for event in history if event.kind is EventKind.RUN_STARTED]
    if begun and begun[0].data["records"] != parts.records:
        raise RunError(
            f"the records of task {config.task.name!r} are not those that run {run_id} started with: "
            f"restore them, or start a new run"
        )
    start = _last_checkpoint(parts, directory, run_id)
    journal = Journal(store, run_id, listeners, last_seq=history[-1].seq if history else 0)
    checkpoints = CheckpointWriter(directory.checkpoint)
    try:
        if fresh:
            register(config, run_id, store, directory)
        with parts.open(start.model) as (channel, evaluate):
            if begun:
                journal.emit(EventKind.RUN_RESUMED, start.round, from_round=start.round)
            else:
                layout = start.model.layout
                told = {"num_parameters": layout.num_parameters, "rounds": config.rounds, "records": parts.records}
                journal.emit(EventKind.RUN_STARTED, 0, **parts.described, **told)
            journal.commit()
            rules = parts.aggregator, parts.server_optimizer
            outcome = Coordinator(config, channel, *rules, journal, checkpoints, evaluate).run(start)
        checkpoints.close()
        write_safely(directory.model, lambda part: save_state_dict(outcome.model, part))
        journal.emit(EventKind.RUN_FINISHED, outcome.rounds, **explain(outcome))
        journal.commit()
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(RunError):  # what went wrong first is what the user must see
            checkpoints.close()
        with contextlib.suppress(RunError):
            if interrupted:
                journal.emit(EventKind.RUN_INTERRUPTED, journal.last_round)
            else:
                journal.emit(EventKind.RUN_FAILED, journal.last_round, reason=f"{type(error).__name__}: {error}")
            journal.commit()
        if interrupted:
            raise RunInterrupted(run_id) from None
        raise
    return outcome


def register(
    config: RunConfig,
    run_id: str,
    store: Store,
    directory: RunDirectory,
    kind: RunKind = RunKind.SIMULATION,
    status: RunStatus = RunStatus.RUNNING,
) -> None:
    """Put a new run into the store and its run file into its directory."""
    text = config.to_toml()
    store.create_run(
        run_id,
        name=config.name,
        task=config.task.name,
        strategy=config.strategy,
        rounds=config.rounds,
        config=text,
        kind=kind,
        status=status,
    )
    write_safely(directory.path / "run.toml", lambda part: part.write_text(text, encoding="utf-8"))


def _last_checkpoint(parts: Parts, directory: RunDirectory, run_id: str) -> Checkpoint:
    """The run's last complete checkpoint, or the initial model. Raises RunError for a checkpoint of another model."""
    saved = Checkpoint.load(directory.checkpoint)
    if saved is None:
        return Checkpoint(0, parts.initial)
    try:
        saved.model.check_fits(parts.initial.layout, parts.initial.fixed)
    except ModelError as error:
        raise RunError(
            f"the model of task {parts.config.task.name!r} is not the one that run {run_id} started with: {error}: "
            f"restore it, or start a new run"
        ) from None
    return saved
