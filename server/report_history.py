"""A run's rounds as a table, one row for each, for a spreadsheet or a program."""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping

from coterie.server.report_data import PHASES, Curve, RunStory

_FORMULA = ("=", "+", "-", "@")
"""What a spreadsheet takes for the beginning of a formula."""


def history_csv(story: RunStory) -> str:
    """CSV with a row per round; what is not known is empty.

    Columns: round, used, failed, refused, empty, clock, then train.<metric>, test.<metric> and seconds.<phase>.
    """
    lost = {how: Counter(loss.round for loss in story.lost if loss.how == how) for how in ("failed", "refused")}
    phases = dict.fromkeys([*(phase for phase in PHASES if phase in story.seconds), *story.seconds])
    curves: dict[str, Curve] = {
        **_columns("train", story.training),
        **_columns("test", story.held_out),
        **_columns("seconds", {phase: story.seconds[phase] for phase in phases}),
    }
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["round", "used", "failed", "refused", "empty", "clock", *map(_text, curves)])
    for round in sorted({*story.used, *(round for curve in story.held_out.values() for round in curve)}):
        done = round in story.used
        counts = [story.used[round], lost["failed"][round], lost["refused"][round]] if done else ["", "", ""]
        numbers = [_number(curve.get(round)) for curve in (story.clocks, *curves.values())]
        writer.writerow([round, *counts, _text(story.empty.get(round, "")), *numbers])
    return file.getvalue()


def visible(text: str) -> str:
    """Text from anyone on one line: characters that do not print become their escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _columns(prefix: str, curves: Mapping[str, Curve]) -> dict[str, Curve]:
    return {f"{prefix}.{name}": curve for name, curve in curves.items()}


def _text(text: str) -> str:
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _number(value: float | None) -> float | str:
    return "" if value is None or not math.isfinite(value) else value
