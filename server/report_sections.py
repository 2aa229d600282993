"""The report's sections: from the stories of the runs to the figures and the rows of the tables beside them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.server import report_plots as plots
from coterie.server.report_data import (
    PHASES,
    ClientValues,
    Curve,
    Loss,
    PartitionTable,
    RunStory,
    lower_is_better,
    ranked,
)
from coterie.server.report_format import clip, number
from coterie.server.report_labels import differences, settings

Runs = Sequence[tuple[str, RunStory]]
"""Labels and runs; a run's place is its style in every figure."""

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
WORST = 10

_MOST_CURVES = 6
_MOST_KINDS = 5
_MOST_ROWS = 30


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, what to know about it, and its legend: (label, style)."""

    title: str
    svg: str
    note: str = ""
    legend: Sequence[tuple[str, int]] = ()
    filled: bool = False


def facts(story: RunStory) -> dict[str, Any]:
    """What was run, in a few words each."""
    record = story.record
    attack = _choice(story.setting("simulation.attack"))
    attackers = story.setting("simulation.attackers")
    if isinstance(attackers, list):
        attackers = f"{len(attackers)} named clients"
    elif isinstance(attackers, float):
        attackers = f"{attackers:.0%} of the clients"
    clients = len(story.partition.sizes) if story.partition else story.setting("simulation.clients")
    return {
        "task": record.task,
        "strategy": record.strategy,
        "aggregator": _choice(story.setting("aggregator")),
        "parameters": f"{story.num_parameters:,}" if story.num_parameters else None,
        "clients": f"{clients:,}" if isinstance(clients, int) else None,
        "clients per round": story.setting("cohort.size"),
        "seed": story.setting("seed"),
        "partition": _choice(story.setting("simulation.partition")),
        "attack": f"{attack}, {attackers}" if attackers and attack != "none" else None,
        "dropout": f"{story.setting('simulation.dropout') or 0:.0%}" if story.setting("simulation.dropout") else None,
        "resumed after round": ", ".join(str(round) for round in story.resumed),
    }


def difference_rows(stories: Sequence[RunStory]) -> Mapping[str, list[Any]]:
    """Keys of the run files that differ, with each run's value."""
    found = differences([settings(story) for story in stories])
    return dict(list(found.items())[:_MOST_ROWS])


def curve_figures(runs: Runs) -> list[Figure]:
    """Metrics on the held-out set by round, the headline first, and the clients' mean training loss."""
    heads = [story.headline for _, story in runs if story.headline]
    names = [name for _, story in runs for name in story.held_out if name != "loss"]
    shown = _unique([*_unique(heads + names)[:_MOST_CURVES], "loss"])
    figures = [_curve(runs, name, "held-out", f"Held-out {name}") for name in shown]
    figures.append(_curve(runs, "loss", "training", "Mean training loss of the cohort"))
    return [figure for figure in figures if figure]


def metric_rows(runs: Runs) -> list[dict[str, Any]]:
    """Each run's first, best and last value of each metric on the held-out set, each with its round."""
    rows: list[dict[str, Any]] = []
    for label, story in runs:
        names = [name for name in story.held_out if name != "loss"]
        for name in (*names[:_MOST_CURVES], "loss"):
            curve = story.held_out.get(name, {})
            known = {round: value for round, value in sorted(curve.items()) if math.isfinite(value)}
            if known:
                pick = min if lower_is_better(name) else max
                best = pick(known, key=lambda round, known=known: known[round])
                picked = (min(known), best, max(known))
                rows.append({"run": label, "metric": name, "picked": [(known[round], round) for round in picked]})
    return rows


def empty_rounds(runs: Runs) -> list[dict[str, Any]]:
    """Rounds that kept the model, with the reason of the first."""
    return [
        {"run": label, "rounds": _ranges(sorted(story.empty)), "reason": story.empty[min(story.empty)]}
        for label, story in runs
        if story.empty
    ]


def client_figures(runs: Runs) -> list[Figure]:
    """How the headline metric lies over the clients."""
    known = [(i, label, story.clients) for i, (label, story) in enumerate(runs) if story.clients]
    figures: list[Figure] = []
    for metric in _unique(clients.metric for _, _, clients in known)[:_MOST_CURVES]:
        chosen = [(i, label, clients) for i, label, clients in known if clients.metric == metric]
        title = f"Clients by {metric}"
        key = f"clients {metric}"
        if len(runs) == 1:
            svg = plots.spread(chosen[0][2], 0, key, _told(title, [chosen[0][2]]))
            note = "Line: median. Dotted: a tenth of the clients lie below, a tenth above."
            note = note if len(chosen[0][2].values) > plots.NAMED else ""
            legend: list[tuple[str, int]] = []
        else:
            svg = plots.quantiles([(c, i) for i, _, c in chosen], key, _told(title, [c for _, _, c in chosen]))
            note = "Clients from the worst values to the best: where a curve starts low, some clients are served badly."
            note = note if not lower_is_better(metric) else "The value that each share of the clients stays below."
            legend = [(label, i) for i, label, _ in chosen]
        if svg:
            places = " and ".join(_unique(clip(clients.on, 60) for _, _, clients in chosen))
            figures.append(Figure(title, svg, f"Measured on their {places}. {note}".strip(), legend))
    return figures


def quantile_rows(runs: Runs) -> list[dict[str, Any]]:
    """Quantiles of the clients' values by run."""
    return [
        {
            "run": label,
            "measured": story.clients,
            "known": len(story.clients.values),
            "quantiles": np.quantile(list(story.clients.values.values()), QUANTILES).tolist(),
        }
        for label, story in runs
        if story.clients and story.clients.values
    ]


def worst_rows(runs: Runs) -> list[dict[str, Any]]:
    """The clients served worst, with what they hold."""
    rows: list[dict[str, Any]] = []
    for label, story in runs:
        worst = story.clients.worst(WORST) if story.clients else []
        if worst:
            found = [{"id": client, "value": value, **_holding(story.partition, client)} for client, value in worst]
            rows.append({"run": label, "measured": story.clients, "worst": found})
    return rows


def lost_figures(runs: Runs) -> list[Figure]:
    """Failures and refusals by round: stacked by kind for one run, one line for each of several."""
    if len(runs) > 1:
        return _totals(runs, "Lost clients by round", lambda story: _per_round(story.lost, story.used))
    story = runs[0][1]
    counted = ranked(loss.kind for loss in story.lost)
    if not counted:
        return []
    shown = [kind for kind, _ in counted[:_MOST_KINDS]]
    layers = [([loss for loss in story.lost if loss.kind == kind], kind) for kind in shown]
    rest = [loss for loss in story.lost if loss.kind not in shown]
    layers += [(rest, "others")] if rest else []
    svg = plots.stack(
        [(_per_round(lost, story.used), i) for i, (lost, _) in enumerate(layers)],
        "lost",
        f"Lost clients by round: {len(story.lost)} in all, " + ", ".join(f"{n} {kind}" for kind, n in counted[:9]),
        "clients",
    )
    return [Figure("Lost clients by round", svg, "", [(k, i) for i, (_, k) in enumerate(layers)], True)] if svg else []


def lost_rows(runs: Runs) -> list[dict[str, Any]]:
    """Kinds of loss with count, number of clients, the most affected ones and an example."""
    rows: list[dict[str, Any]] = []
    for label, story in runs:
        for kind, count in ranked(loss.kind for loss in story.lost)[:_MOST_ROWS]:
            lost = [loss for loss in story.lost if loss.kind == kind]
            clients = [client for client, _ in ranked(loss.client_id for loss in lost)]
            example = lost[0].reason
            rows.append({"run": label, "kind": kind, "count": count, "clients": clients, "example": example})
    return rows


def partition_figures(runs: Runs) -> list[dict[str, Any]]:
    """Who holds what, once for all the runs that share it."""
    groups: list[tuple[PartitionTable, list[str]]] = []
    for label, story in runs:
        table = story.partition
        if table is None:
            continue
        same = next((names for other, names in groups if other == table), None)
        if same is None:
            groups.append((table, [label]))
        else:
            same.append(label)
    return [
        {"runs": names, "figures": _partition(table, f"partition {i}"), "sizes": _size_row(table)}
        for i, (table, names) in enumerate(groups[:_MOST_CURVES])
    ]


def phase_seconds(story: RunStory) -> dict[str, float]:
    """Seconds of the whole run by phase; `other` is what the wall clock shows beyond them."""
    totals = {phase: math.fsum(story.seconds.get(phase, {}).values()) for phase in PHASES}
    return totals | {"other": max(0.0, story.wall - math.fsum(totals.values()))}


def time_figures(runs: Runs) -> list[Figure]:
    """Seconds of each round: stacked by phase for one run, one line for each of several."""
    title = "Seconds of each round"
    if len(runs) > 1:
        return _totals(runs, title, _round_seconds)
    story = runs[0][1]
    phases = [phase for phase in PHASES if story.seconds.get(phase)]
    told = ", ".join(f"{phase} {math.fsum(story.seconds[phase].values()):.3g} s in all" for phase in phases)
    layers = [(story.seconds[phase], i) for i, phase in enumerate(phases)]
    svg = plots.stack(layers, "time", f"{title} by phase: {told}", "seconds")
    return [Figure(title, svg, "", [(phase, i) for i, phase in enumerate(phases)], True)] if svg else []


def _curve(runs: Runs, metric: str, where: str, title: str) -> Figure | None:
    def curve(story: RunStory) -> Curve:
        return (story.held_out if where == "held-out" else story.training).get(metric, {})

    drawn = [(i, label, story) for i, (label, story) in enumerate(runs) if curve(story)]
    lines = [plots.Line(curve(story), i, sorted(story.empty)) for i, _, story in drawn]
    last = [f"{clip(label, 60)} ends at {number(list(curve(story).values())[-1])}" for _, label, story in drawn]
    svg = plots.curves(lines, f"{where} {metric}", f"{title} by round: {', '.join(last)}")
    marked = any(line.marks for line in lines)
    note = "Crosses at the bottom: rounds that kept the model for want of usable replies." if marked else ""
    legend = [(label, i) for i, label, _ in drawn] if len(runs) > 1 else []
    return Figure(title, svg, note, legend) if svg else None


def _totals(runs: Runs, title: str, curve: Callable[[RunStory], Curve]) -> list[Figure]:
    lines = [(label, plots.Line(curve(story), i)) for i, (label, story) in enumerate(runs)]
    told = ", ".join(f"{clip(label, 60)} {math.fsum(line.curve.values()):.4g} in all" for label, line in lines)
    svg = plots.curves([line for _, line in lines if line.curve], title, f"{title}: {told}")
    return [Figure(title, svg, "", [(label, line.style) for label, line in lines if line.curve])] if svg else []


def _per_round(lost: Iterable[Loss], rounds: Iterable[int]) -> Curve:
    counts = dict.fromkeys(rounds, 0.0)
    for loss in lost:
        counts[loss.round] = counts.get(loss.round, 0.0) + 1
    return counts


def _round_seconds(story: RunStory) -> Curve:
    total: Curve = {}
    for rounds in story.seconds.values():
        for round, value in rounds.items():
            total[round] = total.get(round, 0.0) + value
    return total


def _partition(table: PartitionTable, key: str) -> list[Figure]:
    values = list(table.sizes.values())
    told = f"{len(values)} clients hold {min(values)} to {max(values)} records, the median is {np.median(values):g}"
    figures = [Figure("Records per client", plots.sizes(table, f"{key} sizes", f"Records per client: {told}"))]
    if table.counts:
        note = "Colour: the label's share of the client's records, from none to all. Sorted by most frequent label."
        if len(values) > plots.MOST_COLUMNS:
            note += f" Neighbours are averaged into {plots.MOST_COLUMNS} columns."
        told = f"Labels by client: {len(table.labels)} labels, {_labels_held(table):g} per client in the median"
        figures.append(Figure("Labels of each client", plots.label_map(table, f"{key} labels", told), note))
    return figures


def _size_row(table: PartitionTable) -> dict[str, Any]:
    values = list(table.sizes.values())
    return {
        "clients": f"{len(values):,}",
        "records": f"{sum(values):,}",
        "smallest": min(values),
        "median": f"{np.median(values):g}",
        "largest": max(values),
    } | ({"labels per client (median)": f"{_labels_held(table):g} of {len(table.labels)}"} if table.counts else {})


def _labels_held(table: PartitionTable) -> float:
    return float(np.median([sum(count > 0 for count in row) for row in table.counts.values()]))


def _holding(table: PartitionTable | None, client: str) -> dict[str, Any]:
    if table is None or client not in table.sizes:
        return {"records": None, "label": ""}
    row = table.counts.get(client)
    if not row or not sum(row):
        return {"records": table.sizes[client], "label": ""}
    most = max(range(len(row)), key=lambda i: row[i])
    return {"records": table.sizes[client], "label": f"{table.labels[most]} ({row[most] / sum(row):.0%})"}


def _told(title: str, clients: Iterable[ClientValues]) -> str:
    medians = [number(float(np.median(list(c.values.values())))) for c in clients if c.values]
    return f"{title}: median {', '.join(medians)}"


def _choice(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return None
    options = ", ".join(f"{key} = {item}" for key, item in value.items() if key != "name")
    return f"{value.get('name')} ({options})" if options else str(value.get("name"))


def _ranges(rounds: Sequence[int]) -> str:
    """3, 4, 5, 9 as "3-5, 9"; long lists are cut."""
    spans: list[list[int]] = []
    for round in rounds:
        if spans and spans[-1][1] == round - 1:
            spans[-1][1] = round
        else:
            spans.append([round, round])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(texts[:20]) + (", …" if len(texts) > 20 else "")


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
