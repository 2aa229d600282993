"""The wheel, built from this tree and installed into an environment of its own: complete, and nothing leaks into the
user's names."""

import json
import os
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from ..federation.conftest import Site, fed, simulated  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*command, cwd, code=0, **env):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout or done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    # Through a source archive, so that the tree stays clean and what the archive lacks is noticed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


def installed(wheel, extra, folder):
    """The folder of commands of a new environment that holds the wheel and nothing else."""
    venv.create(folder / "env", with_pip=True)
    commands = folder / "env" / "bin"
    pip = [commands / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    run(*pip, f"{wheel}[{extra}]", cwd=folder)
    run(commands / "python", "-m", "pip", "check", cwd=folder)
    return commands


def test_the_wheel_holds_the_packages_and_their_files_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("coterie/", "coterie-")) for name in names)
    assert "coterie/__init__.py" not in names
    for package in ("core", "aggregation", "tasks", "client", "server", "simulations", "cli"):
        assert f"coterie/{package}/py.typed" in names
    migrations = ("server/migrations/env.py", "server/migrations/versions/v0001_runs_and_events.py")
    for name in (*migrations, "server/report.html.j2", "server/report.css.j2"):
        assert f"coterie/{name}" in names
    assert not any("test" in name for name in names)


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path):
    coterie = installed(wheel, "all", tmp_path) / "coterie"
    home = {"COTERIE_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    out = run(coterie, "simulate", "--task", "heart", "--rounds", 3, "--json", "--quiet", cwd=tmp_path, **home)
    assert json.loads(out.splitlines()[-1])["metrics"]["auc"] > 0.7
    page = run(coterie, "runs", "report", "last", cwd=tmp_path, **home).strip()
    assert "heart" in Path(page).read_text()


def test_a_site_installs_little_and_takes_part(wheel, tmp_path, fed, simulated):  # noqa: F811
    commands = installed(wheel, "client", tmp_path)
    modules = {path.name for path in (commands.parent / "lib").glob("python*/site-packages/*")}
    assert not {"numba", "scipy", "sklearn", "matplotlib", "pyarrow", "PIL", "nicegui", "ray"} & modules
    refused = run(commands / "coterie", "simulate", "--task", "tiny_task:make", cwd=Path.cwd(), code=2)
    assert "pip install 'coterie[server]'" in refused
    assert "heart" in run(commands / "coterie", "tasks", cwd=tmp_path)
    fed.start()
    site = Site(fed, "site0")
    site.join("tiny_task:make,sites=1,client=site0")
    with site.log.open("ab") as log:
        fed.processes.append(
            subprocess.Popen(
                [commands / "coterie", "client", "run", "-d", site.directory], env=fed.cli.env, stdout=log, stderr=log
            )
        )
    done = fed.run(rounds=2, task__sites=1, federation__min_clients=1)
    assert done["model"]["sha256"] == simulated(2, 1)
    assert fed.stop(signal.SIGTERM) == 0
