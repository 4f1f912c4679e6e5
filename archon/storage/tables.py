"""The tables, one per record. Read rows back with :func:`archon.storage.rows.as_record`.

Invariant: every table carries ``tenant_id`` (and ``policy_id`` where it belongs to one).
"""

import sqlalchemy as sa
from sqlmodel import SQLModel

from archon import records as r
from archon.storage.render import table

metadata = SQLModel.metadata

tenant = table(r.Tenant, "tenant", ("tenant_id",))
policy = table(r.Policy, "policy", ("tenant_id", "policy_id"))
key = table(r.Key, "api_key", ("key_hash",), sa.Index("api_key_tenant", "tenant_id"))
group = table(
    r.Group,
    "rollout_group",
    ("group_id",),
    sa.Index("group_by_state", "tenant_id", "policy_id", "state"),
)
session = table(
    r.Session,
    "session",
    ("session_id",),
    sa.Index("session_by_group", "group_id"),
    sa.Index("session_by_state", "tenant_id", "policy_id", "state"),
    # One open episode per slot: two calls that race to open the next one cannot both win.
    sa.Index(
        "session_open_slot",
        "tenant_id",
        "slot",
        unique=True,
        postgresql_where=sa.text("state = 'open' AND slot <> ''"),
    ),
)
interaction = table(
    r.Interaction,
    "interaction",
    ("interaction_id",),
    sa.UniqueConstraint("session_id", "seq", name="interaction_seq"),
    sa.Index("interaction_by_messages", "session_id", "messages_digest"),
)
reward = table(
    r.Reward,
    "reward",
    ("seq",),
    sa.UniqueConstraint("reward_id", name="reward_id_once"),
    sa.Index("reward_by_session", "session_id"),
    sa.Index(
        "reward_idempotency",
        "session_id",
        "idempotency_key",
        unique=True,
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    ),
    identity="seq",
)
returns = table(
    r.Return,
    "interaction_return",
    ("interaction_id", "revision"),
    sa.Index("return_by_session", "session_id"),
)
sample = table(
    r.Sample,
    "sample",
    ("sample_id",),
    sa.Index("sample_by_state", "tenant_id", "policy_id", "state"),
    sa.Index("sample_by_group", "group_id"),
    sa.Index("sample_by_session", "session_id"),
    sa.Index("sample_by_manifest", "manifest_id"),
)
version = table(
    r.PolicyVersion,
    "policy_version",
    ("tenant_id", "policy_id", "version"),
    sa.Index("version_by_manifest", "manifest_id", unique=True),
)
replica = table(r.Replica, "replica", ("replica_id",))
outbox = table(
    r.Outbox,
    "outbox",
    ("outbox_id",),
    sa.Index("outbox_unsent", "outbox_id", postgresql_where=sa.text("sent_at IS NULL")),
    identity="outbox_id",
)
decision = table(
    r.RolloutDecision, "rollout_decision", ("tenant_id", "policy_id", "version", "created_at")
)
# The manifest's body is its canonical JSON as text: its digest must survive the database.
manifest = sa.Table(
    "batch_manifest",
    metadata,
    sa.Column("manifest_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("policy_id", sa.Text, nullable=False),
    sa.Column("base_version", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    sa.Column("metrics", sa.JSON, nullable=True),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
    sa.Index("manifest_by_state", "tenant_id", "policy_id", "state"),
)
compacted = sa.Table(
    "compacted_session",
    metadata,
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("policy_id", sa.Text, nullable=False),
    sa.Column("file", sa.Text, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
)
