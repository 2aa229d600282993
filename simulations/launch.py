"""Start or resume a simulation. Light on purpose: the workers are started before this process imports torch.

Importing torch takes longest of all at the start of a run; this way the coordinator and its workers do it at the same
time.
"""

import contextlib
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.client.worker_process import WorkerProcess
from coterie.core.cores import available_cores
from coterie.core.errors import RunError, RunInterrupted
from coterie.core.events import Listener
from coterie.core.run_config import DEFAULT_COHORT, RunConfig
from coterie.server.run_directory import RunDirectory, default_home, new_run_id, run_path
from coterie.server.store import RunKind, RunRecord, RunStatus, Store, open_store

if TYPE_CHECKING:
    from coterie.simulations.engine import Result


def simulate(config: RunConfig, home: Path | None = None, listeners: Sequence[Listener] = ()) -> "Result":
    """Run a simulation from its first round. Everything it leaves lies under `home` ($COTERIE_HOME or ~/.coterie).

    Raises CoterieError, and RunInterrupted (a KeyboardInterrupt that knows the run's id) on Ctrl-C.
    """
    home = home or default_home()
    with contextlib.closing(open_store(home)) as store:
        return _launch(config, None, new_run_id(), home, store, listeners)


def resume(
    reference: str, home: Path | None = None, listeners: Sequence[Listener] = (), workers: int | None = None
) -> "Result":
    """Go on with a run from its last complete checkpoint; the end is that of an undisturbed run, bit by bit.

    reference: the run's id, the beginning of it, or "last". workers: another number of worker processes than before.
    Raises as `simulate` does, and RunError when the task's records or model have changed since the run started.
    """
    home = home or default_home()
    with contextlib.closing(open_store(home)) as store:
        record = store.find(reference)
        if record.status is RunStatus.FINISHED:
            raise RunError(f"run {record.id} is finished: `coterie runs show {record.id}` shows it")
        if record.kind is not RunKind.SIMULATION:
            by = "flwr run APP --run-config 'resume=\"{}\"'" if record.kind is RunKind.FLOWER else "coterie server"
            raise RunError(f"run {record.id} is carried out on nodes: `{by.format(record.id)}` goes on with it")
        overrides = {} if workers is None else {"simulation.workers": workers}
        config = RunConfig.from_toml(record.config, f"the stored run {record.id}", overrides)
        try:
            return _launch(config, record, record.id, home, store, listeners)
        except KeyboardInterrupt:
            raise RunInterrupted(record.id) from None


def _launch(
    config: RunConfig,
    record: RunRecord | None,
    run_id: str,
    home: Path,
    store: Store,
    listeners: Sequence[Listener],
) -> "Result":
    try:
        Path.cwd()
    except FileNotFoundError:  # torch would end the process without a word of Python's
        raise RunError("the working directory is gone: change to one that exists") from None
    with _directory(run_path(home, run_id), fresh=record is None) as directory, _workers(config, directory) as workers:
        from coterie.simulations.engine import execute

        return execute(config, record, run_id, store, directory, workers, listeners)


@contextlib.contextmanager
def _directory(path: Path, fresh: bool) -> Generator[RunDirectory]:
    """Hold the run's directory; one that never got as far as a run is removed again."""
    directory = RunDirectory(path)
    try:
        yield directory
    finally:
        if fresh and not (path / "run.toml").exists():
            shutil.rmtree(path, ignore_errors=True)
        directory.close()


@contextlib.contextmanager
def _workers(config: RunConfig, directory: RunDirectory) -> Generator[list[WorkerProcess]]:
    """Start the workers at once: their imports take as long as loading the task."""
    count = config.simulation.workers or min(available_cores(), config.cohort.size or DEFAULT_COHORT)
    workers: list[WorkerProcess] = []
    try:
        for i in range(count):
            try:
                workers.append(WorkerProcess(directory.log))
            except OSError as error:
                raise RunError(
                    f"cannot start worker process {i + 1} of {count}: {error.strerror}: "
                    f"lower simulation.workers, or raise the limits of this session (ulimit -n, ulimit -u)"
                ) from error
        yield workers
    finally:
        for worker in workers:
            worker.stop()
