"""What the package offers by name, what the page in docs/ shows, and what importing it costs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coterie.aggregation
from coterie.aggregation import (
    AGGREGATORS,
    SERVER_OPTIMIZERS,
    LinearAggregator,
    Mean,
    PreconditionError,
    ServerSGD,
    TrimmedMean,
    compiled,
)
from coterie.core.choice import Choice, build
from coterie.core.errors import ConfigError
from coterie.core.run_config import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "aggregation.md"


def test_every_public_name_is_there():
    assert all(hasattr(coterie.aggregation, name) for name in coterie.aggregation.__all__)


def test_rules_are_built_from_a_run_file():
    assert build(AGGREGATORS, Choice(name="mean"), "aggregator") == Mean()
    assert build(AGGREGATORS, Choice(name="trimmed_mean", f=5), "aggregator") == TrimmedMean(5)
    assert build(SERVER_OPTIMIZERS, Choice(name="sgd", momentum=0.9), "server_optimizer") == ServerSGD(1.0, 0.9)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(name="trimmed_mean"), r"aggregator\.f: 'trimmed_mean' needs this option"),
        (Choice(name="trimmed_mean", f=0.2), r"aggregator\.f = 0\.2: Input should be a valid integer"),
        (Choice(name="mean", f=1), r"aggregator\.f: 'mean' has no such option \(its options: none\)"),
        (Choice(name="median"), r"there is no 'median': choose one of mean, trimmed_mean"),
    ],
)
def test_wrong_options_are_named(choice, message):
    with pytest.raises(ConfigError, match=message):
        build(AGGREGATORS, choice, "aggregator")


def test_the_rule_of_the_page_works_as_shown(tmp_path, monkeypatch):
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    source = next(text for language, text in blocks if language == "python" and "class Winsorized" in text)
    run_file = next(text for language, text in blocks if language == "toml")
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "rules.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    choice = RunConfig.from_toml(run_file, "the page").aggregator
    rule = build(AGGREGATORS, choice, "aggregator")
    updates = torch.tensor([[0.0], [1.0], [2.0], [3.0], [1000.0]])
    assert rule.f == 2
    assert rule(updates).tolist() == [2.0]
    assert not isinstance(rule, LinearAggregator)
    with pytest.raises(PreconditionError, match="needs more than 4 updates, got 4"):
        rule.check(4)


def test_importing_the_package_does_not_import_the_compiler():
    code = "import sys, coterie.aggregation; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_where_no_folder_can_be_written_the_loops_are_compiled_in_memory(monkeypatch):
    def without_a_cache(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: (function, options)

    monkeypatch.setattr(compiled, "njit", without_a_cache)
    function, options = compiled._compile(fastmath=True)(len)
    assert (function, options) == (len, {"nogil": True, "fastmath": True})


def test_a_second_process_finds_the_loops_compiled():
    code = (
        "import torch; from coterie.aggregation import Mean, compiled\n"
        "total = Mean().stream(3, 1); total.accumulate(torch.ones(3), 1)\n"
        "print(sum(compiled.accumulate.stats.cache_misses.values()))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(2)]
    assert runs[1].stdout.strip() == "0"
