"""Simulated clients on one machine: ``simulate(config, home)`` and ``resume(run, home)``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.simulations.launch import resume, simulate

__all__ = ["resume", "simulate"]


def __getattr__(name: str) -> Any:
    # Workers import this package too, and need neither the store nor the coordinator.
    if name in __all__:
        from coterie.simulations import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
