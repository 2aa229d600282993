"""What `coterie runs` says about runs that went well, badly or oddly, on a terminal and in a pipe."""

import csv
import io
import json
import os
import pty
import re
import subprocess

import pytest

from coterie.core.events import EventKind
from coterie.server.store import Store

from ..commands import COTERIE, DEADLINE
from ..server.test_report import CONFIG, Journal, whole_run

OTHER = CONFIG + "[local]\nlr = 0.5\n[local.optimizer]\nname = 'adam'\n[aggregator]\na_rather_long_option_name = 1\n"
ODD_NAME = "[/red] [bold]mine :smile:\nnext\x1b[31m\u202e"
READING = [["show", "x"], ["compare", "x"], ["report", "x"], ["export", "x"], ["resume", "x"]]


@pytest.fixture
def store(cli):
    store = Store(cli.home / "coterie.db")
    yield store
    store.close()


def strict_json(text):
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def terminal(cli, *args, columns=80):
    """What a person sees on a terminal, without its colours."""
    leader, follower = pty.openpty()
    env = cli.env | {"COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen([COTERIE, *map(str, args)], env=env, stdout=follower, stderr=follower)
    os.close(follower)
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:  # Linux says so when the other end has closed
        pass
    os.close(leader)
    assert process.wait(DEADLINE) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", b"".join(parts).decode()).replace("\r\n", "\n")


def refuse(journal, kind, rounds=3, **changes):
    for round in range(1, rounds + 1):
        journal.emit(EventKind.UPDATE_REFUSED, round, client_id="0", kind=kind, reason="4 of 10 values are NaN")
        journal.round(round, empty="0 usable replies, the quorum is 1", refused=1)
    journal.emit(EventKind.RUN_FAILED, rounds, reason="QuorumError: 3 rounds in a row")
    journal.commit()


def test_the_reason_of_a_failure_is_told_until_a_resume_got_over_it(cli, store):
    journal = Journal(store, "run")
    journal.start()
    journal.emit(EventKind.RUN_FAILED, 0, reason="the disk is full")
    journal.commit()
    assert strict_json(cli("runs", "show", "run", "--json").stdout)["reason"] == "the disk is full"
    assert re.search(r"^reason +the disk is full$", cli("runs", "show", "run").stdout, re.MULTILINE)
    journal.emit(EventKind.RUN_RESUMED, 0, from_round=0)
    journal.round(1)
    journal.finish(1)
    assert strict_json(cli("runs", "show", "run", "--json").stdout)["reason"] is None
    assert "the disk is full" not in cli("runs", "show", "run").stdout


def test_show_tells_losses_metrics_and_training_by_round(cli, store):
    whole_run(store, rounds=3, clients=5)
    shown = strict_json(cli("runs", "show", "last", "--json").stdout)
    assert shown["lost"] == {"norm": 6, "late": 3}
    assert shown["training"] == {"1": {"loss": 1.0}, "2": {"loss": 0.5}, "3": {"loss": 1 / 3}}
    assert shown["evaluations"]["2"] == {"accuracy": 1 - 1 / 3, "loss": 1.0}
    assert shown["metrics"] == {"accuracy": 0.9123, "loss": 0.3}
    assert shown["sha256"] == "ab12" * 16
    text = cli("runs", "show", "last").stdout
    assert re.search(r"^lost +6 x norm: norm 0 is too much\nlost +3 x late: the deadline is 3 s$", text, re.MULTILINE)
    assert re.search(r"^round 3 +accuracy 0\.7500  loss 0\.6667$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "attack", "hinted"),
    [("not_finite", "none", True), ("magnitude", "none", True), ("norm", "none", False), ("not_finite", "nan", False)],
)
def test_a_run_that_failed_because_training_diverged_says_what_to_try(cli, store, kind, attack, hinted):
    refuse(Journal(store, "run", attack=attack, config=OTHER), kind)
    text = cli("runs", "show", "run").stdout
    assert bool(re.search(r"^hint +training diverged: lower local\.lr = 0\.5$", text, re.MULTILINE)) == hinted


def test_a_loss_that_grew_to_no_number_is_hinted_at_and_is_null_in_json(cli, store):
    journal = Journal(store, "run", config=OTHER)
    journal.round(1)
    journal.emit(EventKind.EVALUATED, 2, metrics={"accuracy": 0.1, "loss": float("nan")})
    journal.emit(EventKind.RUN_FINISHED, 2, metrics={"accuracy": 0.1, "loss": float("inf")}, sha256="ab")
    journal.commit()
    assert "training diverged: lower local.lr" in cli("runs", "show", "run").stdout
    shown = strict_json(cli("runs", "show", "run", "--json").stdout)
    assert shown["evaluations"]["2"] == {"accuracy": 0.1, "loss": None}
    assert strict_json(cli("runs", "compare", "run", "--json").stdout)["metrics"]["loss"] == [None]
    assert strict_json(cli("runs", "list", "--json").stdout)[0]["metrics"]["loss"] is None


def test_settings_without_a_limit_are_valid_json(cli, store):
    for i, deadline in enumerate(("inf", "3.0")):
        text = CONFIG.replace("size = 20", f"size = 20\ndeadline = {deadline}")
        Journal(store, f"run-{i}", config=text).finish(0)
    compared = strict_json(cli("runs", "compare", "run-0", "run-1", "--json").stdout)
    assert compared["differences"] == {"cohort.deadline": [None, 3.0]}


def test_a_name_is_text_on_one_line(cli, store):
    text = CONFIG.replace('"{name}"', json.dumps(ODD_NAME))
    Journal(store, "run-1", name=ODD_NAME, config=text).finish(0)
    journal = Journal(store, "run-2")
    journal.emit(EventKind.EVALUATED, 1, metrics={"[/red]auc\n": 0.5})
    journal.emit(EventKind.RUN_FINISHED, 1, metrics={"[/red]auc\n": 0.5}, sha256="ab")
    journal.commit()
    name = "[/red] [bold]mine :smile:\\nnext\\x1b[31m\\u202e"
    listed = cli("runs", "list").stdout
    assert len(listed.splitlines()) == 3
    assert name in listed
    assert "[/red]auc\\n 0.5000" in listed
    assert name in cli("runs", "show", "run-1").stdout
    assert "[/red]auc\\n 0.5000" in cli("runs", "show", "run-2").stdout
    compared = cli("runs", "compare", "run-1", "run-2").stdout
    assert name in compared
    assert "[/red]auc\\n" in compared


def long_runs(store, count):
    ids = [f"20260101-101500-{i:04x}" for i in range(count)]
    for i, run in enumerate(ids):
        name = f"the pilot number {i} of those with a long name, in which every word counts"
        journal = Journal(store, run, rounds=100, name=name, strategy="trimmed_mean", config=OTHER if i else CONFIG)
        journal.finish(100)
    return ids


def test_a_terminal_of_80_columns_shows_whole_ids(cli, store):
    ids = long_runs(store, 3)
    listed = terminal(cli, "runs", "list")
    assert max(map(len, listed.splitlines())) <= 80
    assert all(run in listed for run in ids)
    assert "…" not in listed
    assert "0.9123" in listed
    for chosen in (ids[:1], ids[:2], ids):
        compared = terminal(cli, "runs", "compare", *chosen)
        assert max(map(len, compared.splitlines())) <= 80
        assert all(run in compared for run in chosen)
        assert "…" not in compared
        if len(chosen) > 1:
            assert "aggregator.a_rather_long_optio" in compared
            assert "local.optimizer.name" in compared
    assert re.search(rf"^local\.lr +{ids[0]}  - *\n +{ids[1]}  0\.5 *\n +{ids[2]}  0\.5 *$", compared, re.MULTILINE)


def test_a_pipe_gets_whole_lines(cli, store):
    ids = long_runs(store, 8)
    cli.env["COLUMNS"] = "80"
    row = next(line for line in cli("runs", "list").stdout.splitlines() if ids[0] in line)
    assert all(part in row for part in ("in which every word counts", "trimmed_mean", "finished", "accuracy 0.9123"))
    compared = cli("runs", "compare", *ids).stdout.splitlines()
    assert all(run in compared[0] for run in ids)
    assert any(re.match(r"aggregator\.a_rather_long_option_name  - +1 +1", line) for line in compared)
    assert len(compared) == 8


def test_a_path_is_on_one_line(cli, store):
    cli.home = cli.home.parent / ("deep " * 25).strip()
    Journal(Store(cli.home / "coterie.db"), "run").finish(0)
    cli.env["COTERIE_HOME"] = str(cli.home)
    assert f"{cli.home}/runs/run\n" in terminal(cli, "runs", "show", "run")


def table_of(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_export_writes_a_row_for_each_round(cli, store, tmp_path):
    journal = Journal(store, "run")
    journal.start()
    journal.emit(EventKind.CLIENT_FAILED, 1, client_id="0", kind="late", reason="too slow")
    journal.round(1, failed=1)
    journal.emit(
        EventKind.ROUND_FINISHED, 2, used=3, empty='=HYPERLINK("x"), "y"', metrics={"=a,\n": float("nan")},
        clock=2.5, seconds={"train": 0.25},
    )  # fmt: skip
    journal.emit(EventKind.CLIENT_FAILED, 3, client_id="0", kind="late", reason="of a round that was not finished")
    journal.emit(EventKind.RUN_INTERRUPTED, 3)
    journal.commit()
    text = cli("runs", "export", "run").stdout
    first, second = table_of(text)
    columns = "round used failed refused empty clock train.loss train.=a,\\n test.accuracy test.loss seconds.train"
    assert list(first) == [*columns.split(), "seconds.aggregate", "seconds.evaluate"]
    assert list(first.values()) == ["1", "10", "1", "0", "", "1.0", "1.0", "", "0.5", "2.0", "0.5", "0.01", "0.1"]
    assert list(second.values()) == ["2", "3", "0", "0", '\'=HYPERLINK("x"), "y"', "2.5", *[""] * 4, "0.25", "", ""]
    assert cli("runs", "export", "run", "--output", tmp_path / "h.csv").stdout == f"{tmp_path / 'h.csv'}\n"
    assert (tmp_path / "h.csv").read_text() == text
    refused = cli("runs", "export", "run", "--output", tmp_path / "absent" / "h.csv", code=1)
    assert f"cannot write the history {tmp_path}/absent/h.csv: No such file or directory" in refused.stderr


def test_export_of_a_run_without_rounds_is_its_header(cli, store):
    Journal(store, "run")
    assert cli("runs", "export", "run").stdout == "round,used,failed,refused,empty,clock\n"


def test_export_has_help_with_an_example(cli):
    assert "Example: coterie runs export last" in cli("runs", "export", "--help").stdout


@pytest.mark.parametrize("args", READING, ids=lambda args: args[0])
def test_a_command_that_only_reads_makes_no_home(cli, args):
    refused = cli("runs", *args, code=1)
    said = f"there is no run 'x': no runs in {cli.home} yet: coterie simulate starts one"
    assert said in refused.stderr
    assert not cli.home.exists()


def test_a_home_without_runs_is_an_empty_list(cli):
    assert cli("runs", "list").stdout == f"no runs in {cli.home} yet: coterie simulate starts one\n"
    assert cli("runs", "list", "--json").stdout == "[]\n"
    assert not cli.home.exists()
