"""Ctrl-C and SIGTERM, taken only where a run can stop.

Python raises KeyboardInterrupt between any two steps of the program: in the middle of a transaction, or with a lock
just taken. `deferred` keeps it back; `allowed` marks the places where waiting may end.
"""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

_IMPATIENT = 3
"""So many signals are not kept back any longer."""


class _State:
    depth = 0
    signals = 0
    allowed = False


def _handle(signum: int, frame: FrameType | None) -> None:
    _State.signals += 1
    if _State.allowed or _State.signals >= _IMPATIENT:
        raise KeyboardInterrupt


@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Within, a signal is raised as KeyboardInterrupt in `allowed` only. Does nothing outside the main thread.

    One that comes after the last such place is dropped: what was to be interrupted is done.
    """
    if threading.current_thread() is not threading.main_thread() or _State.depth:
        yield
        return
    old = {number: signal.signal(number, _handle) for number in (signal.SIGINT, signal.SIGTERM)}
    _State.depth, _State.signals = 1, 0
    try:
        yield
    finally:
        _State.depth = 0
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def allowed() -> Generator[None]:
    """A place where KeyboardInterrupt may come, at once when a signal has come already."""
    if not _State.depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.allowed = True
    try:
        if _State.signals:
            raise KeyboardInterrupt
        yield
    finally:
        _State.allowed = False
