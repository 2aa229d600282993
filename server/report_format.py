"""How the report writes numbers, times and other people's text."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from coterie.server.report_plots import PALETTE, dash

MISSING = "–"
_PATTERNS = {"-": "", "--": "6 3", ":": "2 2.5", "-.": "8 2.5 2 2.5"}


def number(value: float | None) -> str:
    """Four digits after the point, or three that count where the number is very small or large."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.3g}"


def plain(value: Any) -> str:
    """A value of a run file."""
    return MISSING if value is None or value == "" else clip(str(value))


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def moment(seconds: float) -> str:
    """A point in time, in UTC: the page says the same wherever it is written."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def clip(text: str, length: int = 200) -> str:
    """Text from a client, cut, and without characters that do not print."""
    cut = text if len(text) <= length else text[: length - 1] + "…"
    return (
        "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in cut) or MISSING
    )


def stroke(style: int) -> str:
    """The dashes of a style, for an SVG line."""
    return _PATTERNS[dash(style)]


def hue(style: int) -> int:
    """The number of a style's colour among the page's own."""
    return style % len(PALETTE)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "number": number,
    "plain": plain,
    "duration": duration,
    "moment": moment,
    "clip": clip,
    "stroke": stroke,
    "hue": hue,
}
