"""`coterie server`, `coterie enroll`, `coterie run` and `coterie status`: a real federation as its operator sees it."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.cli.options import DEFAULT_HOME, HomeOption, JsonOption, QuietOption, parse_settings
from coterie.cli.remote import Remote, ServerOption
from coterie.core.errors import RunError

enroll = typer.Typer(help="Which nodes may take part: new, list, revoke.", no_args_is_help=True)


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

    serve(home, host, port, names or (), insecure, own, started)


@enroll.command("new")
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


@enroll.command("list")
def list_nodes(server: ServerOption = None, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the nodes and which of them are here."""
    nodes = Remote(server, home).get("/nodes")
    if as_json:
        typer.echo(json.dumps(nodes))
        return
    table = Table("node", "status", "here", "offers", "tags", box=None)
    for node in nodes:
        offers = ", ".join(f"{task} ({count})" for task, count in node["offers"].items())
        table.add_row(node["name"], node["status"], "yes" if node["here"] else "no", offers, ", ".join(node["tags"]))
    Console().print(table if nodes else "no nodes yet: coterie enroll new --name NAME", markup=False)


@enroll.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Refuse a node from now on."""
    Remote(server, home).post(f"/nodes/{name}/revoke")


def run(
    file: Annotated[Path | None, typer.Argument(help="The run file.", metavar="[RUN.toml]", show_default=False)] = None,
    task: Annotated[str | None, typer.Option(help="A task's name, as the nodes offer it.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    strategy: Annotated[str | None, typer.Option(help="fedavg, fedprox or trimmed_mean.")] = None,
    seed: Annotated[int | None, typer.Option(help="Every random choice derives from it.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file; may be repeated.")
    ] = None,
    server: ServerOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run on the nodes of a server what `coterie simulate` runs on this machine, and watch. Ctrl-C stops watching only.

    Example: coterie run run.toml --set federation.min_clients=4
    """
    from coterie.cli.progress import RunProgress
    from coterie.core.events import EventKind
    from coterie.core.run_config import RunConfig

    options = {"task.name": task, "rounds": rounds, "strategy": strategy, "seed": seed}
    overrides = {key: value for key, value in options.items() if value is not None} | parse_settings(settings or [])
    config = RunConfig.load(file, overrides)
    remote = Remote(server, home)
    run_id = remote.post("/runs", {"config": config.to_toml()})["run"]
    console = Console(stderr=as_json)
    result: dict[str, Any] = {}
    with RunProgress(config.rounds, config.name or config.strategy, home, console, quiet) as progress:
        for event in remote.events(run_id):
            progress(event)
            if event.kind is EventKind.RUN_FAILED:
                raise RunError(f"run {run_id} failed: {event.data['reason']}")
            if event.kind is EventKind.RUN_FINISHED:
                result = dict(event.data)
    if as_json:
        told = {"run": run_id, "status": "finished", "metrics": result["metrics"], "rounds": result["rounds"]}
        typer.echo(json.dumps(told | {"model": {"sha256": result["sha256"]}, "seconds": result["seconds"]}))
        return
    for name, value in result["metrics"].items():
        console.print(f"{name:<18} {value:.4f}", highlight=False, markup=False)
    console.print(f"{'weights':<18} sha256 {result['sha256']}", highlight=False, soft_wrap=True)
    console.print(f"{'run':<18} {run_id}", highlight=False)


def status(server: ServerOption = None, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """What a server is doing: its nodes, its runs, and what they wait for or failed of."""
    remote = Remote(server, home)
    nodes, runs = remote.get("/nodes"), remote.get("/runs")
    for run in runs[:10]:
        events = remote.get(f"/runs/{run['run']}/events")
        reasons = [e["data"]["reason"] for e in events if e["kind"] in ("run.waiting", "run.failed", "client.failed")]
        run["reason"] = reasons[-1] if reasons and run["status"] != "finished" else None
    if as_json:
        typer.echo(json.dumps({"nodes": nodes, "runs": runs}))
        return
    here = [node["name"] for node in nodes if node["here"]]
    console = Console(highlight=False)
    console.print(f"{len(here)} of {len(nodes)} nodes are here: {', '.join(here) or 'none'}", markup=False)
    table = Table("run", "task", "status", "rounds", "since", "reason", box=None)
    for run in runs[:10]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["created"]))
        done = f"{run['rounds_done']}/{run['rounds']}"
        table.add_row(run["run"], run["task"], run["status"], done, since, run["reason"] or "")
    console.print(table)
