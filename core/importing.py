"""Import what a user names as ``package.module:object``."""

import importlib
import sys
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError


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
