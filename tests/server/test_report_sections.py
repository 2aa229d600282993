"""Which figures a report has, and what they say beside the drawing."""

import pytest

from coterie.core.events import EventKind
from coterie.server.report_data import read_story
from coterie.server.report_sections import client_figures, curve_figures, metric_rows
from coterie.server.store import Store

from .test_report import Journal


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "coterie.db")
    yield store
    store.close()


def stories(store, *ids):
    return [(run, read_story(store.find(run), store.events(run))) for run in ids]


def test_the_losses_are_drawn_however_many_metrics_there_are(store):
    journal = Journal(store, "run")
    for round in (1, 2):
        journal.round(round)
        metrics = {f"metric_{i}": 0.5 for i in range(12)} | {"loss": 2 / round}
        journal.emit(EventKind.EVALUATED, round, metrics=metrics)
    journal.finish(2)
    runs = stories(store, "run")
    titles = [figure.title for figure in curve_figures(runs)]
    assert titles[-2:] == ["Held-out loss", "Mean training loss of the cohort"]
    assert len(titles) == 8
    assert metric_rows(runs)[-1] == {"run": "run", "metric": "loss", "picked": [(2.0, 1), (1.0, 2), (1.0, 2)]}


def test_a_loss_that_is_the_headline_is_drawn_once(store):
    journal = Journal(store, "run")
    journal.emit(EventKind.EVALUATED, 1, metrics={"loss": 0.5})
    journal.finish(1)
    assert [figure.title for figure in curve_figures(stories(store, "run"))] == ["Held-out loss"]


@pytest.mark.parametrize("count", [3, 30])
def test_the_figure_of_the_clients_says_which_records_they_were_measured_on(store, count):
    for run in ("run-1", "run-2"):
        journal = Journal(store, run)
        journal.round(1)
        per_client = {str(i): {"accuracy": i / count} for i in range(count)}
        journal.emit(EventKind.CLIENTS_EVALUATED, 1, per_client=per_client, on="training records")
        journal.finish(1)
    for runs in (("run-1",), ("run-1", "run-2")):
        (figure,) = client_figures(stories(store, *runs))
        assert figure.note.startswith("Measured on their training records.")
