"""Writing to the outbox: what was acknowledged and has still to be told to Temporal.

Invariant: an entry is written, and its wake-up sent, in the transaction of what it announces.
"""

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.storage.database import OUTBOX_CHANNEL

_ENQUEUE = sa.text(
    "WITH told AS (SELECT pg_notify(:channel, '')),"
    " entry AS (INSERT INTO outbox (tenant_id, policy_id, session_id, kind, ref, created_at)"
    " VALUES (:tenant_id, :policy_id, :session_id, :kind, :ref, :now))"
    " SELECT count(*) FROM told"
)


async def enqueue(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    session_id: str,
    kind: str,
    ref: str,
    now: datetime,
) -> None:
    """``kind`` is session, reward or close; ``ref`` the id of the row that it announces."""
    assert kind in ("session", "reward", "close"), kind
    await c.execute(
        _ENQUEUE,
        {
            "channel": OUTBOX_CHANNEL,
            "tenant_id": tenant_id,
            "policy_id": policy_id,
            "session_id": session_id,
            "kind": kind,
            "ref": ref,
            "now": now,
        },
    )
