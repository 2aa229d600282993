"""Import what a user names as ``package.module:object``."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError

_EXTRAS = {
    "server": ("alembic", "fastapi", "jinja2", "matplotlib", "numba", "sqlalchemy", "uvicorn"),
    "data": ("PIL", "pyarrow", "sklearn"),
}
"""The parts of Coterie that not everybody installs, by what they import."""


def import_object(spec: str, key: str) -> Any:
    """The object behind ``package.module:object``; the working directory is searched too, last.

    Raises ConfigError with the cause when the module cannot be found, raises on import, or lacks the name.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key} = {spec!r}: write it as package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not stand in for a module of Python's own
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} = {spec!r}: importing {module_name} failed with {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{key} = {spec!r}: the module {module_name} ({module.__file__}) has no {name!r}")
    return getattr(module, name)


def require_extra(extra: str) -> None:
    """Raise ConfigError when a part of Coterie is not installed: at the start, not when a run first needs it."""
    missing = [name for name in _EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'coterie[{extra}]'")


def missing_extra(error: BaseException) -> str:
    """How to install what an import did not find, if it belongs to a part of Coterie; else nothing."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "".join(f": pip install 'coterie[{extra}]'" for extra, names in _EXTRAS.items() if name in names)
