"""`coterie server`."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import DEFAULT_HOME, HomeOption


def server(
    home: HomeOption = DEFAULT_HOME,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 9443,
    names: Annotated[
        list[str] | None, typer.Option("--name", help="A name under which nodes reach this server; may be repeated.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS; on loopback only.")] = False,
    certificate: Annotated[Path | None, typer.Option(help="The operator's own certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    ca: Annotated[Path | None, typer.Option(help="The CA that nodes shall trust for it (PEM).")] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="COTERIE_DATABASE",
            show_envvar=True,
            metavar="URL",
            help="PostgreSQL in place of SQLite under --home: postgresql://USER@HOST/NAME. A password belongs into the "
            "variable or into ~/.pgpass, not on a command line.",
        ),
    ] = None,
) -> None:
    """Coordinate a federation: one process, one port, TLS from a CA made at the first start.

    Ends on Ctrl-C; runs that are going on are taken up again at the next start.

    Example: coterie server --host 0.0.0.0 --name federation.example.org
    """
    from coterie.core.errors import ConfigError
    from coterie.server.certificates import operators
    from coterie.server.serve import Address, serve

    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key belong together: give both")
    own = operators(certificate, key, ca) if certificate and key else None

    def started(address: Address) -> None:
        (home / "server" / "url").write_text(address.url)
        typer.echo(f"serving at {address.url} (home {home})")

    serve(home, host, port, names or (), insecure, own, database, started)
