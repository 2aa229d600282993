"""A choice by name with options, as it stands in a run file: ``aggregator = {name = "trimmed_mean", f = 5}``.

Each package holds one explicit table from names to classes or functions (`AGGREGATORS`, `PARTITIONS`, ...). A name with
a colon, ``package.module:Name``, reaches a class of the user's own. The options are the callable's own keyword
parameters: their types are checked, the unknown ones refused, and the defaults filled in.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from coterie.core.errors import ConfigError
from coterie.core.importing import import_object

Table = Mapping[str, Callable[..., Any]]


class Choice(BaseModel):
    """A name and its options (kept as extra keys)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options without the name."""
        return dict(self.model_extra or {})


def given(choice: Choice | None) -> Choice:
    """A choice that a resolved run has."""
    if choice is None:
        raise ValueError("the run is not resolved: call RunConfig.resolve first")
    return choice


def find(table: Table, choice: Choice, key: str) -> Callable[..., Any]:
    """The callable that a choice names. `key` is the place in the run file, for the error's text."""
    if ":" in choice.name:
        found = import_object(choice.name, key)
        if not callable(found):
            raise ConfigError(f"{key} = {choice.name!r}: that is a {type(found).__name__}, not a class or function")
        return found
    if choice.name not in table:
        raise ConfigError(
            f"{key}: there is no {choice.name!r}: choose one of {', '.join(sorted(table))}, "
            f"or name your own as package.module:Name"
        )
    return table[choice.name]


def complete(table: Table, choice: Choice, key: str) -> Choice:
    """The same choice, options checked, defaults that a run file can hold filled in. Raises ConfigError."""
    full = options_of(table, choice, key)
    kept = {name: value if _is_toml(value) else choice.options.get(name) for name, value in full.items()}
    return Choice(name=choice.name, **{name: value for name, value in kept.items() if value is not None})


def options_of(table: Table, choice: Choice, key: str) -> dict[str, Any]:
    """Every option that the choice's class or function takes, as the types it asks for. Raises ConfigError."""
    target = find(table, choice, key)
    parameters = _parameters(target)
    if "name" in parameters:
        raise ConfigError(f"{key} = {choice.name!r}: a parameter cannot be called name, which names the choice itself")
    options = choice.options
    unknown = [name for name in options if name not in parameters]
    if unknown:
        known = ", ".join(parameters) or "none"
        raise ConfigError(f"{key}.{unknown[0]}: {choice.name!r} has no such option (its options: {known})")
    hints = _hints(target)
    full: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in options:
            full[name] = _checked(options[name], hints.get(name, Any), f"{key}.{name}")
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{key}.{name}: {choice.name!r} needs this option and it is not set")
        else:
            full[name] = parameter.default
    return full


def build(table: Table, choice: Choice, key: str, *given: Any, expects: type[Any] = object) -> Any:
    """Call what the choice names with its options; `given` are its positional-only parameters, which no file sets.

    expects: a class or runtime-checkable protocol of the result. Raises ConfigError, also for whatever the class or
    function itself raises.
    """
    target = find(table, choice, key)
    options = options_of(table, choice, key)
    try:
        made = target(*given, **options)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key} = {choice.name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} = {choice.name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, expects):
        methods = [name for name, value in vars(expects).items() if inspect.isfunction(value)]
        lacking = ", ".join(name for name in methods if not hasattr(made, name))
        raise ConfigError(
            f"{key} = {choice.name!r} gives a {type(made).__name__}, which is no {expects.__name__}"
            + (f": it has no {lacking}" if lacking else "")
        )
    return made


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Keyword parameters that a run file may set: positional-only ones are the caller's."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(target)
    except ValueError:  # some built-in functions have none
        return {}
    return {name: p for name, p in signature.parameters.items() if p.kind in kinds}


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):
        return {}


def _checked(value: Any, hint: Any, key: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value}: it must be finite")
    try:
        checked = TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{key} = {value!r}: {error.errors()[0]['msg']}") from None
    except PydanticSchemaGenerationError:  # a class of the user's own
        if isinstance(hint, type) and not isinstance(value, hint):
            raise ConfigError(f"{key} = {value!r}: it takes a {hint.__name__}, which no run file can hold") from None
        return value
    if isinstance(value, str) and isinstance(checked, int | float):
        raise ConfigError(f"{key} = {value!r} is text: write it without quotes")
    return checked


def _is_toml(value: Any) -> bool:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return all(isinstance(key, str) and _is_toml(item) for key, item in items)
    if isinstance(value, list | tuple):
        return all(_is_toml(item) for item in cast("list[Any]", value))
    return type(value) in (str, int, float, bool)
