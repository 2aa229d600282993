"""Ctrl-C, kill -9, a full disk: nothing is lost, and the end is that of an undisturbed run, bit by bit."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from coterie.server.store import Store

from ..commands import COTERIE, DEADLINE, wait_for

ROUNDS = 150


def options(task, rounds=ROUNDS):
    return [
        "--task",
        task,
        "--rounds",
        rounds,
        "--seed",
        3,
        "--set",
        "evaluation.every=25",
        "--set",
        "local.epochs=2",
        "--json",
        "--quiet",
    ]


def sha(done):
    return json.loads(done.stdout.splitlines()[-1])["model"]["sha256"]


def rounds_done(home):
    """Complete rounds of the newest run in the store; 0 before there is one."""
    if not (home / "coterie.db").exists():
        return 0
    runs = Store(home / "coterie.db").runs()
    return runs[0].rounds_done if runs else 0


def end_in_the_middle(cli, task, sig, *more):
    process = cli.start("simulate", *options(task), *more)
    wait_for(lambda: rounds_done(cli.home) >= 20, "20 rounds")
    process.send_signal(sig)
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


@pytest.fixture
def undisturbed(cli, tiny_task, tmp_path):
    return sha(cli("simulate", *options(tiny_task), "--home", tmp_path / "other"))


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_ends_as_if_undisturbed(cli, tiny_task, undisturbed, sig):
    code, _, err = end_in_the_middle(cli, tiny_task, sig)
    run = Store(cli.home / "coterie.db").find("last")
    assert code == 130
    assert f"interrupted: `coterie runs resume {run.id}`" in err
    assert "Traceback" not in err
    assert run.status == "interrupted"
    done = cli("runs", "resume", run.id, "--json", "--quiet")
    assert sha(done) == undisturbed


def test_a_killed_run_is_shown_as_killed_and_ends_as_if_undisturbed(cli, tiny_task, undisturbed):
    code, _, _ = end_in_the_middle(cli, tiny_task, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert "killed" in cli("runs", "list").stdout
    done = cli("runs", "resume", "last", "--workers", 1, "--json", "--quiet")
    assert sha(done) == undisturbed
    shown = json.loads(cli("runs", "show", "last", "--json").stdout)
    assert shown["status"] == "finished"
    assert list(shown["evaluations"]) == [str(round) for round in range(25, ROUNDS + 1, 25)]


def test_killed_twice_it_still_ends_as_if_undisturbed(cli, tiny_task, undisturbed):
    end_in_the_middle(cli, tiny_task, signal.SIGKILL)
    process = cli.start("runs", "resume", "last", "--quiet")
    before = rounds_done(cli.home)
    wait_for(lambda: rounds_done(cli.home) > before + 5, "5 more rounds")
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert sha(cli("runs", "resume", "last", "--json", "--quiet")) == undisturbed


def test_the_workers_of_a_killed_run_end_with_it(cli, tiny_task):
    process = cli.start("simulate", *options(tiny_task))
    wait_for(lambda: rounds_done(cli.home) >= 5, "5 rounds")
    workers = children_of(process.pid)
    assert workers
    process.kill()
    process.communicate(timeout=DEADLINE)
    wait_for(lambda: not any(is_running(pid) for pid in workers), "the workers' end", 10)


def children_of(pid):
    out = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in out.split()]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_a_run_that_is_going_on_cannot_be_resumed_beside_itself(cli, tiny_task):
    process = cli.start("simulate", *options(tiny_task, rounds=100_000))
    try:
        wait_for(lambda: rounds_done(cli.home) >= 1, "a round")
        refused = cli("runs", "resume", "last", code=1)
        assert f"is in use by process {process.pid}: wait for it or stop it" in refused.stderr
        assert "running" in cli("runs", "list").stdout
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def test_a_finished_run_is_not_run_again(cli, tiny_task):
    cli("simulate", *options(tiny_task, rounds=2))
    assert "is finished" in cli("runs", "resume", "last", code=1).stderr


FULL_DISK = """
set -e
mount -t tmpfs -o size=3m tmpfs "$COTERIE_HOME"
"$COTERIE" simulate "$@" >"$OUT/first" 2>&1 &
for i in $(seq 2000); do ls "$COTERIE_HOME"/runs/*/checkpoint.safetensors >/dev/null 2>&1 && break; sleep 0.05; done
dd if=/dev/zero of="$COTERIE_HOME/filler" bs=64k >/dev/null 2>&1 || true
wait $! && echo 0 >"$OUT/code" || echo $? >"$OUT/code"
rm "$COTERIE_HOME/filler"
"$COTERIE" runs resume last --json --quiet
"""


def test_a_full_disk_stops_the_run_with_the_remedy_and_loses_nothing(cli, tiny_task, tmp_path):
    may_mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(may_mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system in a namespace of its own")
    args = [
        "--task",
        tiny_task,
        "--set",
        "task.model=wide",
        "--rounds",
        "20",
        "--set",
        "local.epochs=1",
        "--seed",
        "3",
        "--json",
        "--quiet",
    ]
    expected = sha(cli("simulate", *args, "--home", tmp_path / "other"))
    cli.home.mkdir()
    env = cli.env | {"COTERIE": str(COTERIE), "OUT": str(tmp_path)}
    command = ["unshare", "-rm", "bash", "-c", FULL_DISK, "bash", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    said = (tmp_path / "first").read_text()
    assert (tmp_path / "code").read_text().strip() == "1", said
    assert "full" in said or "No space left on device" in said
    assert "then go on with `coterie runs resume`" in said
    assert "Traceback" not in said
    assert done.returncode == 0, done.stderr
    assert sha(done) == expected


def test_a_resume_refuses_records_that_have_changed(cli, tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("age,ill\n" + "".join(f"{i},{'yes' if i > 60 else 'no'}\n" for i in range(20, 100)))
    task = ["--task", "table", "--set", f"task.path={table}", "--set", "task.target=ill", "--clients", 4]
    process = cli.start("simulate", *task, "--rounds", 100_000, "--quiet")
    wait_for(lambda: rounds_done(cli.home) >= 3, "3 rounds")
    process.kill()
    process.communicate(timeout=DEADLINE)
    table.write_text(table.read_text().replace("99,yes", "99,no"))
    refused = cli("runs", "resume", "last", code=1)
    assert "the records of task 'table' are not those that run" in refused.stderr
