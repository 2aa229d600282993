"""The server's process: one port for Flower's Fleet protocol and ours, runs on a thread of their own."""

import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from coterie.core.errors import ConfigError, RunError
from coterie.server.api import make_api, one_port, operator_token
from coterie.server.certificates import Certificates, ensure
from coterie.server.federation import Federation
from coterie.server.run_directory import RunDirectory

NO_TLS = "-"


@dataclass(frozen=True)
class Address:
    """Where a server listens, and its URL."""

    host: str
    port: int
    insecure: bool

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.insecure else 'https'}://{host}:{self.port}"


def serve(
    home: Path,
    host: str,
    port: int,
    names: Sequence[str] = (),
    insecure: bool = False,
    certificates: Certificates | None = None,
    database: str | None = None,
    started: Callable[[Address], None] = lambda address: None,
) -> None:
    """Serve until interrupted; runs that are going on are left resumable.

    port: 0 takes a free one. names: under which nodes reach this server, for its certificate. certificates: the
    operator's own; default is a CA made here. database: URL of a PostgreSQL; default SQLite under the home. Raises
    ConfigError for `insecure` beyond loopback, RunError when the port is taken or another server has this home or
    database.
    """
    if insecure and not _is_loopback(host):
        raise ConfigError(f"--insecure with --host {host}: without TLS a server listens on loopback only")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.closing(RunDirectory(home / "server")))
        if not insecure and certificates is None:
            own = socket.gethostname()
            own_names = [own] if re.fullmatch(r"[A-Za-z0-9.-]+", own) else []  # a machine may be called anything
            certificates = ensure(home / "tls", [*names, *([] if _is_any(host) else [host]), *own_names])
        federation = Federation(home, certificates.fingerprint if certificates else NO_TLS, database)
        held.enter_context(federation.store.database.served())
        api = make_api(federation, operator_token(home), certificates.ca if certificates else None)
        config = uvicorn.Config(
            one_port(api, federation.superlink.fleet),
            host=host,
            port=port,
            log_level="warning",
            lifespan="on",
            ws="none",
            ssl_certfile=str(certificates.certificate) if certificates else None,
            ssl_keyfile=str(certificates.key) if certificates else None,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,  # a handshake costs more than an idle connection
        )
        listening = _listen(host, port)
        try:
            federation.start()
            started(Address(host, listening.getsockname()[1], insecure))
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn ends in order and raises it afterwards
                _Server(config, federation).run(sockets=[listening])
        finally:
            federation.stop()
            listening.close()


class _Server(uvicorn.Server):
    """Lets go of the requests that nodes hold open before it waits for the others to end."""

    def __init__(self, config: uvicorn.Config, federation: Federation) -> None:
        super().__init__(config)
        self._federation = federation

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._federation.roster.close_all()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise RunError(f"cannot listen on {host} port {port}: {error.strerror}: choose another --port") from None
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


logging.getLogger("flwr").setLevel(logging.WARNING)
