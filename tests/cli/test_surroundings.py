"""What surrounds the command: a closed pipe, a full device, no home, a directory that is gone, odd names."""

import json
import os
import signal
import subprocess
import sys

import pytest

from coterie.server.store import Store

from ..commands import COTERIE, DEADLINE, wait_for

RUN = ["--rounds", "3", "--set", "simulation.workers=1"]


def shell(cli, script, *args, cwd=None, **env):
    env = {key: value for key, value in (cli.env | env).items() if value is not None}
    command = ["bash", "-c", script, "bash", str(COTERIE), *map(str, args)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE, check=False)


def test_a_reader_that_leaves_does_not_end_the_run(cli, tiny_task):
    done = shell(cli, '"$@" | true', "simulate", "--task", tiny_task, "--rounds", 3)
    assert "Traceback" not in done.stderr
    assert Store(cli.home / "coterie.db").find("last").status == "finished"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_output_that_cannot_be_written_is_one_line(cli, tiny_task):
    done = shell(cli, '"$@" >/dev/full', "simulate", "--task", tiny_task, *RUN, "--json")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
    assert Store(cli.home / "coterie.db").find("last").status == "finished"


def test_a_directory_that_is_gone_is_one_line(cli, tmp_path):
    (tmp_path / "gone").mkdir()
    done = shell(cli, 'rmdir ../gone; "$@"', "simulate", "--task", "mine:make", *RUN, cwd=tmp_path / "gone")
    assert done.returncode == 1
    assert "error: the working directory is gone: change to one that exists" in done.stderr


def test_markup_in_a_name_is_text(cli, tiny_task):
    name = "[/red] [bold]mine[/bold] :smile:"
    cli("simulate", "--task", tiny_task, *RUN, "--name", name)
    assert name in cli("runs", "list").stdout
    assert name in cli("runs", "show", "last").stdout


def test_a_home_of_any_name(cli, tiny_task, tmp_path):
    home = tmp_path / "a?b #1"
    done = cli("simulate", "--task", tiny_task, *RUN, "--json", "--quiet", "--home", home)
    assert json.loads(done.stdout)["directory"].startswith(str(home))


def test_ctrl_c_while_it_is_still_starting_is_no_traceback(cli):
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "coterie.cli", "tasks"],
            env=cli.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        # The import of the command itself has begun.
        wait_for(lambda process=process: "click" in process.stderr.readline(), "the import of click", 60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130
        assert "Traceback" not in err


def test_help_names_every_strategy(cli):
    from coterie.core.run_config import STRATEGIES

    told = cli("simulate", "--help").stdout
    assert all(name in told for name in STRATEGIES)
