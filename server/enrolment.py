"""Enrolment: a one-time token admits a node once, with a public key that was made on its site.

Of a token only the SHA-256 of its secret is kept. Of a node only the public key is known here.
"""

import math
import re
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.core.errors import ConfigError, RunError
from coterie.server import schema
from coterie.server.store import Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LARGEST_KEY = 4096
"""Bytes of PEM; a P-384 key takes 215."""

_NODES, _TOKENS = schema.nodes, schema.enrolment_tokens


class EnrolmentError(RunError):
    """An enrolment is refused; `code` says why to a program."""

    code = "refused"


class UnknownTokenError(EnrolmentError):
    """No token has this secret."""

    code = "unknown_token"


class TokenUsedError(EnrolmentError):
    """A node has enrolled with this token before."""

    code = "token_used"


class TokenExpiredError(EnrolmentError):
    """The token was not used in time."""

    code = "token_expired"


class TokenRevokedError(EnrolmentError):
    """The operator took the token back, or made a newer one for the same name."""

    code = "token_revoked"


class BadKeyError(EnrolmentError):
    """The public key is no EC P-384 key in PEM."""

    code = "bad_key"


class KeyInUseError(EnrolmentError):
    """A node has this public key, or had it when it was revoked."""

    code = "key_in_use"


class NameInUseError(EnrolmentError):
    """An active node has this name."""

    code = "name_in_use"


class UnknownNodeError(EnrolmentError):
    """There is no node of this name."""

    code = "unknown_node"


class NodeStatus(StrEnum):
    """Whether a node may take part."""

    ACTIVE = "active"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Node:
    """A site. public_key: PEM; created, last_seen: seconds since the epoch, last_seen None before the first time."""

    name: str
    public_key: str
    status: NodeStatus
    tags: tuple[str, ...]
    created: float
    last_seen: float | None


class Enrolment:
    """The nodes of a store. All methods raise StorageError when the store fails; any number of processes may use it."""

    def __init__(self, store: Store, fingerprint: str, *, clock: Callable[[], float] = time.time) -> None:
        """fingerprint: of the CA that sites shall pin, "-" without TLS; clock: seconds since the epoch."""
        self._store = store
        self._fingerprint = fingerprint
        self._clock = clock

    def new(
        self, name: str, tags: Sequence[str] = (), valid_seconds: float = 24 * 3600, *, rotate: bool = False
    ) -> str:
        """Make a token "SECRET.FINGERPRINT" that enrols `name` once; earlier unused tokens of the name are revoked.

        rotate: give an active node a new key; the node keeps its tags unless the token has some.
        Raises ConfigError for a wrong argument, NameInUseError for an active node without `rotate`.
        """
        check_name(name)
        _check_tags(tags)
        if not (math.isfinite(valid_seconds) and valid_seconds > 0):
            raise ConfigError(f"a token cannot be valid for {valid_seconds} seconds: give a number above 0")
        secret, now = secrets.token_hex(24), self._clock()
        with self._write() as connection:
            node = _find(connection, _NODES.c.name == name)
            if node and node.status is NodeStatus.ACTIVE and not rotate:
                raise NameInUseError(
                    f"node {name!r} is active: rotate its key, revoke it first, or choose another name"
                )
            _revoke_tokens(connection, name, now)
            row = {"name": name, "hash": _hash(secret), "tags": list(tags), "created": now}
            connection.execute(sa.insert(_TOKENS).values(**row, expires=now + valid_seconds))
        return f"{secret}.{self._fingerprint}"

    def redeem(self, secret: str, public_key_pem: bytes) -> Node:
        """Use a token up: its node is active from now on, with this EC P-384 key in place of any earlier one.

        Raises UnknownTokenError, TokenUsedError, TokenRevokedError, TokenExpiredError, BadKeyError or KeyInUseError;
        a refusal changes nothing, so a token survives a wrong key.
        """
        now = self._clock()
        with self._write() as connection:
            token = _usable_token(connection, secret, now)
            key = _normal(public_key_pem)
            if key is None:
                raise BadKeyError(f"the public key for node {token['name']!r} is no EC P-384 key in PEM: make one anew")
            if _find(connection, _NODES.c.public_key == key):
                raise KeyInUseError(f"the public key for node {token['name']!r} is in use already: make a new key pair")
            node = _enrolled(_find(connection, _NODES.c.name == token["name"]), token, key, now)
            connection.execute(sa.delete(_NODES).where(_NODES.c.name == node.name))
            connection.execute(sa.insert(_NODES).values(**vars(node) | {"tags": list(node.tags)}))
            connection.execute(sa.update(_TOKENS).where(_TOKENS.c.id == token["id"]).values(used=now))
        return node

    def nodes(self) -> list[Node]:
        """All nodes, the revoked ones included, by name."""
        with self._store.connect() as connection:
            return [_node(row) for row in connection.execute(sa.select(_NODES).order_by(_NODES.c.name)).mappings()]

    def revoke(self, name: str) -> None:
        """Shut a node out and revoke its unused tokens; twice is as good as once.

        Raises UnknownNodeError when there is neither a node nor an unused token of that name.
        """
        with self._write() as connection:
            tokens = _revoke_tokens(connection, name, self._clock())
            nodes = connection.execute(
                sa.update(_NODES).where(_NODES.c.name == name).values(status=NodeStatus.REVOKED)
            ).rowcount
            if not tokens and not nodes:
                raise _unknown(name)

    def node_of(self, public_key: bytes) -> Node | None:
        """The node with this PEM key, a revoked one too; None for a key that is unknown, replaced or damaged."""
        key = _normal(public_key)
        if key is None:
            return None
        with self._store.connect() as connection:
            return _find(connection, _NODES.c.public_key == key)

    def seen(self, name: str, time: float) -> None:
        """Note that a node was heard of (seconds since the epoch); the latest time counts. Raises UnknownNodeError."""
        latest = sa.case((_NODES.c.last_seen > time, _NODES.c.last_seen), else_=time)
        with self._store.connect() as connection:
            if not connection.execute(sa.update(_NODES).where(_NODES.c.name == name).values(last_seen=latest)).rowcount:
                raise _unknown(name)

    @contextmanager
    def _write(self) -> Generator[sa.Connection]:
        """A transaction that nobody else writes in, from its first read on; it survives a power cut as well."""
        with self._store.connect() as connection:
            self._store.database.flush(connection)
            self._store.database.lock(connection)
            yield connection


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` can name a node."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a node: use 1 to 64 letters, digits, dots, underscores and hyphens of ASCII, "
            f"a letter or digit first"
        )


def _check_tags(tags: Sequence[str]) -> None:
    if isinstance(tags, str):
        raise ConfigError(f"tags are a list of texts, got the text {tags!r}: put it in a list")
    for tag in tags:
        if not (0 < len(tag) <= 64 and tag.isprintable() and tag == tag.strip()):
            raise ConfigError(f"tag {tag!r} will not do: use 1 to 64 printable characters, no space at either end")


def _usable_token(connection: sa.Connection, secret: str, now: float) -> sa.RowMapping:
    remedy = "ask the operator for a new one"
    token = connection.execute(sa.select(_TOKENS).where(_TOKENS.c.hash == _hash(secret))).mappings().first()
    if token is None:
        raise UnknownTokenError(f"there is no such enrolment token: check that it was copied whole, or {remedy}")
    what = f"the enrolment token for node {token['name']!r}"
    if token["used"] is not None:
        raise TokenUsedError(f"{what} was used at {_text(token['used'])}: {remedy}")
    if token["revoked"] is not None:
        raise TokenRevokedError(f"{what} was revoked at {_text(token['revoked'])}: {remedy}")
    if token["expires"] <= now:
        raise TokenExpiredError(f"{what} expired at {_text(token['expires'])}: {remedy}")
    return token


def _enrolled(earlier: Node | None, token: sa.RowMapping, key: str, now: float) -> Node:
    tags, created, last_seen = tuple(token["tags"]), now, None
    if earlier and earlier.status is NodeStatus.ACTIVE:
        tags, created, last_seen = tags or earlier.tags, earlier.created, earlier.last_seen
    return Node(token["name"], key, NodeStatus.ACTIVE, tags, created, last_seen)


def _revoke_tokens(connection: sa.Connection, name: str, now: float) -> int:
    """Revoke the unused tokens of a name; returns how many there were."""
    unused = (_TOKENS.c.name == name) & _TOKENS.c.used.is_(None) & _TOKENS.c.revoked.is_(None)
    return connection.execute(sa.update(_TOKENS).where(unused).values(revoked=now)).rowcount


def _find(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> Node | None:
    row = connection.execute(sa.select(_NODES).where(condition)).mappings().first()
    return _node(row) if row else None


def _node(row: sa.RowMapping) -> Node:
    values: dict[str, Any] = {str(key): value for key, value in row.items()}
    values |= {"status": NodeStatus(values["status"]), "tags": tuple(values["tags"])}
    return Node(**values)


def _normal(pem: bytes) -> str | None:
    """The one spelling under which a P-384 public key is stored; None for anything else."""
    if len(pem) > _LARGEST_KEY:
        return None
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        return None
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


def _hash(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _unknown(name: str) -> UnknownNodeError:
    return UnknownNodeError(f"there is no node {name!r}: list the nodes for the names there are")
