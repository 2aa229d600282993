"""A report: one HTML page about one run, or comparing several.

The page is whole in itself: no script, no font, no image or style from elsewhere. The same runs give the same bytes.
What clients chose (ids, reasons, names of metrics) is escaped, cut and counted, never trusted.
"""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coterie.core.events import Event
from coterie.server import report_format
from coterie.server.report_data import PHASES, RunStory, read_story
from coterie.server.report_labels import labels
from coterie.server.report_sections import (
    client_figures,
    curve_figures,
    difference_rows,
    empty_rounds,
    facts,
    lost_figures,
    lost_rows,
    metric_rows,
    partition_figures,
    phase_seconds,
    quantile_rows,
    time_figures,
    worst_rows,
)
from coterie.server.store import RunRecord


def write_report(runs: Sequence[tuple[RunRecord, Sequence[Event]]], path: Path) -> None:
    """Write the page about `runs`, each with its events as the store has them, to `path`.

    Raises OSError when the file cannot be written; an older report then stays as it was.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    page = _page([read_story(record, events) for record, events in runs])
    part = path.with_name(path.name + ".part")
    try:
        # A client's text may hold halves of surrogate pairs, which UTF-8 has no bytes for.
        part.write_bytes(page.encode("utf-8", "replace"))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _page(stories: Sequence[RunStory]) -> str:
    names = labels(stories)
    runs = list(zip(names, stories, strict=True))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= report_format.FILTERS
    return environment.get_template("report.html.j2").render(
        title=names[0] if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        runs=runs,
        several=len(runs) > 1,
        facts=[facts(story) for story in stories],
        metric_names=list(dict.fromkeys(name for story in stories for name in story.metrics)),
        differences=difference_rows(stories),
        curves=curve_figures(runs),
        metric_rows=metric_rows(runs),
        empty=empty_rounds(runs),
        clients=client_figures(runs),
        quantiles=quantile_rows(runs),
        worst=worst_rows(runs),
        lost=lost_figures(runs),
        lost_rows=lost_rows(runs),
        partitions=partition_figures(runs),
        time=time_figures(runs),
        phases=[*PHASES, "other"],
        phase_seconds=[phase_seconds(story) for story in stories],
    )
