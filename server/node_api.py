"""The server's HTTP interface for nodes, beside Flower's Fleet protocol on the same port.

Enrolment by one-time token; a session by a request signed with the node's key, and then a bearer token for as long as
the session lasts. Models go out and updates come in as files. Nothing that a node sends is unpickled.
"""

import base64
import hashlib
import threading
import time
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from coterie.core import protocol
from coterie.core.protocol import HOLD_SECONDS
from coterie.server.enrolment import NodeStatus
from coterie.server.federation import Federation
from coterie.server.roster import Session

CLOCK_SECONDS = 300.0
"""How far a node's clock may be off."""

router = APIRouter(prefix="/api/v1", tags=["nodes"])


def federation_of(request: Request) -> Federation:
    """The server's one federation."""
    return request.app.state.federation


def bearer(authorization: Annotated[str, Header()] = "") -> str:
    """The token that a request carries."""
    kind, _, token = authorization.partition(" ")
    if kind.lower() != "bearer" or not token:
        raise HTTPException(401, "this needs a bearer token")
    return token


def session_of(request: Request, token: Annotated[str, Depends(bearer)]) -> Session:
    """The session that a request belongs to."""
    session = federation_of(request).roster.find(token)
    if session is None:
        raise HTTPException(401, "no such session: open a new one")
    return session


TheFederation = Annotated[Federation, Depends(federation_of)]
TheSession = Annotated[Session, Depends(session_of)]


class Enrol(BaseModel):
    """secret: of the token; public_key: PEM."""

    secret: str = Field(max_length=200)
    public_key: str = Field(max_length=2000)


class OpenSession(BaseModel):
    """What a node says when it comes.

    instance: the same for every session of one process. offers: records that it holds, by task.
    """

    public_key: str = Field(max_length=2000)
    timestamp: float
    instance: str = Field(max_length=100)
    offers: dict[str, int]
    version: str = Field(max_length=40)
    protocol: int = 0


@router.get("/health")
def health(request: Request) -> dict[str, str]:
    """Whether the server is there, and its version."""
    return {"status": "ok", "version": request.app.version}


@router.get("/ca")
def ca(request: Request) -> FileResponse:
    """The CA's certificate, for a site that knows its fingerprint and joins."""
    if request.app.state.ca is None:
        raise HTTPException(404, "this server has no CA to show")
    return FileResponse(request.app.state.ca, media_type="application/x-pem-file")


@router.post("/nodes/enrol")
def enrol(body: Enrol, federation: TheFederation) -> dict[str, str]:
    """Trade a one-time token for a place in the federation."""
    node = federation.enrolment.redeem(body.secret, body.public_key.encode())
    federation.superlink.register(node.public_key.encode(), node.name)
    return {"name": node.name}


@router.post("/nodes/session")
async def open_session(
    request: Request, federation: TheFederation, x_coterie_signature: Annotated[str, Header()] = ""
) -> dict[str, str]:
    """Prove a key, by a signature over the request's body; the session's token."""
    data = await request.body()
    try:
        body = OpenSession.model_validate_json(data)
    except ValidationError as error:
        raise HTTPException(422, f"no such request: {error.errors()[0]['msg']}") from None
    node = await run_in_threadpool(federation.enrolment.node_of, body.public_key.encode())
    if node is None:
        raise HTTPException(403, "this key is not enrolled: ask the operator for a token and join")
    if node.status is not NodeStatus.ACTIVE:
        raise HTTPException(403, f"node {node.name!r} is revoked: ask the operator for a new token and join again")
    if not _signed(node.public_key, data, x_coterie_signature):
        raise HTTPException(403, "the signature does not fit the key")
    if body.protocol != protocol.VERSION:
        raise HTTPException(
            409,
            f"node {node.name!r} has coterie {body.version} (protocol {body.protocol}), the server has "
            f"{request.app.version} (protocol {protocol.VERSION}): upgrade the older of the two",
        )
    off = abs(time.time() - body.timestamp)
    if not off <= CLOCK_SECONDS:
        raise HTTPException(403, f"the node's clock is {off:.0f} s off the server's: set it (NTP)")
    if not request.app.state.requests.is_new(data):
        raise HTTPException(403, "this request has been seen before")
    node_id = federation.superlink.register(node.public_key.encode(), node.name)
    session = federation.roster.open(node.name, node_id, body.instance, body.offers, node.tags, body.version)
    # Flower lets a node activate only once it is offline; who opens a session here has proved that it may.
    federation.superlink.release(node_id)
    await run_in_threadpool(federation.enrolment.seen, node.name, time.time())
    return {"token": session.token, "name": node.name, "version": request.app.version}


@router.get("/nodes/wake")
async def wake(federation: TheFederation, session: TheSession, seen: int = 0) -> dict[str, int]:
    """Held open until the node has been woken more than `seen` times."""
    return {"calls": await federation.roster.wait(session, seen, HOLD_SECONDS)}


@router.post("/nodes/leave")
def leave(federation: TheFederation, session: TheSession) -> dict[str, Any]:
    """Say goodbye."""
    federation.roster.close(session.name)
    return {}


@router.get("/models/{digest}")
def model(digest: str, federation: TheFederation, session: TheSession) -> FileResponse:
    """A global model; ranges are served, so a download that was cut goes on."""
    return FileResponse(federation.exchange.model(digest), media_type="application/octet-stream")


@router.put("/updates/{message_id}")
async def update(
    message_id: str,
    request: Request,
    federation: TheFederation,
    session: TheSession,
    start: Annotated[int, Query(ge=0)] = 0,
) -> dict[str, str]:
    """An update, for the message that asked for it; from byte `start` on, where a request before was cut."""
    return {"sha256": await federation.exchange.receive(message_id, session.name, request.stream(), start)}


@router.get("/answers/{message_id}")
def awaited(message_id: str, federation: TheFederation, session: TheSession) -> dict[str, int]:
    """Whether a message's answer is still awaited, and how many bytes of its update are here."""
    return {"received": federation.exchange.received(message_id, session.name)}


class Requests:
    """Which signed requests have been seen: each is good for once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[bytes, float] = {}

    def is_new(self, data: bytes) -> bool:
        """Whether this is the first time; remembered for as long as its timestamp is good."""
        now, digest = time.time(), hashlib.sha256(data).digest()
        with self._lock:
            self._seen = {key: moment for key, moment in self._seen.items() if moment > now - 2 * CLOCK_SECONDS}
            if digest in self._seen:
                return False
            self._seen[digest] = now
            return True


def _signed(public_key: str, data: bytes, signature: str) -> bool:
    key = serialization.load_pem_public_key(public_key.encode())
    try:
        assert isinstance(key, ec.EllipticCurvePublicKey)  # noqa: S101 - enrolment takes no other
        key.verify(base64.b64decode(signature, validate=True), data, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True
