"""`coterie client`: a site's end of a federation."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import parse_value
from coterie.core.errors import ConfigError

app = typer.Typer(help="A site's node: join a federation, take part in it.", no_args_is_help=True)

DirectoryOption = Annotated[
    Path, typer.Option("--directory", "-d", envvar="COTERIE_NODE", help="Where the node's files lie.")
]


@app.command()
def join(
    url: Annotated[str, typer.Argument(help="The server's URL.", metavar="URL")],
    token: Annotated[str, typer.Argument(help="The one-time token (`coterie enroll new`).", metavar="TOKEN")],
    directory: DirectoryOption = Path("node"),
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task that this site takes part in; may be repeated.", metavar="TASK[,KEY=VALUE...]"),
    ] = None,
) -> None:
    """Make this site's key, register it with the token, trust the server's CA from now on.

    TASK is a task's name or package.module:function; client=KEY takes only the records with that client key.

    Example: coterie client join https://federation.example.org:9443 TOKEN --task heart,client=cleveland
    """
    from coterie.client.join import join as join_federation

    tasks = dict(_task(text) for text in task or [])
    name = join_federation(url, token, directory, tasks)
    typer.echo(f"joined {url} as {name}; next: coterie client run --directory {directory}")


@app.command()
def run(directory: DirectoryOption = Path("node")) -> None:
    """Take part: connect, train when asked, until Ctrl-C.

    Example: coterie client run --directory node
    """
    from coterie.client.daemon import Daemon
    from coterie.client.node_config import NodeDirectory

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    for noisy in ("httpx", "flwr"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    Daemon(NodeDirectory(directory)).run()


def _task(text: str) -> tuple[str, dict[str, Any]]:
    """``heart,client=cleveland,model=mlp`` as the name that runs ask for and the task's settings."""
    name, *options = text.split(",")
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--task {text!r}: write options as KEY=VALUE")
        settings[key.strip()] = parse_value(value.strip())
    client = settings.pop("client", None)
    own: dict[str, Any] = {"task": {"name": name, **settings}}
    return name, own | ({"client": str(client)} if client is not None else {})
