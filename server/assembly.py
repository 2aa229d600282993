"""A run on real clients, put together: its parts checked, and who takes part, whatever carries the messages."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping

import torch

from coterie.aggregation import AGGREGATORS, SERVER_OPTIMIZERS, Aggregator, ServerOptimizer
from coterie.core.choice import build, given
from coterie.core.errors import ConfigError, CoterieError, PreconditionError, RunError
from coterie.core.events import EventKind
from coterie.core.messages import Channel
from coterie.core.model_state import ModelState
from coterie.core.records import num_training
from coterie.core.run_config import RunConfig
from coterie.server.conduct import Parts
from coterie.server.coordinator import Evaluate
from coterie.server.journal import Journal
from coterie.server.store import Store
from coterie.tasks import Task
from coterie.tasks.task import initial_model, measure

EVALUATION_BATCH = 256
"""Held-out records per forward pass."""

MakeChannel = Callable[[RunConfig, Mapping[str, int]], Channel]
"""From the resolved run and the clients' num_examples by name."""


def make_rules(config: RunConfig) -> tuple[Aggregator, ServerOptimizer]:
    """Rule and server optimizer of a resolved run. Raises ConfigError.

    A rule that cannot work with the fewest replies a round may have is refused: it would fail in the middle of the run.
    """
    choice, replies = given(config.aggregator), config.cohort.min_replies or 1
    aggregator = build(AGGREGATORS, choice, "aggregator", expects=Aggregator)
    server_optimizer = build(
        SERVER_OPTIMIZERS, given(config.server_optimizer), "server_optimizer", expects=ServerOptimizer
    )
    check = getattr(aggregator, "check", None)  # a rule of one's own may go without
    try:
        if check is not None:
            check(replies)
    except PreconditionError as error:
        raise ConfigError(f"aggregator = {choice.name!r}, cohort.min_replies = {replies}: {error}") from None
    return aggregator, server_optimizer


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for a run that could not work with as many clients as it asks for."""
    make_rules(config.resolve(max(2, config.federation.min_clients or 0, config.cohort.size or 0)))


def assemble(config: RunConfig, task: Task, clients: Mapping[str, int], make_channel: MakeChannel) -> Parts:
    """The parts of a run with these clients (records by name). Raises CoterieError for what cannot work with them."""
    config = config.resolve(len(clients))
    aggregator, server_optimizer = make_rules(config)
    counts = {name: num_training(count, config.evaluation.client_holdout) for name, count in clients.items()}

    @contextlib.contextmanager
    def channel(_: ModelState) -> Generator[tuple[Channel, Evaluate]]:
        yield make_channel(config, counts), _held_out(task)

    return Parts(
        config,
        aggregator,
        server_optimizer,
        initial_model(task, config.seed),
        records={"test": task.test.sha256()},
        described={"num_clients": len(clients), "clients": clients, "partition": {"sizes": clients}},
        open=channel,
    )


def wait_for_clients(
    store: Store,
    run_id: str,
    config: RunConfig,
    here: Callable[[], Mapping[str, int]],
    pause: Callable[[], None],
    hint: Callable[[], str] = str,
) -> dict[str, int]:
    """Who takes part, with the records that each holds: those of the run's start, or those who are here now.

    Waits for enough of them, and says so. here: records of the task by name, of who is here. pause: called between two
    looks; what it raises ends the wait. hint: why some are not counted. Raises RunError when too few come.
    """
    begun = [event.data["clients"] for event in store.events(run_id) if event.kind is EventKind.RUN_STARTED]
    known: dict[str, int] | None = dict(begun[0]) if begun else None
    wanted = config.federation.min_clients or config.cohort.size or 1
    if known is not None:
        wanted = min(wanted, len(known))
    end, said = time.monotonic() + config.federation.wait, ""
    while True:
        found = {name: count for name, count in here().items() if count and (known is None or name in known)}
        if len(found) >= wanted:
            return found if known is None else known
        tags = config.federation.tags
        which = f" and tags {', '.join(tags)}" if tags else ""
        reason = f"{len(found)} of {wanted} nodes with records for task {config.task.name!r}{which} are here"
        if time.monotonic() > end:
            wait, why = config.federation.wait, hint()
            raise RunError(f"{reason} after {wait:g} s{why}: start more, or lower federation.min_clients")
        if reason + hint() != said:
            said = reason + hint()
            tell(store, run_id, EventKind.RUN_WAITING, reason=said)
        pause()


def tell(store: Store, run_id: str, kind: EventKind, **data: str) -> None:
    """Add an event to a run that nobody conducts at present."""
    history = store.events(run_id)
    journal = Journal(store, run_id, last_seq=history[-1].seq if history else 0)
    journal.emit(kind, history[-1].round if history else 0, **data)
    journal.commit()


@contextlib.contextmanager
def telling(store: Store, run_id: str) -> Generator[None]:
    """What goes wrong before a run is conducted ends it and is its last event."""
    try:
        yield
    except CoterieError as error:
        tell(store, run_id, EventKind.RUN_FAILED, reason=f"{type(error).__name__}: {error}")
        raise


def _held_out(task: Task) -> Evaluate:
    """Measures a model on the task's held-out set, in this process."""
    with torch.random.fork_rng(devices=[]):
        module = task.model()

    @torch.no_grad()
    def evaluate(model: ModelState) -> Mapping[str, float]:
        model.load_into(module)
        module.eval()
        outputs = torch.cat([module(block).float() for block in task.test.inputs.split(EVALUATION_BATCH)])
        return measure(outputs, task.test.targets, task.loss, task.metrics)

    return evaluate
