"""Simulations of the tiny task."""

import pytest

from coterie.core.events import EventKind
from coterie.core.run_config import RunConfig
from coterie.simulations import simulate


class Run:
    """A finished (or failed) simulation and its events."""

    def __init__(self, home, **settings):
        settings = {"rounds": 3, "simulation.workers": 2} | settings
        self.config = RunConfig.load(overrides=settings)
        self.events = []
        self.error = None
        try:
            self.result = simulate(self.config, home, [self.events.append])
            self.model = self.result.outcome.model
        except Exception as error:
            self.error = error

    def of(self, kind):
        return [event for event in self.events if event.kind is kind]

    def rounds(self):
        return [event.data for event in self.of(EventKind.ROUND_FINISHED)]


@pytest.fixture
def run(home, tiny_task):
    def start(model="logistic", n=200, sites=10, marked=0, action="complain", expect_error=False, **settings):
        task = {"name": tiny_task, "model": model, "n": n, "sites": sites, "marked": marked, "action": action}
        one = Run(home, **({"task": task} | {k.replace("__", "."): v for k, v in settings.items()}))
        if one.error and not expect_error:
            raise one.error
        return one

    return start
