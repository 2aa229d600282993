"""Nodes and the tokens that enrol them; who carries a run out."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("public_key", sa.Text, nullable=False, unique=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("last_seen", sa.Float, nullable=True),
    )
    op.create_table(
        "enrolment_tokens",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float, nullable=False),
        sa.Column("used", sa.Float, nullable=True),
        sa.Column("revoked", sa.Float, nullable=True),
        sqlite_autoincrement=True,
    )
    op.add_column("runs", sa.Column("kind", sa.String(16), nullable=False, server_default="simulation"))


def downgrade() -> None:
    op.drop_column("runs", "kind")
    op.drop_table("enrolment_tokens")
    op.drop_table("nodes")
