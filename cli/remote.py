"""Talking to a server as its operator."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from coterie.core.errors import ConfigError, CoterieError, RunError
from coterie.core.events import Event, EventKind
from coterie.core.protocol import HOLD_SECONDS

ServerOption = Annotated[
    str | None,
    typer.Option("--server", envvar="COTERIE_SERVER", help="The server's URL; default the one that runs under --home."),
]

_ENDS = (EventKind.RUN_FINISHED, EventKind.RUN_FAILED)


class Remote:
    """A server's operator interface. Raises CoterieError with the server's words."""

    def __init__(self, server: str | None, home: Path) -> None:
        """The operator's token is $COTERIE_TOKEN, or that of the server under `home`; likewise its CA ($COTERIE_CA)."""
        url = server or _read(home / "server" / "url", "name one with --server, or start one with `coterie server`")
        token = os.environ.get("COTERIE_TOKEN") or _read(home / "operator.token", "set COTERIE_TOKEN")
        ca = os.environ.get("COTERIE_CA") or str(home / "tls" / "ca.pem")
        verify = ca if url.startswith("https") and Path(ca).exists() else True
        self._url = url
        self._client = httpx.Client(
            base_url=url, verify=verify, headers={"authorization": f"Bearer {token}"}, timeout=HOLD_SECONDS + 20
        )

    def get(self, path: str, **params: Any) -> Any:
        return self._send("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._send("POST", path, json=dict(body or {}))

    def events(self, run: str) -> Iterator[Event]:
        """A run's events as they come, until it ends. Goes on when the server is away for a while, or drained."""
        after, patience = 0, time.monotonic() + 120.0
        while True:
            try:
                found = self.get(f"/runs/{run}/events", after=after, wait=HOLD_SECONDS)
                patience = time.monotonic() + 120.0
            except _AwayError:
                if time.monotonic() > patience:
                    raise
                time.sleep(0.5)
                continue
            for row in found:
                event = Event(row["seq"], row["time"], EventKind(row["kind"]), row["round"], row["data"])
                after = event.seq
                yield event
                if event.kind in _ENDS:
                    return

    def _send(self, method: str, path: str, **more: Any) -> Any:
        try:
            response = self._client.request(method, f"/api/v1{path}", **more)
        except httpx.HTTPError as error:
            raise _AwayError(f"no answer from {self._url}: {type(error).__name__}: {error}") from None
        if response.is_error:
            try:
                body = response.json()
                text, code = str(body["detail"]), str(body.get("code", ""))
            except (ValueError, KeyError, TypeError):
                text, code = f"{self._url} answers {response.status_code}", ""
            if response.status_code >= 500:  # the server's database is away, or a proxy cannot reach the server
                raise _AwayError(text)
            raise (ConfigError if code == "ConfigError" else CoterieError)(text)
        return response.json()


class _AwayError(RunError):
    """The server does not answer."""


def _read(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(f"there is no {path}: {remedy}") from None
