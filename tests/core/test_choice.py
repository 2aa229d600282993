"""A choice by name: unknown names and options are refused, defaults become visible, own classes are reached by path."""

import sys
from dataclasses import dataclass

import pytest

from coterie.core.choice import Choice, build, complete
from coterie.core.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    f: int
    scale: float = 1.0


def deal(records: list[int], /, alpha: float = 0.5) -> tuple[list[int], float]:
    return records, alpha


TABLE = {"rule": Rule, "deal": deal}


def test_defaults_become_visible():
    assert complete(TABLE, Choice(name="rule", f=3), "aggregator") == Choice(name="rule", f=3, scale=1.0)


def test_build_passes_what_the_caller_gives_and_what_the_file_says():
    assert build(TABLE, Choice(name="deal", alpha=2), "partition", [1, 2]) == ([1, 2], 2.0)
    assert build(TABLE, Choice(name="rule", f=1), "aggregator") == Rule(1)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(name="role", f=1), r"aggregator: there is no 'role': choose one of deal, rule, or name your own"),
        (Choice(name="rule", g=1), r"aggregator\.g: 'rule' has no such option \(its options: f, scale\)"),
        (Choice(name="rule"), r"aggregator\.f: 'rule' needs this option"),
        (Choice(name="rule", f=1.5), r"aggregator\.f = 1\.5: Input should be a valid integer"),
        (Choice(name="rule", f=1, scale="big"), r"aggregator\.scale = 'big': Input should be a valid number"),
        (Choice(name="deal", records=[1]), r"aggregator\.records: 'deal' has no such option \(its options: alpha\)"),
        (Choice(name="nowhere.to:Be"), r"importing nowhere\.to failed with ModuleNotFoundError"),
        (Choice(name="json:Absent"), r"the module json .* has no 'Absent'"),
        (Choice(name="json:"), r"write it as package\.module:name"),
    ],
)
def test_mistakes_are_named(choice, message):
    with pytest.raises(ConfigError, match=message):
        complete(TABLE, choice, "aggregator")


def test_a_class_of_the_users_own_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "own_rules_for_test.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Own:\n    beta: float = 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = build(TABLE, Choice(name="own_rules_for_test:Own", beta=0.1), "aggregator")
    assert own.beta == 0.1


def test_an_error_inside_the_users_module_is_told_with_its_text(tmp_path, monkeypatch):
    (tmp_path / "broken_rules_for_test.py").write_text("raise RuntimeError('no licence found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="importing broken_rules_for_test failed with RuntimeError: no licence found"):
        complete(TABLE, Choice(name="broken_rules_for_test:Own"), "aggregator")


class Meter:
    """A type that neither TOML nor pydantic knows."""


METER = Meter()


@dataclass(frozen=True)
class Odd:
    meter: Meter = METER
    shape: tuple[int, ...] = (2, 3)
    limit: float | None = None


def quits(code: int = 3) -> None:
    raise SystemExit(code)


def test_options_that_no_run_file_can_hold_keep_their_defaults_and_stay_out_of_it():
    table = {"odd": Odd, "quits": quits}
    assert complete(table, Choice(name="odd"), "aggregator") == Choice(name="odd", shape=(2, 3))
    assert isinstance(build(table, Choice(name="odd", shape=[4]), "aggregator").meter, Meter)
    with pytest.raises(ConfigError, match=r"aggregator\.meter = 'long': it takes a Meter, which no run file can hold"):
        complete(table, Choice(name="odd", meter="long"), "aggregator")


def test_a_number_in_quotes_is_refused():
    with pytest.raises(ConfigError, match=r"aggregator\.f = '1' is text: write it without quotes"):
        complete(TABLE, Choice(name="rule", f="1"), "aggregator")


def test_a_callable_that_quits_or_gives_something_else_is_named():
    with pytest.raises(ConfigError, match=r"aggregator = 'quits' raised SystemExit: 3"):
        build({"quits": quits}, Choice(name="quits"), "aggregator")
    with pytest.raises(ConfigError, match=r"aggregator = 'builtins:exit' raised SystemExit"):
        build(TABLE, Choice(name="builtins:exit"), "aggregator")
    with pytest.raises(ConfigError, match=r"partition = 'deal' gives a tuple, which is no Rule$"):
        build(TABLE, Choice(name="deal"), "partition", [1], expects=Rule)
