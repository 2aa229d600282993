"""The report's figures: matplotlib to inline SVG, the same bytes for the same numbers.

Colours leave here as CSS variables, so that one figure serves a light and a dark page; letters stay letters. Figures
are drawn at the width of a phone's screen and scaled up, never down, so that their text stays readable.

Palette: Okabe and Ito 2008, https://jfly.uni-koeln.de/color/
"""

import io
import math
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from coterie.server.report_data import ClientValues, Curve, PartitionTable

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
_INK, _GRID = "#454545", "#cfcfcf"
_VARIABLES = {color: f"var(--c{i})" for i, color in enumerate(PALETTE)} | {_INK: "var(--ink)", _GRID: "var(--grid)"}

WIDTH = 4.6
NAMED = 20
"""Up to so many clients each have a bar with their name; more become a histogram."""

MOST_COLUMNS = 400
"""Columns of a heat map, and steps along the rounds of a stack: beyond them neighbours are averaged."""

_MOST_LABELS = 100
_MOST_POINTS = 25

_lock = threading.Lock()
"""matplotlib's settings are global to the process."""


@dataclass(frozen=True)
class Line:
    """One curve and how it looks: style is its number in the legend. marks: rounds to mark at the bottom."""

    curve: Curve
    style: int
    marks: Sequence[int] = ()


def color(style: int) -> str:
    """The style's colour; the palette comes round again with another dash."""
    return PALETTE[style % len(PALETTE)]


def dash(style: int) -> str:
    """The style's dash: neighbours differ in it as well, for print and for colour-blind readers."""
    return DASHES[(style + style // len(PALETTE)) % len(DASHES)]


def curves(lines: Sequence[Line], name: str, label: str) -> str | None:
    """Values by round. None when there is nothing to draw. A range beyond two decades gets a logarithmic axis."""
    values = np.array([value for line in lines for value in line.curve.values() if math.isfinite(value)])
    if not len(values):
        return None
    figure, axes = _figure()
    for line in lines:
        rounds, points = _points(line.curve)
        few = np.isfinite(points).sum() <= _MOST_POINTS
        axes.plot(rounds, points, dash(line.style), color=color(line.style), marker="o" if few else "", markersize=3.5)
        marks = line.marks
        bottom = axes.get_xaxis_transform()
        axes.plot(marks, [0.03] * len(marks), "x", color=color(line.style), markersize=5, transform=bottom)
    if values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")
        axes.set_ylabel("log scale")
    _by_round(axes)
    return _svg(figure, name, label)


def stack(layers: Sequence[tuple[Curve, int]], name: str, label: str, unit: str = "") -> str | None:
    """Amounts by round, one on the other: pairs of (amounts, style)."""
    rounds = sorted({round for amounts, _ in layers for round in amounts})
    if not rounds:
        return None
    figure, axes = _figure()
    first, last = rounds[0], rounds[-1]
    step = math.ceil((last - first + 1) / MOST_COLUMNS)
    edges = np.arange(first, last + step + 1, step) - 0.5
    below = np.zeros(len(edges) - 1)
    for amounts, style in layers:
        column = np.zeros(len(below))
        for round, value in amounts.items():
            column[(round - first) // step] += value / step
        # One outline for all rounds: bars would be a shape each.
        axes.stairs(below + column, edges, baseline=below, fill=True, color=color(style), linewidth=0)
        below = below + column
    axes.set_ylim(0, max(below.max(), 1e-9) * 1.05)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylabel(unit)
    if unit == "clients":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _by_round(axes)
    return _svg(figure, name, label)


def spread(clients: ClientValues, style: int, name: str, label: str) -> str | None:
    """How a metric lies over the clients: a bar for each of a few, a histogram of many with its median and tenths."""
    values = np.array(list(clients.values.values()))
    if not len(values):
        return None
    if len(values) <= NAMED:
        return _bars(clients.values, style, clients.metric, name, label)
    figure, axes = _figure()
    _histogram(axes, values, style)
    for quantile, line in ((0.1, ":"), (0.5, "-"), (0.9, ":")):
        axes.axvline(float(np.quantile(values, quantile)), color=_INK, linestyle=line, linewidth=1.2)
    _name_axes(axes, clients.metric, "clients")
    return _svg(figure, name, label)


def quantiles(runs: Sequence[tuple[ClientValues, int]], name: str, label: str) -> str | None:
    """Several runs' spread: the value that each share of the clients stays below."""
    if not any(clients.values for clients, _ in runs):
        return None
    figure, axes = _figure()
    for clients, style in runs:
        if clients.values:
            share = np.linspace(0, 1, 101)
            axes.plot(share * 100, np.quantile(list(clients.values.values()), share), dash(style), color=color(style))
    _name_axes(axes, "% of the clients", "")
    return _svg(figure, name, label)


def sizes(partition: PartitionTable, name: str, label: str) -> str:
    """Records per client."""
    if len(partition.sizes) <= NAMED:
        return _bars(partition.sizes, 0, "records", name, label)
    figure, axes = _figure()
    _histogram(axes, np.array(list(partition.sizes.values()), dtype=float), 0)
    _name_axes(axes, "records", "clients")
    return _svg(figure, name, label)


def label_map(partition: PartitionTable, name: str, label: str) -> str:
    """Share of each label in each client's records: clients across, sorted by their most frequent label."""
    counts = np.array(list(partition.counts.values()), dtype=float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    shares = shares[order]
    rows = np.sort(np.argsort(-counts.sum(0), kind="stable")[:_MOST_LABELS])
    columns = np.array([part.mean(0) for part in np.array_split(shares, min(len(shares), MOST_COLUMNS))])
    figure, axes = _figure(0.8 + 0.16 * min(max(len(rows), 4), 14))
    # From nothing to full colour, so that the page's own background is the zero.
    colors = LinearSegmentedColormap.from_list("share", [(0, 0.447, 0.698, 0.0), (0.0, 0.447, 0.698, 1.0)])
    image: NDArray[Any] = columns[:, rows].T
    extent = (0.0, float(len(shares)), len(rows) - 0.5, -0.5)
    axes.imshow(image, cmap=colors, vmin=0, vmax=1, aspect="auto", interpolation="none", extent=extent)
    axes.grid(visible=False)
    every = math.ceil(len(rows) / 14)
    names = [_short(partition.labels[int(row)], 14) for row in rows[::every]]
    axes.set_yticks(range(0, len(rows), every), names, parse_math=False)
    if len(shares) <= NAMED:
        clients = list(partition.counts)
        ids = [_short(clients[int(i)], 14) for i in order]
        rotation = 0 if len(ids) * max(map(len, ids)) < 50 else 90
        axes.set_xticks(np.arange(len(ids)) + 0.5, ids, rotation=rotation, parse_math=False)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(length=0)
    _name_axes(axes, "clients", "")
    return _svg(figure, name, label)


def _bars(values: Mapping[str, float], style: int, unit: str, name: str, label: str) -> str:
    ordered = sorted(values.items(), key=lambda item: (item[1], item[0]), reverse=True)
    figure, axes = _figure(max(1.2, 0.6 + 0.19 * len(ordered)))
    axes.barh(range(len(ordered)), [value for _, value in ordered], height=0.7, color=color(style))
    axes.set_yticks(range(len(ordered)), [_short(client, 24) for client, _ in ordered], parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    _name_axes(axes, unit, "")
    return _svg(figure, name, label)


def _histogram(axes: Axes, values: NDArray[np.float64], style: int) -> None:
    low, high = float(values.min()), float(values.max())
    if (values == np.round(values)).all() and abs(values).max() < 1e9:
        # Bins as wide as a whole number of records: others would catch unequal numbers of values and show a comb.
        width = math.ceil((high - low + 1) / 24)
        heights, edges = np.histogram(values, np.arange(low - 0.5, high + width + 0.5, width))
    else:
        pad = max(0.01, abs(high) / 100) if high - low < 1e-9 * abs(high) else 0.0
        heights, edges = np.histogram(values, 24, (low - pad, high + pad))
    axes.stairs(heights, edges, fill=True, color=color(style), linewidth=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_ylim(bottom=0)


def _points(curve: Curve) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ordered = sorted(curve.items())
    step = math.ceil(len(ordered) / 1000)
    kept = ordered[::step] + ([ordered[-1]] if step > 1 and (len(ordered) - 1) % step else [])
    return np.array([round for round, _ in kept]), np.array([value for _, value in kept])


def _by_round(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.set_xlabel("round")


def _name_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(_short(x, 40), parse_math=False)
    axes.set_ylabel(_short(y, 40), parse_math=False)


def _figure(height: float = 2.5) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
    axes: Axes = figure.add_subplot(facecolor="none")
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9.5, length=3)
    axes.xaxis.label.set(color=_INK, size=9.5)
    axes.yaxis.label.set(color=_INK, size=9.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    return figure, axes


def _short(text: str, length: int) -> str:
    """Text from a client, cut, without what a font cannot draw or an SVG may not hold."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an element of a page. `name` keeps its ids apart from the other figures' on the page."""
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with _lock, rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter without a glyph: the browser has other fonts
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    referenced = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referenced else "", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: _VARIABLES.get(found[0], found[0]), text)
    text = re.sub(r"\n\s*", "\n", text)
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(label)}">{body}'
