"""Options that several commands share."""

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.core.errors import ConfigError
from coterie.server.run_directory import default_home

if TYPE_CHECKING:
    from coterie.core.run_config import RunConfig

DEFAULT_HOME = default_home()

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="COTERIE_HOME", help="Where runs are kept.", show_default="~/.coterie")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line; progress goes to stderr.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
RunFileArgument = Annotated[Path | None, typer.Argument(help="The run file.", metavar="[RUN.toml]", show_default=False)]
RoundsOption = Annotated[int | None, typer.Option(help="Number of rounds.")]
StrategyOption = Annotated[str | None, typer.Option(help="fedavg, fedprox or trimmed_mean.")]
SeedOption = Annotated[int | None, typer.Option(help="Every random choice derives from it.")]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file; may be repeated.")
]


def load_run(file: Path | None, options: Mapping[str, Any], settings: list[str] | None) -> "RunConfig":
    """The run of a file under options (by key; None: not given) and ``--set``. Raises ConfigError."""
    from coterie.core.run_config import RunConfig

    given = {key: value for key, value in options.items() if value is not None}
    return RunConfig.load(file, given | parse_settings(settings or []))


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``key=value`` pairs to a dictionary; a value is read as TOML, or else taken as a string. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting!r}: write it as key=value, for example --set simulation.workers=2")
        parsed[key.strip()] = parse_value(text.strip())
    return parsed


def parse_value(text: str) -> Any:
    """A TOML value (``3``, ``0.5``, ``true``, ``[1, 2]``, ``{name = "iid"}``), or the text itself.

    ``nan`` is text, the name of an attack: no key takes a number that is none.
    """
    if text == "nan":
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, numbers without end, nesting without end
        return text


def command(home: Path, *words: str) -> str:
    """A command for the user to type next; it names the home where that is not the usual one."""
    where = [] if home == DEFAULT_HOME else ["--home", str(home)]
    return shlex.join(["coterie", *words, *where])
