"""What a report says about one run, gathered from its record and its events.

Much of it was chosen by clients (ids, reasons, metrics), and any of it may be missing: a run may have failed before its
first round, and a number that was not finite is stored as null. Every reader here takes that as it comes.
"""

import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.core.events import Event, EventKind
from coterie.server.store import RunRecord, RunStatus, effective

PHASES = ("train", "aggregate", "evaluate", "evaluate on clients")

_LOWER_IS_BETTER = ("loss", "error", "mse", "rmse", "mae", "perplexity", "brier", "ece", "entropy", "deviance")
_LARGEST = 1e100
_RUNAWAY = ("not_finite", "magnitude")
_ENDS = (EventKind.RUN_FINISHED, EventKind.RUN_FAILED, EventKind.RUN_INTERRUPTED)

Curve = dict[int, float]
"""Round to value; a value that is not known is not a number."""


@dataclass(frozen=True)
class Loss:
    """One client lost in one round. how: "failed" or "refused"; word: "late", "norm", ..."""

    round: int
    how: str
    word: str
    client_id: str
    reason: str

    @property
    def kind(self) -> str:
        """How and by which word: "failed: late"."""
        return f"{self.how}: {self.word}"


@dataclass(frozen=True)
class ClientValues:
    """The last evaluation on the clients. values: client id to the headline metric, for those that sent a number."""

    round: int
    on: str
    metric: str
    values: Mapping[str, float]
    others: int
    """Clients without a usable value."""

    def worst(self, count: int) -> list[tuple[str, float]]:
        """The clients with the worst values, the worst first."""
        sign = 1 if lower_is_better(self.metric) else -1
        return sorted(self.values.items(), key=lambda item: (-sign * item[1], item[0]))[:count]


@dataclass(frozen=True)
class PartitionTable:
    """Who holds how much. counts: client id to records per label, empty when there are no labels."""

    sizes: Mapping[str, int]
    labels: Sequence[str] = ()
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])


@dataclass
class RunStory:
    """One run, read once from front to back. Curves by metric name; seconds by phase and round."""

    record: RunRecord
    config: Mapping[str, Any]
    held_out: dict[str, Curve] = field(default_factory=dict[str, Curve])
    training: dict[str, Curve] = field(default_factory=dict[str, Curve])
    empty: dict[int, str] = field(default_factory=dict[int, str])
    lost: list[Loss] = field(default_factory=list[Loss])
    used: dict[int, int] = field(default_factory=dict[int, int])
    seconds: dict[str, Curve] = field(default_factory=dict[str, Curve])
    clients: ClientValues | None = None
    partition: PartitionTable | None = None
    resumed: list[int] = field(default_factory=list[int])
    reason: str = ""
    num_parameters: int = 0
    clocks: Curve = field(default_factory=Curve)
    wall: float = math.nan

    @property
    def headline(self) -> str | None:
        """The metric that the task names first; the loss when there is no other."""
        names = [name for name in self.held_out if name != "loss"] or list(self.held_out)
        return names[0] if names else None

    @property
    def clock(self) -> float:
        """The clients' virtual seconds from the start to the last round whose clock is known."""
        return self.clocks[max(self.clocks)] if self.clocks else math.nan

    @property
    def diverged(self) -> bool:
        """Whether training ran away by itself: it ends at a loss that is no number, or at updates too large to use."""
        if self.setting("simulation.attackers") and self.setting("simulation.attack.name") != "none":
            return False
        kinds = ranked(loss.word for loss in self.lost)
        if self.record.status is RunStatus.FAILED and kinds and kinds[0][0] in _RUNAWAY:
            return True
        losses = filter(None, (curves.get("loss") for curves in (self.held_out, self.training)))
        return any(math.isnan(curve[max(curve)]) for curve in losses)

    @property
    def sha256(self) -> str:
        """Of the final weights; empty while the run has not finished."""
        return str(_mapping(self.record.result).get("sha256") or "")

    @property
    def metrics(self) -> dict[str, float]:
        """The last known value of each metric on the held-out set."""
        last = {name: values[max(values)] for name, values in self.held_out.items() if values}
        return last | {
            name: as_number(value) for name, value in _mapping(_mapping(self.record.result).get("metrics")).items()
        }

    def setting(self, key: str) -> Any:
        """The value at a dotted key of the run file, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = _mapping(value).get(part)
        return value


def read_story(record: RunRecord, events: Sequence[Event]) -> RunStory:
    """Gather one run. What a resume did again counts once, in its last form."""
    story = RunStory(record, _config(record.config))
    story.wall = _wall(events)
    evaluations: list[Event] = []
    for event in effective(events):
        data = event.data
        if event.kind is EventKind.RUN_STARTED:
            story.partition = _partition(data.get("partition"))
            story.num_parameters = int(data.get("num_parameters") or 0)
        elif event.kind is EventKind.RUN_RESUMED:
            story.resumed.append(event.round)
            story.reason = ""
        elif event.kind is EventKind.ROUND_FINISHED:
            _read_round(story, event)
        elif event.kind is EventKind.EVALUATED:
            _read_metrics(story.held_out, event)
            _add_seconds(story, "evaluate", event.round, data.get("seconds"))
        elif event.kind is EventKind.CLIENTS_EVALUATED:
            evaluations.append(event)
            _add_seconds(story, "evaluate on clients", event.round, data.get("seconds"))
        elif event.kind in (EventKind.CLIENT_FAILED, EventKind.UPDATE_REFUSED):
            how = "failed" if event.kind is EventKind.CLIENT_FAILED else "refused"
            word, client_id = str(data.get("kind") or "unknown"), str(data.get("client_id"))
            story.lost.append(Loss(event.round, how, word, client_id, str(data.get("reason") or "")))
        elif event.kind is EventKind.RUN_FAILED:
            story.reason = str(data.get("reason") or "")
    if evaluations:
        story.clients = _clients(evaluations[-1], story.headline)
    return story


def by_round(curves: Mapping[str, Curve]) -> dict[int, dict[str, float]]:
    """Curves turned round: from a round to its values by name."""
    found: dict[int, dict[str, float]] = {}
    for name, curve in curves.items():
        for round, value in curve.items():
            found.setdefault(round, {})[name] = value
    return dict(sorted(found.items()))


def lower_is_better(metric: str) -> bool:
    """Whether a metric's name says that small values are the good ones."""
    words = metric.lower().replace("-", "_").split("_")
    return any(word in words for word in _LOWER_IS_BETTER)


def as_number(value: Any) -> float:
    """A float, or not-a-number for null, text and everything else that a client may have sent and no axis can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return math.nan
    return float(value)


def ranked(items: Iterable[str]) -> list[tuple[str, int]]:
    """Different items with their counts, the most frequent first."""
    return sorted(Counter(items).items(), key=lambda item: (-item[1], item[0]))


def _read_round(story: RunStory, event: Event) -> None:
    data = event.data
    _read_metrics(story.training, event)
    story.used[event.round] = int(data.get("used") or 0)
    if data.get("empty"):
        story.empty[event.round] = str(data["empty"])
    clock = as_number(data.get("clock"))
    if math.isfinite(clock):
        story.clocks[event.round] = clock
    for phase, value in _mapping(data.get("seconds")).items():
        _add_seconds(story, phase, event.round, value)


def _read_metrics(curves: dict[str, Curve], event: Event) -> None:
    for name, value in _mapping(event.data.get("metrics")).items():
        curves.setdefault(str(name), {})[event.round] = as_number(value)


def _add_seconds(story: RunStory, phase: str, round: int, value: Any) -> None:
    number = as_number(value)
    if math.isfinite(number):
        rounds = story.seconds.setdefault(phase, {})
        rounds[round] = rounds.get(round, 0.0) + number


def _clients(event: Event, headline: str | None) -> ClientValues | None:
    answers = {str(key): _mapping(value) for key, value in _mapping(event.data.get("per_client")).items()}
    names = ranked(str(name) for metrics in answers.values() for name in metrics)
    # A client may send any names: without a headline, the one that most of them sent is the common one.
    metric = headline if not names or headline in dict(names) else names[0][0]
    if metric is None:
        return None
    numbers = {client: as_number(metrics.get(metric)) for client, metrics in answers.items()}
    values = {client: value for client, value in numbers.items() if math.isfinite(value)}
    others = len(numbers) - len(values) + len(_mapping(event.data.get("failed")))
    return ClientValues(event.round, str(event.data.get("on") or "records"), metric, values, others)


def _partition(data: Any) -> PartitionTable | None:
    data = _mapping(data)
    sizes = {str(key): int(value) for key, value in _mapping(data.get("sizes")).items()}
    if not sizes:
        return None
    counts = {str(key): list(value) for key, value in _mapping(data.get("counts")).items()}
    labels = [str(label) for label in data.get("labels") or ()]
    fits = counts.keys() == sizes.keys() and all(len(row) == len(labels) for row in counts.values())
    return PartitionTable(sizes, labels, counts) if labels and fits else PartitionTable(sizes)


def _wall(events: Sequence[Event]) -> float:
    """Seconds from start to end, the time between a stop and its resume left out."""
    if not events:
        return math.nan
    total, began = 0.0, events[0].time
    for before, event in itertools.pairwise(events):
        if event.kind is EventKind.RUN_RESUMED or before.kind in _ENDS:
            total += before.time - began
            began = event.time
    return total + events[-1].time - began


def _config(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
