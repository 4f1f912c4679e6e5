"""The tables of archon/storage/tables.py. A test compares the two."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade():
    op.create_table(
        "api_key",
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("key_hash"),
    )
    op.create_index("api_key_tenant", "api_key", ["tenant_id"], unique=False)
    op.create_table(
        "batch_manifest",
        sa.Column("manifest_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("base_version", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("manifest_id"),
    )
    op.create_index(
        "manifest_by_state", "batch_manifest", ["tenant_id", "policy_id", "state"], unique=False
    )
    op.create_table(
        "compacted_session",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("session_id"),
    )
    op.create_table(
        "interaction",
        sa.Column("interaction_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("request_digest", sa.Text(), nullable=False),
        sa.Column("messages_digest", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_length", sa.BigInteger(), nullable=False),
        sa.Column("prompt_sha256", sa.Text(), nullable=False),
        sa.Column("output_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("support", sa.LargeBinary(), nullable=False),
        sa.Column("versions", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("sampling", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("prefix_parent", sa.Text(), nullable=True),
        sa.Column("previous", sa.Text(), nullable=True),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("evidence_gaps", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("codec_digest", sa.Text(), nullable=False),
        sa.Column("messages", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("answer", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("interaction_id"),
        sa.UniqueConstraint("session_id", "seq", name="interaction_seq"),
    )
    op.create_index(
        "interaction_by_messages", "interaction", ["session_id", "messages_digest"], unique=False
    )
    op.create_table(
        "interaction_return",
        sa.Column("interaction_id", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("reward_seq", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("interaction_id", "revision"),
    )
    op.create_index("return_by_session", "interaction_return", ["session_id"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("outbox_id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("outbox_id"),
    )
    op.create_index(
        "outbox_unsent",
        "outbox",
        ["outbox_id"],
        unique=False,
        postgresql_where=sa.text("sent_at IS NULL"),
    )
    op.create_table(
        "policy",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("settings", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("baseline", sa.Double(), nullable=True),
        sa.Column("baseline_weight", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "policy_id"),
    )
    op.create_table(
        "policy_version",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("model_sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("manifest_id", sa.Text(), nullable=True),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("live_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("decision", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "policy_id", "version"),
    )
    op.create_index("version_by_manifest", "policy_version", ["manifest_id"], unique=True)
    op.create_table(
        "replica",
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("replica_id"),
    )
    op.create_table(
        "reward",
        sa.Column("reward_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("component", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("interaction_id", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("rejected", sa.Text(), nullable=False),
        sa.Column("raw", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("reward_id", name="reward_id_once"),
    )
    op.create_index("reward_by_session", "reward", ["session_id"], unique=False)
    op.create_index(
        "reward_idempotency",
        "reward",
        ["session_id", "idempotency_key"],
        unique=True,
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_table(
        "rollout_decision",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("reasons", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("probes", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "policy_id", "version", "created_at"),
    )
    op.create_table(
        "rollout_group",
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("group_id"),
    )
    op.create_index(
        "group_by_state", "rollout_group", ["tenant_id", "policy_id", "state"], unique=False
    )
    op.create_table(
        "sample",
        sa.Column("sample_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("interactions", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("n_tokens", sa.BigInteger(), nullable=False),
        sa.Column("n_trainable", sa.BigInteger(), nullable=False),
        sa.Column("min_version", sa.BigInteger(), nullable=False),
        sa.Column("max_version", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("mask", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("versions", sa.LargeBinary(), nullable=False),
        sa.Column("interaction", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("manifest_id", sa.Text(), nullable=True),
        sa.Column("drop_reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sample_id"),
    )
    op.create_index("sample_by_group", "sample", ["group_id"], unique=False)
    op.create_index("sample_by_manifest", "sample", ["manifest_id"], unique=False)
    op.create_index("sample_by_session", "sample", ["session_id"], unique=False)
    op.create_index("sample_by_state", "sample", ["tenant_id", "policy_id", "state"], unique=False)
    op.create_table(
        "session",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("policy_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("slot", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("close_reason", sa.Text(), nullable=False),
        sa.Column("close_after", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sealed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sealed_reward_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_call_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("session_id"),
    )
    op.create_index("session_by_group", "session", ["group_id"], unique=False)
    op.create_index(
        "session_by_state", "session", ["tenant_id", "policy_id", "state"], unique=False
    )
    op.create_index(
        "session_open_slot",
        "session",
        ["tenant_id", "slot"],
        unique=True,
        postgresql_where=sa.text("state = 'open' AND slot <> ''"),
    )
    op.create_table(
        "tenant",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id"),
    )


def downgrade():
    op.drop_table("tenant")
    op.drop_index(
        "session_open_slot",
        table_name="session",
        postgresql_where=sa.text("state = 'open' AND slot <> ''"),
    )
    op.drop_index("session_by_state", table_name="session")
    op.drop_index("session_by_group", table_name="session")
    op.drop_table("session")
    op.drop_index("sample_by_state", table_name="sample")
    op.drop_index("sample_by_session", table_name="sample")
    op.drop_index("sample_by_manifest", table_name="sample")
    op.drop_index("sample_by_group", table_name="sample")
    op.drop_table("sample")
    op.drop_index("group_by_state", table_name="rollout_group")
    op.drop_table("rollout_group")
    op.drop_table("rollout_decision")
    op.drop_index(
        "reward_idempotency",
        table_name="reward",
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.drop_index("reward_by_session", table_name="reward")
    op.drop_table("reward")
    op.drop_table("replica")
    op.drop_index("version_by_manifest", table_name="policy_version")
    op.drop_table("policy_version")
    op.drop_table("policy")
    op.drop_index("outbox_unsent", table_name="outbox", postgresql_where=sa.text("sent_at IS NULL"))
    op.drop_table("outbox")
    op.drop_index("return_by_session", table_name="interaction_return")
    op.drop_table("interaction_return")
    op.drop_index("interaction_by_messages", table_name="interaction")
    op.drop_table("interaction")
    op.drop_table("compacted_session")
    op.drop_index("manifest_by_state", table_name="batch_manifest")
    op.drop_table("batch_manifest")
    op.drop_index("api_key_tenant", table_name="api_key")
    op.drop_table("api_key")
