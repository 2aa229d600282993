"""What a person sees while a run goes on: a bar on a terminal, a line every few seconds elsewhere."""

import contextlib
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from coterie.cli.options import command
from coterie.core.errors import RunInterrupted
from coterie.core.events import Event, EventKind

LINE_SECONDS = 5.0


class RunProgress:
    """A listener of a run's events; a context manager around the run."""

    def __init__(
        self, rounds: int, label: str, home: Path, console: Console, quiet: bool = False, interrupted: str = ""
    ) -> None:
        """interrupted: what to say on Ctrl-C in place of how to resume."""
        self._rounds = rounds
        self._label = label
        self._home = home
        self._console = console
        self._quiet = quiet
        self._interrupted = interrupted
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}", markup=False),
            TextColumn("{task.fields[clients]}", style="dim", markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._measured = ""
        self._measured_round = 0
        self._clients = ""
        self._printed = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        self._task = self._bar.add_task(self._label or "run", total=self._rounds, measured="starting", clients="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, SystemExit):
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            said = self._interrupted or "interrupted before the run began: nothing is left of it"
            if isinstance(error, RunInterrupted):
                again = command(self._home, "runs", "resume", error.run_id)
                said = f"interrupted: `{again}` goes on from the last complete round"
            Console(stderr=True, highlight=False).print(said, soft_wrap=True, markup=False)

    def __call__(self, event: Event) -> None:
        """Take one event. A terminal or a pipe that is gone ends the telling, never the run."""
        try:
            self._tell(event)
        except (OSError, SystemExit):  # rich answers a closed pipe with SystemExit
            self._quiet = True

    def _tell(self, event: Event) -> None:
        if event.kind is EventKind.ROUND_FINISHED:
            data = event.data
            lost = data["failed"] + data["refused"]
            self._clients = f"{data['used']} clients" + (f", {lost} lost" if lost else "")
            if data["empty"]:
                self._clients = f"model kept: {data['empty']}"
            self._show(event.round)
        elif event.kind is EventKind.EVALUATED:
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in list(event.data["metrics"].items())[:2])
            self._measured, self._measured_round = metrics, event.round
            self._show(event.round, last=event.round == self._rounds)
        elif event.kind is EventKind.RUN_RESUMED:
            self._measured_round = event.round
            self._show(event.round)

    def _show(self, round: int, last: bool = False) -> None:
        old = self._measured and self._measured_round != round
        measured = f"{self._measured} (round {self._measured_round})" if old else self._measured
        if self._task is not None:
            self._bar.update(self._task, completed=round, measured=measured, clients=self._clients)
        if self._quiet or self._console.is_terminal:
            return
        # A line where an evaluation is about to follow would show the round before.
        awaits = self._measured_round == round - 1
        if last or (not awaits and time.monotonic() - self._printed > LINE_SECONDS):
            self._printed = time.monotonic()
            text = f"{self._label} round {round}/{self._rounds}  {measured}  {self._clients}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
