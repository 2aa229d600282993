"""The `coterie` command. Exit codes: 0 done, 1 failed, 2 wrong usage or run file, 130 interrupted."""

import importlib.metadata
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.markup import escape

from coterie.cli import client, demo, demo_federation, enroll, init, operator, runs, server, simulate, tasks
from coterie.core.errors import ConfigError, CoterieError
from coterie.core.importing import missing_extra

app = typer.Typer(
    help="Federated learning: simulate hundreds of clients, compare robust aggregators, run on real nodes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coterie {importlib.metadata.version('coterie')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


app.command("simulate")(simulate.simulate)
app.add_typer(runs.app, name="runs")
app.command("tasks")(tasks.tasks)
app.command("init")(init.init)
app.command("demo")(demo.demo)
app.command("demo-federation")(demo_federation.demo_federation)
app.command("server")(server.server)
app.add_typer(enroll.app, name="enroll")
app.add_typer(client.app, name="client")
app.command("run")(operator.run)
app.command("status")(operator.status)
app.command("cancel")(operator.cancel)


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupt)
    errors = Console(stderr=True, highlight=False)
    try:
        # Not standalone: our own errors get through. typer gives 130 on Ctrl-C.
        code = app(standalone_mode=False)
    except CoterieError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        if not (remedy := missing_extra(error)):
            raise
        errors.print(f"[red]error:[/red] this needs {error.name}{escape(remedy)}", soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        sys.exit(1)
    except OSError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """End on SIGTERM as on Ctrl-C: the run stays resumable."""
    raise KeyboardInterrupt
