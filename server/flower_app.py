"""The ServerApp of a Coterie run under stock Flower: `flower-superlink`, `flower-supernode` and `flwr run`.

A Flower app names it as ``serverapp = "coterie.server.flower_app:app"``. What the app's configuration holds:

run-file: the run file, a path in the app's folder (or an absolute one on the SuperLink's machine); default run.toml.
resume: the id of a run to go on with, from its last complete round; empty: a new run.
Any other key is one of the run file and goes before it, unless it is empty.
"""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import Context, UserConfigValue
from flwr.serverapp import Grid, ServerApp

from coterie.core import interrupts
from coterie.core.errors import ConfigError, RunError
from coterie.core.events import Event, EventKind
from coterie.core.run_config import RunConfig
from coterie.server.assembly import assemble, check_run, telling, wait_for_clients
from coterie.server.conduct import conduct, register
from coterie.server.grid_channel import GridChannel, GridNodes, pause
from coterie.server.run_directory import RunDirectory, default_home, new_run_id, run_path
from coterie.server.store import RunKind, RunStatus, Store, open_store
from coterie.tasks import load_task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Conduct one run; it is kept under $COTERIE_HOME (default ~/.coterie) of the user who runs the SuperLink.

    Raises CoterieError, which ends Flower's run as failed.
    """
    torch.set_num_threads(1)  # as everywhere: the bits depend on it
    home, settings = default_home(), dict(context.run_config)
    resumed = str(settings.pop("resume", ""))
    with contextlib.closing(open_store(home)) as store, interrupts.deferred():
        if resumed:
            run_id, config = _stored(store, resumed)
        else:
            run_id, config = new_run_id(), run_of(settings)
            check_run(config)
        with contextlib.closing(RunDirectory(run_path(home, run_id))) as directory:
            if not resumed:
                register(config, run_id, store, directory, RunKind.FLOWER, RunStatus.QUEUED)
            _say(f"run {run_id}: {directory.path}")
            try:
                _conduct(grid, config, run_id, store, directory)
            except KeyboardInterrupt:  # as an error that Flower knows how to end with
                raise RunError(
                    f"run {run_id} was stopped: --run-config 'resume=\"{run_id}\"' goes on with it"
                ) from None


def run_of(settings: Mapping[str, UserConfigValue]) -> RunConfig:
    """The run that an app's configuration describes. Raises ConfigError."""
    overrides = {key: value for key, value in settings.items() if value != ""}
    name = str(overrides.pop("run-file", "run.toml"))
    # Flower puts the app's folder first on the module path, and tells it nowhere else.
    places = [Path(folder) / name for folder in sys.path]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ConfigError(f"run-file = {name!r}: the app has no such file: put it beside the app's pyproject.toml")
    return RunConfig.load(path, overrides)


def _stored(store: Store, reference: str) -> tuple[str, RunConfig]:
    record = store.find(reference)
    if record.kind is not RunKind.FLOWER or record.status is RunStatus.FINISHED:
        raise RunError(f"resume = {reference!r}: run {record.id} is a {record.kind} and {record.status}")
    return record.id, RunConfig.from_toml(record.config, f"the stored run {record.id}")


def _conduct(grid: Grid, config: RunConfig, run_id: str, store: Store, directory: RunDirectory) -> None:
    nodes = GridNodes(grid, config.task.name, _say)

    def channel(config: RunConfig, counts: Mapping[str, int]) -> GridChannel:
        return GridChannel(run_id, config, counts, nodes)

    with telling(store, run_id):
        task = load_task(config.task)
        try:
            clients = wait_for_clients(store, run_id, config, nodes.here, pause, nodes.refusals)
        except KeyboardInterrupt:
            raise RunError("stopped while it waited for its nodes") from None
        parts = assemble(config, task, clients, channel)
    conduct(parts, run_id, False, store, directory, [_told])


def _told(event: Event) -> None:
    """One line for the log that `flwr log` shows."""
    data = event.data
    if event.kind is EventKind.ROUND_FINISHED:
        _say(f"round {event.round}: {data['empty'] or str(data['used']) + ' updates'}")
    elif event.kind is EventKind.EVALUATED:
        _say("  ".join(f"{name} {value:.4f}" for name, value in data["metrics"].items()))
    elif event.kind in (EventKind.CLIENT_FAILED, EventKind.UPDATE_REFUSED):
        _say(f"round {event.round}: {data['client_id']}: {data['kind']}: {data['reason']}")
    elif event.kind is EventKind.RUN_FINISHED:
        _say(f"weights sha256 {data['sha256']}")


def _say(line: str) -> None:
    """Flower sends what an app prints to its log."""
    print(line, flush=True)
