"""How many cores this process may use."""

import os


def available_cores() -> int:
    """Cores that this process is allowed on, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
