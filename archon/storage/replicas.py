"""Replicas: who may touch one, and what each was last proven to serve.

Invariant: ``version`` and ``instance`` of a row are written together, under the replica's lock, by
whoever has just proven them; taken away by a compare-and-set, so a newer proof is never undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import Replica, VersionState
from archon.storage import tables as t
from archon.storage.rows import as_record, fetch_all, fetch_one

_REJECTED = (VersionState.REJECTED.value, VersionState.ROLLED_BACK.value)


@dataclass(frozen=True)
class Standing:
    """A replica, whether what it was proven for is rejected, and its policy's live version."""

    replica: Replica
    rejected: bool
    live: int | None

    @property
    def current(self) -> bool:
        """What the row says is fit to be served: no less than live, and not rejected."""
        version = self.replica.version
        return version is not None and not self.rejected and version >= (self.live or 0)


async def list_replicas(c: AsyncConnection, tenant_id: str, policy_id: str) -> list[Replica]:
    """The replicas of a policy, those that serve first, else in the order of their ids."""
    r = t.replica.c
    query = sa.select(t.replica).where(r.tenant_id == tenant_id, r.policy_id == policy_id)
    return await fetch_all(c, Replica, query.order_by(r.version.is_(None), r.replica_id))


async def get_replica(c: AsyncConnection, replica_id: str) -> Replica | None:
    return await fetch_one(
        c, Replica, sa.select(t.replica).where(t.replica.c.replica_id == replica_id)
    )


async def standings(c: AsyncConnection, replica_id: str | None = None) -> list[Standing]:
    """All replicas (or one) with what the keeper needs to judge them."""
    own, live = t.version.alias("own"), t.version.alias("live")
    r = t.replica.c

    def same_policy(v: sa.FromClause) -> sa.ColumnElement[bool]:
        return sa.and_(v.c.tenant_id == r.tenant_id, v.c.policy_id == r.policy_id)

    joined = t.replica.outerjoin(own, same_policy(own) & (own.c.version == r.version)).outerjoin(
        live, same_policy(live) & (live.c.state == VersionState.LIVE.value)
    )
    query = sa.select(
        t.replica,
        sa.func.coalesce(own.c.state.in_(_REJECTED), False).label("rejected"),
        live.c.version.label("live"),
    ).select_from(joined)
    if replica_id is not None:
        query = query.where(r.replica_id == replica_id)
    return [
        Standing(as_record(Replica, row), row.rejected, row.live) for row in await c.execute(query)
    ]


async def lock_replica(c: AsyncConnection, replica_id: str) -> None:
    """Nobody else changes this replica's weights until the transaction ends."""
    await c.execute(sa.select(sa.func.pg_advisory_xact_lock(_key(replica_id))))


async def try_lock_replica(c: AsyncConnection, replica_id: str) -> bool:
    """The same without waiting; False where somebody has it."""
    locked = await c.execute(sa.select(sa.func.pg_try_advisory_xact_lock(_key(replica_id))))
    return bool(locked.scalar_one())


def _key(replica_id: str) -> sa.ColumnElement[int]:
    return sa.func.hashtextextended(f"archon.replica.{replica_id}", 0)


async def set_proven(
    c: AsyncConnection, replica_id: str, version: int, instance: str, now: datetime
) -> None:
    await c.execute(
        sa.update(t.replica)
        .where(t.replica.c.replica_id == replica_id)
        .values(version=version, instance=instance, seen_at=now)
    )


async def set_unproven(c: AsyncConnection, replica: Replica) -> bool:
    """Take back what ``replica`` says is proven; False where the row says something else by now."""
    r = t.replica.c
    result = await c.execute(
        sa.update(t.replica)
        .where(
            r.replica_id == replica.replica_id,
            r.version == replica.version,
            r.instance == replica.instance,
        )
        .values(version=None)
    )
    return result.rowcount == 1


async def set_seen(c: AsyncConnection, replica_ids: Sequence[str], now: datetime) -> None:
    await c.execute(
        sa.update(t.replica).where(t.replica.c.replica_id.in_(replica_ids)).values(seen_at=now)
    )
