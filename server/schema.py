"""The tables of the run store, as the newest migration leaves them (a test compares the two)."""

from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, MetaData, String, Table, Text

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("task", Text, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("status", String(16), nullable=False),  # a RunStatus
    Column("created", Float, nullable=False),  # seconds since the epoch
    Column("updated", Float, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("rounds_done", Integer, nullable=False),
    Column("config", Text, nullable=False),  # the resolved run file, TOML
    Column("result", JSON, nullable=True),  # metrics and sha256 of a finished run
    Column("kind", String(16), nullable=False, server_default="simulation"),  # a RunKind
)

events = Table(
    "events",
    metadata,
    Column("run_id", String(64), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("round", Integer, nullable=False),
    Column("data", JSON, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("public_key", Text, nullable=False, unique=True),  # PEM
    Column("status", String(16), nullable=False),  # a NodeStatus
    Column("tags", JSON, nullable=False),  # a list of strings
    Column("created", Float, nullable=False),
    Column("last_seen", Float, nullable=True),
)

enrolment_tokens = Table(
    "enrolment_tokens",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", String(64), nullable=False),  # of the node that the token makes
    Column("hash", String(64), nullable=False, unique=True),  # sha256 of the secret, which is kept nowhere
    Column("tags", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("used", Float, nullable=True),
    Column("revoked", Float, nullable=True),
    sqlite_autoincrement=True,
)
