"""`coterie enroll`: which nodes may take part."""

from typing import Annotated

import typer

from coterie.cli import printing
from coterie.cli.options import DEFAULT_HOME, HomeOption, JsonOption
from coterie.cli.remote import Remote, ServerOption

app = typer.Typer(help="Which nodes may take part: new, list, revoke.", no_args_is_help=True)


@app.command("new")
def new(
    name: Annotated[str, typer.Option(help="The node's name.")],
    tags: Annotated[list[str] | None, typer.Option("--tag", help="A tag; may be repeated.")] = None,
    valid: Annotated[float, typer.Option(help="Hours until the token expires.")] = 24.0,
    rotate: Annotated[bool, typer.Option("--rotate", help="For a node that is enrolled already: a new key.")] = False,
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Print a one-time token for a site to join with: `coterie client join URL TOKEN`.

    Example: coterie enroll new --name site-a
    """
    body = {"name": name, "tags": tags or [], "valid_seconds": valid * 3600, "rotate": rotate}
    typer.echo(Remote(server, home).post("/tokens", body)["token"])


@app.command("list")
def list_nodes(server: ServerOption = None, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the nodes and which of them are here."""
    nodes = Remote(server, home).get("/nodes")
    if as_json:
        printing.echo_json(nodes)
        return
    if not nodes:
        typer.echo("no nodes yet: coterie enroll new --name NAME")
        return
    table = printing.table(printing.whole("node", (node["name"] for node in nodes)), "status", "here", "offers", "tags")
    for node in nodes:
        offers = ", ".join(f"{task} ({count})" for task, count in node["offers"].items())
        cells = (node["name"], node["status"], "yes" if node["here"] else "no", offers, ", ".join(node["tags"]))
        table.add_row(*map(printing.text, cells))
    printing.console().print(table)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Refuse a node from now on."""
    Remote(server, home).post(f"/nodes/{name}/revoke")
