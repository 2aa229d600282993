"""What a person sees while a run goes on: a bar on a terminal, a line every few seconds elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from coterie.core.errors import RunInterrupted
from coterie.core.events import Event, EventKind

LINE_SECONDS = 5.0


class RunProgress:
    """A listener of a run's events; a context manager around the run."""

    def __init__(self, rounds: int, label: str, console: Console, quiet: bool = False) -> None:
        self._rounds = rounds
        self._label = label
        self._console = console
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TextColumn("[dim]{task.fields[clients]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._measured = ""
        self._clients = ""
        self._failed = 0
        self._printed = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        self._task = self._bar.add_task(self._label or "run", total=self._rounds, measured="starting", clients="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            said = "interrupted before the first round"
            if isinstance(error, RunInterrupted):
                said = f"interrupted: `coterie runs resume {error.run_id}` goes on from the last complete round"
            Console(stderr=True, highlight=False).print(said, soft_wrap=True, markup=False)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event.kind is EventKind.ROUND_FINISHED:
            data = event.data
            lost = data["failed"] + data["refused"]
            self._clients = f"{data['used']} clients" + (f", {lost} lost" if lost else "")
            if data["empty"]:
                self._clients = f"model kept: {data['empty']}"
            self._show(event.round)
        elif event.kind is EventKind.EVALUATED:
            self._measured = "  ".join(f"{name} {value:.4f}" for name, value in list(event.data["metrics"].items())[:2])
            self._show(event.round, last=event.round == self._rounds)
        elif event.kind is EventKind.RUN_RESUMED:
            self._show(event.round)

    def _show(self, round: int, last: bool = False) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=round, measured=self._measured, clients=self._clients)
        if self._quiet or self._console.is_terminal:
            return
        if last or time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            self._console.print(
                f"{self._label} round {round}/{self._rounds}  {self._measured}  {self._clients}",
                highlight=False,
                markup=False,
            )
