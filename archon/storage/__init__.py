"""Postgres tables and the Parquet lake. The rows are the truth."""

from archon.storage.database import OUTBOX_CHANNEL, READY_CHANNEL, Database, Listener, notify

__all__ = ["OUTBOX_CHANNEL", "READY_CHANNEL", "Database", "Listener", "notify"]
