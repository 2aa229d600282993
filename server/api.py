"""The server's HTTP interface: the operator's part, and the whole application.

The operator has one bearer token, kept in the home directory and readable by its owner only.
"""

import asyncio
import hmac
import importlib.metadata
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from coterie.core.errors import ConfigError, CoterieError, RunNotFoundError, StorageError
from coterie.core.protocol import HOLD_SECONDS
from coterie.server import node_api
from coterie.server.enrolment import EnrolmentError
from coterie.server.exchange import ExchangeError
from coterie.server.federation import Federation
from coterie.server.node_api import TheFederation, bearer
from coterie.server.store import RunRecord, jsonable


def operate(request: Request, token: Annotated[str, Depends(bearer)]) -> None:
    """Let only the operator through."""
    if not hmac.compare_digest(token.encode(), request.app.state.operator.encode()):
        raise HTTPException(403, "that is not the operator's token")


router = APIRouter(prefix="/api/v1", tags=["operator"], dependencies=[Depends(operate)])


class Submit(BaseModel):
    """config: a run file's text."""

    config: str = Field(max_length=1_000_000)


class NewToken(BaseModel):
    """A one-time token for a node of that name."""

    name: str
    tags: list[str] = []
    valid_seconds: float = Field(default=24 * 3600.0, gt=0, allow_inf_nan=False)
    rotate: bool = False


@router.get("/nodes")
def nodes(federation: TheFederation) -> list[dict[str, Any]]:
    """All enrolled nodes, and which are here."""
    here = {session.name: session for session in federation.roster.here()}
    return [
        {
            "name": node.name,
            "status": node.status,
            "tags": list(node.tags),
            "last_seen": node.last_seen,
            "here": node.name in here,
            "offers": dict(here[node.name].offers) if node.name in here else {},
            "version": here[node.name].version if node.name in here else None,
        }
        for node in federation.enrolment.nodes()
    ]


@router.post("/tokens")
def new_token(body: NewToken, federation: TheFederation) -> dict[str, str]:
    """A token for a site to join with, once."""
    return {"token": federation.enrolment.new(body.name, body.tags, body.valid_seconds, rotate=body.rotate)}


@router.post("/nodes/{name}/revoke")
def revoke(name: str, federation: TheFederation) -> dict[str, Any]:
    """Refuse a node from now on."""
    federation.revoke(name)
    return {}


@router.post("/runs")
def submit(body: Submit, federation: TheFederation) -> dict[str, str]:
    """Queue a run."""
    return {"run": federation.submit(body.config)}


@router.get("/runs")
def runs(federation: TheFederation) -> list[dict[str, Any]]:
    """All runs, the newest first."""
    return [_told(run) for run in federation.store.runs()]


@router.get("/runs/{run}")
def one_run(run: str, federation: TheFederation) -> dict[str, Any]:
    """One run, by its id, the beginning of it, or "last"."""
    record = federation.store.find(run)
    return _told(record) | {"config": record.config}


@router.get("/runs/{run}/events")
async def events(
    run: str, federation: TheFederation, after: int = 0, wait: Annotated[float, Query(ge=0, le=HOLD_SECONDS)] = 0.0
) -> list[dict[str, Any]]:
    """A run's events beyond `after`; held open for up to `wait` seconds until there is one."""
    run_id = (await run_in_threadpool(federation.store.find, run)).id
    end = time.monotonic() + wait
    while not (found := await run_in_threadpool(federation.store.events, run_id, after)) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return [{"seq": e.seq, "time": e.time, "kind": e.kind, "round": e.round, "data": jsonable(e.data)} for e in found]


@router.post("/runs/{run}/cancel")
def cancel(run: str, federation: TheFederation) -> dict[str, Any]:
    """End a run for good."""
    federation.cancel(federation.store.find(run).id)
    return {}


def make_api(federation: Federation, operator: str, ca: Path | None = None) -> FastAPI:
    """The application. operator: the token that the operator's requests carry. ca: the certificate that nodes pin."""
    app = FastAPI(title="Coterie", version=importlib.metadata.version("coterie"), docs_url=None, redoc_url=None)
    app.state.federation = federation
    app.state.operator = operator
    app.state.ca = ca
    app.state.requests = node_api.Requests()
    app.add_exception_handler(CoterieError, _refuse)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.include_router(node_api.router)
    app.include_router(router)
    return app


def operator_token(home: Path) -> str:
    """The operator's token, made on the first call."""
    path = home / "operator.token"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
            file.write(token)
        part.replace(path)
        return token


ASGI = Callable[[Any, Any, Any], Awaitable[None]]


def one_port(api: ASGI, fleet: ASGI) -> ASGI:
    """Both applications on one port: Flower's Fleet protocol under /v1/, ours for everything else."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        flowers = scope["type"] == "lifespan" or scope["path"].startswith("/v1/")
        await (fleet if flowers else api)(scope, receive, send)

    return application


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """An error of ours as its text, never a traceback."""
    if isinstance(error, ExchangeError):
        status = error.status
    elif isinstance(error, RunNotFoundError):
        status = 404
    elif isinstance(error, StorageError):  # may be good again in a moment
        status = 503
    else:
        status = 400 if isinstance(error, ConfigError | EnrolmentError) else 409
    return JSONResponse({"code": getattr(error, "code", type(error).__name__), "detail": str(error)}, status)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    """What does not fit, without what was sent: it may hold a secret, or bytes that are no text."""
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for no other
    wrong = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()[:5]]
    detail = "; ".join(wrong).encode("utf-8", "replace").decode()
    return JSONResponse({"code": "malformed", "detail": detail[:1000]}, 422)


def _told(run: RunRecord) -> dict[str, Any]:
    return {
        "run": run.id,
        "name": run.name,
        "kind": run.kind,
        "task": run.task,
        "strategy": run.strategy,
        "status": run.status,
        "created": run.created,
        "rounds": run.rounds,
        "rounds_done": run.rounds_done,
        "result": run.result,
    }
