"""The command line: what it prints, the files it leaves, its exit codes, and that errors are one clear line."""

import json
import re
import sys
from pathlib import Path

import pytest

QUICK = ["--rounds", 2, "--quiet"]


def last_json(done):
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_prints_its_result_and_leaves_its_files(cli, tiny_task):
    done = cli("simulate", "--task", tiny_task, "--rounds", 3)
    assert "round 3/3  accuracy 0." in done.stdout
    assert re.search(r"accuracy +0\.\d{4}", done.stdout)
    assert re.search(r"weights +sha256 [0-9a-f]{64}", done.stdout)
    run = re.search(r"next: coterie runs report (\S+)", done.stdout).group(1)
    files = {path.name for path in (cli.home / "runs" / run).iterdir()}
    assert {"run.toml", "model.safetensors", "checkpoint.safetensors", "workers.log"} <= files


def test_json_is_the_last_line_and_progress_goes_to_stderr(cli, tiny_task):
    done = cli("simulate", "--task", tiny_task, "--rounds", 3, "--json")
    result = last_json(done)
    assert len(done.stdout.splitlines()) == 1
    assert "round 3/3" in done.stderr
    assert result["status"] == "finished"
    assert set(result["metrics"]) == {"accuracy", "loss"}
    assert re.fullmatch(r"[0-9a-f]{64}", result["model"]["sha256"])
    assert Path(result["model"]["file"]).exists()


def test_set_reaches_any_key_and_options_win_over_the_file(cli, tiny_task, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'task = "{tiny_task}"\nrounds = 50\n[local]\nlr = 0.5\n')
    settings = ["--set", "simulation.workers=1", "--set", "local.optimizer={name='adam'}", "--set", "name=mine"]
    settings += ["--set", "simulation.attack.name=nan", "--set", "simulation.attackers=0.2"]
    result = last_json(cli("simulate", file, *QUICK, *settings, "--json"))
    text = (Path(result["directory"]) / "run.toml").read_text()
    for line in (
        "rounds = 2",
        "lr = 0.5",
        "workers = 1",
        'name = "adam"',
        "beta1 = 0.9",
        'name = "mine"',
        'name = "nan"',
        'name = "natural"',
    ):
        assert line in text


def test_list_show_compare_and_report(cli, tiny_task, tmp_path):
    runs = [
        last_json(cli("simulate", "--task", tiny_task, *QUICK, "--json", "--strategy", s, "--name", f"with {s}"))["run"]
        for s in ("fedavg", "trimmed_mean")
    ]
    listed = cli("runs", "list").stdout
    assert all(run in listed for run in runs)
    assert [row["run"] for row in json.loads(cli("runs", "list", "--json").stdout)] == runs[::-1]
    shown = cli("runs", "show", runs[0]).stdout
    assert "with fedavg" in shown
    assert "2 of 2" in shown
    compared = json.loads(cli("runs", "compare", *runs, "--json").stdout)
    assert compared["differences"]["aggregator.name"] == ["mean", "trimmed_mean"]
    assert len(compared["metrics"]["accuracy"]) == 2
    assert "trimmed_mean" in cli("runs", "compare", *runs).stdout
    page = Path(cli("runs", "report", runs[0]).stdout.strip())
    assert "with fedavg" in page.read_text()
    cli("runs", "report", *runs, "--output", tmp_path / "both.html")
    assert all(f"with {s}" in (tmp_path / "both.html").read_text() for s in ("fedavg", "trimmed_mean"))


def test_who_failed_and_why_is_shown(cli, tiny_task):
    cli("simulate", "--task", tiny_task, *QUICK, "--set", "task.model=marked", "--set", "task.marked=1")
    assert "2 x raised: ValueError: the scanner was off that day" in cli("runs", "show", "last").stdout


def test_init_writes_a_run_that_runs(cli, tmp_path, monkeypatch):
    cli("init", tmp_path / "study")
    monkeypatch.chdir(tmp_path / "study")
    text = Path("run.toml").read_text()
    assert all(key in text for key in ("cohort", "deadline", "attackers", "# aggregator = ", "client_holdout"))
    assert last_json(cli("simulate", "run.toml", "--rounds", 5, "--json"))["metrics"]["accuracy"] > 0.8
    refused = cli("init", tmp_path / "study", code=2)
    assert "run.toml exists already: choose another directory, or overwrite it with --force" in refused.stderr


def test_the_example_of_an_own_task_in_the_docs_runs(cli, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    (tmp_path / "my_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    done = cli("simulate", "--task", "my_module:make", "--set", "task.num_records=900", "--rounds", 25, "--json")
    assert last_json(done)["metrics"]["accuracy"] > 0.7


def test_the_run_file_in_the_docs_is_a_run_file(cli, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "run-file.md").read_text()
    (tmp_path / "run.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL).group(1))
    assert last_json(cli("simulate", tmp_path / "run.toml", *QUICK, "--json"))["metrics"]["auc"] > 0.5


def test_tasks_are_listed_with_their_options(cli):
    listed = {row["name"]: row["options"] for row in json.loads(cli("tasks", "--json").stdout)}
    assert listed["mnist"] == {"model": "cnn"}
    assert set(listed) == {"mnist", "heart", "fashion-mnist", "table", "arrays", "images"}


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--set", "cohort.sise=3"], 2, "unknown key cohort.sise = 3: did you mean 'size'?"),
        (["--set", "cohort"], 2, "--set 'cohort': write it as key=value"),
        (["--cohort", 11], 2, "cohort.size = 11 is more than the 10 clients there are"),
        (["--strategy", "trimmed_mean", "--set", "aggregator.f=7"], 2, "TrimmedMean(f=7) needs more than 14 updates"),
        (["--strategy", "fedprox", "--set", "local.algorithm.mu=-1"], 2, "FedProx needs a finite mu > 0, got -1"),
        (["--set", "aggregator={name='trimmed_mean', f=7}"], 2, "TrimmedMean(f=7) needs more than 14 updates, got 10"),
        (["--task", "tiny_task:fails"], 1, "task tiny_task:fails"),
        (["--task", "nowhere:make"], 2, "importing nowhere failed with ModuleNotFoundError"),
        (["--set", "local.device=cuda:9"], 2, "local.device = 'cuda:9'"),
        (["absent.toml"], 2, "cannot read the run file absent.toml: No such file or directory"),
        (["--rounds", "many"], 2, "Invalid value for '--rounds'"),
    ],
)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(cli, tiny_task, args, code, message):
    done = cli("simulate", "--task", tiny_task, *QUICK, *args, code=code)
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(cli.home.glob("runs/*"))


def test_a_missing_label_in_an_own_table_is_named_with_its_record(cli, tmp_path):
    (tmp_path / "t.csv").write_text("age,ill\n30,yes\n40,\n50,no\n60,no\n70,yes\n")
    task = ["--task", "table", "--set", f"task.path={tmp_path}/t.csv", "--set", "task.target=ill"]
    done = cli("simulate", *task, code=1)
    assert "t.csv: column 'ill': 1 labels are missing (record 2): fill them in or drop those records" in done.stderr


def test_a_run_that_is_not_there_is_named(cli):
    assert "there is no run '2020'" in cli("runs", "show", "2020", code=1).stderr
    assert "there is no run 'last'" in cli("runs", "resume", code=1).stderr


def test_the_next_command_names_a_home_that_is_not_the_usual_one(cli, tiny_task, tmp_path):
    said = cli("simulate", "--task", tiny_task, *QUICK, "--home", tmp_path / "else where").stdout
    assert re.search(r"next: coterie runs report \S+ --home '.*else where'", said)


def test_the_version_is_printed(cli):
    assert re.fullmatch(r"coterie \d+\.\d+\.\d+\n", cli("--version").stdout)


def test_a_home_that_cannot_be_written_is_named(cli, tiny_task, tmp_path):
    (tmp_path / "file").write_text("")
    done = cli("simulate", "--task", tiny_task, *QUICK, "--home", tmp_path / "file", code=1)
    assert "cannot make the directory" in done.stderr


@pytest.mark.parametrize("command", [[], ["simulate"], ["runs"], ["runs", "resume"], ["runs", "report"], ["init"]])
def test_help_has_examples(cli, command):
    text = cli(*command, "--help").stdout
    assert "coterie" in text
    if command and command != ["runs"]:
        assert "Example" in text


def test_help_is_quick_because_it_imports_no_torch(cli):
    import subprocess

    script = "import sys; import coterie.cli.main; print('torch' in sys.modules, 'sqlalchemy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
