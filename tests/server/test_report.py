"""What a report promises: whole in itself, the same for the same run, and no client can break it or write into it."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from coterie.core.events import Event, EventKind
from coterie.server.report import write_report
from coterie.server.store import Store

CONFIG = """name = "{name}"
strategy = "{strategy}"
seed = 7
rounds = {rounds}

[task]
name = "mnist"

[cohort]
size = 20

[simulation]
clients = 200
attackers = {attackers}

[simulation.attack]
name = "{attack}"
"""

HOSTILE = "<script>alert('x')</script>\"><img src=http://evil.example/a.png onerror=alert(1)>"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "coterie.db")
    yield store
    store.close()


@pytest.fixture
def report(store, tmp_path):
    """Writes the report of runs of the store and returns its text."""

    def write(*ids: str) -> str:
        path = tmp_path / "report.html"
        write_report([(record, store.events(record.id)) for record in map(store.find, ids)], path)
        return path.read_text(encoding="utf-8")

    return write


class Journal:
    """Adds events to a run of the store, a second after one another."""

    def __init__(self, store: Store, run_id: str, rounds=10, name="", strategy="fedavg", attack="none", config=CONFIG):
        attackers = 0.1 if attack != "none" else 0.0
        text = config.format(name=name, strategy=strategy, rounds=rounds, attack=attack, attackers=attackers)
        store.create_run(run_id, name=name, task="mnist", strategy=strategy, rounds=rounds, config=text)
        self._store, self._id, self._seq, self._pending = store, run_id, 0, []

    def emit(self, kind: EventKind, round: int, /, **data) -> None:
        self._seq += 1
        self._pending.append(Event(self._seq, 1_800_000_000.0 + self._seq, kind, round, data))

    def commit(self) -> None:
        self._store.append(self._id, self._pending)
        self._pending = []

    def start(self, clients=("0", "1", "2"), labels=("cat", "dog")) -> None:
        sizes = {client: 10 + i % 7 for i, client in enumerate(clients)}
        partition = {"sizes": sizes}
        if labels:
            counts = {client: [size - i % 5, i % 5] for i, (client, size) in enumerate(sizes.items())}
            partition |= {"labels": list(labels), "counts": counts}
        self.emit(EventKind.RUN_STARTED, 0, num_clients=len(clients), num_parameters=10, partition=partition)

    def round(self, round: int, accuracy: float | None = None, empty="", failed=0, refused=0) -> None:
        seconds = {"train": 0.5, "aggregate": 0.01}
        accuracy = 1 - 1 / (round + 1) if accuracy is None else accuracy
        self.emit(
            EventKind.ROUND_FINISHED, round, used=10, examples=200, failed=failed, refused=refused, empty=empty,
            metrics={"loss": 1 / round}, clock=float(round), seconds=seconds,
        )  # fmt: skip
        self.emit(EventKind.EVALUATED, round, metrics={"accuracy": accuracy, "loss": 2 / round}, seconds=0.1)

    def clients(self, round: int, values) -> None:
        per_client = {client: {"accuracy": value, "loss": 0.1} for client, value in values.items()}
        self.emit(
            EventKind.CLIENTS_EVALUATED, round, metrics={}, per_client=per_client, failed={}, on="held-out records",
            seconds=0.2,
        )  # fmt: skip

    def finish(self, rounds: int) -> None:
        metrics = {"accuracy": 0.9123, "loss": 0.3}
        self.emit(EventKind.RUN_FINISHED, rounds, metrics=metrics, sha256="ab12" * 16, rounds=rounds, clock=9.0)
        self.commit()


def whole_run(store, run_id="20260101-a", rounds=10, clients=200, **changes) -> Journal:
    journal = Journal(store, run_id, rounds, **changes)
    ids = [f"site-{i}" for i in range(clients)]
    journal.start(ids)
    for round in range(1, rounds + 1):
        for i in range(2):
            client = ids[(round + i) % clients]
            journal.emit(EventKind.UPDATE_REFUSED, round, client_id=client, kind="norm", reason=f"norm {i} is too much")
        journal.emit(EventKind.CLIENT_FAILED, round, client_id=ids[0], kind="late", reason="the deadline is 3 s")
        journal.round(round, failed=1, refused=2)
    journal.clients(rounds, {client: i / clients for i, client in enumerate(ids)})
    journal.finish(rounds)
    return journal


class _Page(HTMLParser):
    """Element names and attributes, and the text a reader sees, with one space between words and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._words: list[str] = []
        self.feed(text)
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("bdi", "code", "strong", "span"):
            self._words.append(" ")

    def handle_data(self, data):
        if self.elements[-1:] and self.elements[-1][0] != "style":
            self._words.append(data)


def test_the_page_needs_nothing_from_elsewhere(store, report):
    whole_run(store)
    page = _Page(report("20260101-a"))
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name.startswith("xmlns"):
                continue
            assert not name.startswith("on"), f"{tag} {name}"
            assert "http:" not in (value or ""), f"{tag} {name}={value}"
            assert "https:" not in (value or ""), f"{tag} {name}={value}"
            if name in ("src", "href", "xlink:href", "data"):
                assert value.startswith(("#", "data:image/png;base64,")), f"{tag} {name}={value[:60]}"


def test_the_page_says_what_was_run_and_how_it_ended(store, report):
    whole_run(store, name="a pilot")
    text = _Page(report("20260101-a")).text
    for expected in (
        "a pilot",
        "20260101-a",
        "mnist",
        "fedavg",
        "0.9123",
        "ab12" * 16,
        "10 / 10",
        "10.0 s",
        "seed = 7",
    ):
        assert expected in text
    assert "coterie simulate run.toml" in text
    assert "held-out records" in text


def test_each_figure_has_a_description_and_letters_that_can_be_searched(store, report):
    whole_run(store)
    figures = [attributes for tag, attributes in _Page(report("20260101-a")).elements if tag == "svg"]
    drawings = [attributes for attributes in figures if attributes.get("role") == "img"]
    assert len(drawings) == 8
    assert all(attributes["aria-label"] for attributes in drawings)
    assert "cat" in _Page(report("20260101-a")).text
    assert ">round</text>" in report("20260101-a")


def test_the_same_run_gives_the_same_bytes(store, report):
    whole_run(store)
    assert report("20260101-a") == report("20260101-a")


def test_ids_on_the_page_are_unique_and_every_reference_has_its_target(store, report):
    whole_run(store)
    whole_run(store, "20260102-b", attack="nan")
    page = report("20260101-a", "20260102-b")
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:url\(#|xlink:href="#)([^")]+)', page))
    assert references
    assert references <= set(ids)


def test_what_clients_write_is_text_and_never_markup(store, report):
    journal = Journal(store, "run", name=HOSTILE)
    journal.start([HOSTILE, "$\\frac{", "plain", ""], labels=[HOSTILE, "$x_{"])
    journal.emit(EventKind.CLIENT_FAILED, 1, client_id=HOSTILE, kind=HOSTILE, reason=HOSTILE)
    journal.emit(EventKind.UPDATE_REFUSED, 1, client_id="\ud800\x00\u202e", kind="norm", reason="r" * 1_000_000)
    journal.round(1, empty=HOSTILE)
    journal.emit(EventKind.EVALUATED, 2, metrics={HOSTILE: 0.5, "$\\frac{": 0.1}, seconds=0.1)
    journal.clients(2, {HOSTILE: 0.2, "$\\frac{": 0.5, "plain": 0.9})
    journal.finish(2)
    text = report("run")
    page = _Page(text)
    assert len(text) < 300_000
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "<script>alert('x')</script>" in page.text
    assert not any(character in text for character in "\x00\u202e")


def test_several_runs_lie_over_each_other_under_labels_that_tell_them_apart(store, report):
    whole_run(store, "run-1", name="study", attack="sign_flip")
    whole_run(store, "run-2", name="study", attack="sign_flip", strategy="trimmed_mean")
    whole_run(store, "run-3", name="study", strategy="trimmed_mean")
    page = report("run-1", "run-2", "run-3")
    text = _Page(page).text
    assert "Comparison of 3 runs" in text
    for label in (
        "fedavg, attack sign_flip, 10% attackers",
        "trimmed_mean, attack sign_flip, 10% attackers",
        "trimmed_mean, no attack",
    ):
        assert f" {label}" in text
    accuracy = next(part for part in page.split("<figure>") if "Held-out accuracy" in part)
    for i in range(3):
        assert f"stroke: var(--c{i})" in accuracy
    assert all(f"coterie runs resume run-{i}" not in text for i in (1, 2, 3))


def test_runs_that_differ_in_nothing_are_told_apart_by_their_ids(store, report):
    whole_run(store, "run-1")
    whole_run(store, "run-2")
    text = _Page(report("run-1", "run-2")).text
    assert " run-1" in text
    assert " run-2" in text


def test_seven_runs_keep_seven_looks(store, report):
    for i in range(7):
        whole_run(store, f"run-{i}", name=f"try {i}", rounds=3, clients=3)
    page = report(*[f"run-{i}" for i in range(7)])
    legend = page[page.index('class="legend"') :]
    legend = legend[: legend.index("</ul>")]
    looks = re.findall(r'stroke:var\((--c\d)\)" stroke-dasharray="([^"]*)"', legend)
    assert len(looks) == len(set(looks)) == 7


def test_refusals_and_failures_are_counted_by_kind_with_an_example_and_the_clients(store, report):
    whole_run(store)
    text = _Page(report("20260101-a")).text
    assert re.search(r"refused: norm 20 11: site-10, site-2, .*norm 0 is too much", text)
    assert re.search(r"failed: late 10 1: site-0 the deadline is 3 s", text)


def test_the_worst_clients_are_named_the_worst_first(store, report):
    whole_run(store)
    text = _Page(report("20260101-a")).text
    places = [text.index(f"site-{i}", text.index("Worst accuracy")) for i in range(10)]
    assert places == sorted(places)
    assert "site-10" not in text[text.index("Worst accuracy") : text.index("The clients' own values")]


def test_for_a_loss_the_worst_clients_are_those_with_the_largest(store, report):
    journal = Journal(store, "run")
    journal.emit(EventKind.EVALUATED, 1, metrics={"loss": 0.4}, seconds=0.1)
    per_client = {f"site-{i}": {"loss": float(i)} for i in range(30)}
    journal.emit(EventKind.CLIENTS_EVALUATED, 1, metrics={}, per_client=per_client, failed={}, on="training records")
    journal.finish(1)
    text = _Page(report("run")).text
    assert text.index("site-29") < text.index("site-20")
    assert "site-19" not in text


@pytest.mark.parametrize("labels", [("cat", "dog"), ()], ids=["labels", "no labels"])
def test_a_run_that_failed_before_its_first_round_has_a_page(store, report, labels):
    journal = Journal(store, "run")
    journal.start(labels=labels)
    journal.emit(EventKind.RUN_FAILED, 0, reason="TaskError: the archive is locked")
    journal.commit()
    text = _Page(report("run")).text
    assert "the archive is locked" in text
    assert "No round has been measured." in text
    assert "coterie runs resume run" in text


def test_a_run_without_any_event_has_a_page_even_with_a_run_file_that_cannot_be_read(store, report):
    Journal(store, "run", config="not toml")
    assert "The model has not been measured on the clients." in _Page(report("run")).text


def test_missing_numbers_leave_gaps(store, report):
    journal = Journal(store, "run")
    journal.start()
    for round in range(1, 6):
        journal.round(round, float("nan") if round % 2 else 0.5)
    journal.emit(EventKind.EVALUATED, 6, metrics={"accuracy": None, "loss": float("inf")}, seconds=None)
    journal.emit(EventKind.ROUND_FINISHED, 6)
    journal.clients(6, {"0": float("nan"), "1": 1e300, "2": "0.5"})
    journal.commit()
    text = _Page(report("run")).text
    assert "0.5000 (2)" in text
    assert not re.search(r"\b(nan|inf|None)\b", text)


@pytest.mark.parametrize("values", [[0.5] * 50, [1e99] * 50, [0.0, 1.0] * 25, [-1e99, 1e99] * 25, [1e-12] * 50])
def test_any_spread_over_the_clients_can_be_drawn(store, report, values):
    journal = Journal(store, "run")
    journal.round(1, max(values))
    journal.round(2, min(values))
    journal.clients(1, {f"site-{i}": value for i, value in enumerate(values)})
    journal.finish(1)
    assert "Clients by accuracy" in report("run")


def test_rounds_that_kept_the_model_are_listed_and_marked(store, report):
    journal = Journal(store, "run")
    journal.start()
    for round in range(1, 9):
        journal.round(round, empty="3 usable replies, the quorum is 10" if round in (2, 3, 4, 7) else "")
    journal.finish(8)
    text = _Page(report("run")).text
    assert "Rounds that kept the model: 2-4, 7." in text
    assert "3 usable replies, the quorum is 10" in text
    assert "Crosses at the bottom" in text


def test_what_a_resume_did_again_counts_once(store, report):
    journal = Journal(store, "run")
    journal.start()
    for round in (1, 2, 3):
        journal.emit(EventKind.CLIENT_FAILED, round, client_id="0", kind="late", reason="too slow")
        journal.round(round)
    journal.emit(EventKind.RUN_INTERRUPTED, 3)
    journal.emit(EventKind.RUN_RESUMED, 1, from_round=1)
    for round in (2, 3):
        journal.emit(EventKind.CLIENT_FAILED, round, client_id="0", kind="late", reason="too slow")
        journal.round(round)
    journal.finish(3)
    text = _Page(report("run")).text
    assert "failed: late 3 1: 0" in text
    assert "resumed after round 1" in text


def test_time_between_an_interruption_and_its_resume_is_no_wall_time(store, report):
    journal = Journal(store, "run")
    journal.start()
    journal.emit(EventKind.RUN_INTERRUPTED, 0)
    journal._seq += 5000
    journal.emit(EventKind.RUN_RESUMED, 0, from_round=0)
    journal.round(1)
    journal.finish(1)
    assert "wall time 4.0 s" in _Page(report("run")).text


def test_a_failure_that_a_resume_got_over_is_no_longer_told(store, report):
    journal = Journal(store, "run")
    journal.start()
    journal.emit(EventKind.RUN_FAILED, 0, reason="the disk is full")
    journal.emit(EventKind.RUN_RESUMED, 0, from_round=0)
    journal.round(1)
    journal.finish(1)
    assert "the disk is full" not in _Page(report("run")).text


def test_sixty_rounds_of_two_hundred_clients_stay_small(store, report):
    whole_run(store, rounds=60)
    assert len(report("20260101-a").encode()) < 250_000


def test_ten_thousand_clients_and_two_thousand_rounds_stay_small(store, report):
    whole_run(store, rounds=2000, clients=10_000)
    page = report("20260101-a")
    assert len(page.encode()) < 500_000
    assert "averaged into 400 columns" in page


def test_a_report_that_cannot_be_written_leaves_no_part_behind(store, tmp_path):
    whole_run(store, rounds=1, clients=2)
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_report([(store.find("20260101-a"), store.events("20260101-a"))], target)
    assert not list(tmp_path.glob("*.part"))


def test_the_server_package_does_not_load_the_drawing_libraries():
    code = (
        "import sys, coterie.server.store, coterie.server.run_directory;"
        "print([name for name in ('matplotlib', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
