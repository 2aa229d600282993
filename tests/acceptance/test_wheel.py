"""The wheel, built from this tree and installed into an environment of its own: complete, and nothing leaks into the
user's names."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*command, cwd, **env):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    # Through a source archive, so that the tree stays clean and what the archive lacks is noticed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


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
    venv.create(tmp_path / "env", with_pip=True)
    pip = [tmp_path / "env" / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    run(*pip, wheel, cwd=tmp_path)
    coterie = tmp_path / "env" / "bin" / "coterie"
    home = {"COTERIE_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    out = run(coterie, "simulate", "--task", "heart", "--rounds", 3, "--json", "--quiet", cwd=tmp_path, **home)
    assert json.loads(out.splitlines()[-1])["metrics"]["auc"] > 0.7
    page = run(coterie, "runs", "report", "last", cwd=tmp_path, **home).strip()
    assert "heart" in Path(page).read_text()
    run(tmp_path / "env" / "bin" / "python", "-m", "pip", "check", cwd=tmp_path)
