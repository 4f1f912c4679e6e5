"""What a training step reads, and the version that no step made.

Invariant: a step sees the samples that are bound to its manifest and no others; version 0 is
written once, and is live from then on.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import BatchManifest, PolicyVersion, Sample, VersionState
from archon.storage import tables as t
from archon.storage.database import READY_CHANNEL, notify
from archon.storage.render import values
from archon.storage.rows import fetch_all


@dataclass(frozen=True)
class ManifestRow:
    manifest_id: str
    state: str
    body: str
    digest: str
    reason: str


def body_digest(body: str) -> str:
    """What a manifest's row keeps as ``digest``."""
    return hashlib.sha256(body.encode()).hexdigest()


async def manifest_row(c: AsyncConnection, manifest_id: str) -> ManifestRow | None:
    m = t.manifest.c
    query = sa.select(m.manifest_id, m.state, m.body, m.digest, m.reason)
    row = (await c.execute(query.where(m.manifest_id == manifest_id))).one_or_none()
    return None if row is None else ManifestRow(*row)


async def bound_samples(c: AsyncConnection, manifest_id: str) -> dict[str, Sample]:
    query = sa.select(t.sample).where(
        t.sample.c.manifest_id == manifest_id, t.sample.c.state == "claimed"
    )
    return {s.sample_id: s for s in await fetch_all(c, Sample, query)}


async def rejected_among(c: AsyncConnection, manifest: BatchManifest) -> list[int]:
    """The versions that a manifest rests on and that are rejected by now."""
    v = t.version.c
    query = sa.select(v.version).where(
        v.tenant_id == manifest.tenant_id,
        v.policy_id == manifest.policy_id,
        v.version.in_(manifest.parents),
        v.state.in_([VersionState.REJECTED.value, VersionState.ROLLED_BACK.value]),
    )
    return sorted((await c.execute(query)).scalars())


async def has_version(c: AsyncConnection, tenant_id: str, policy_id: str, version: int) -> bool:
    v = t.version.c
    query = sa.select(v.version).where(
        v.tenant_id == tenant_id, v.policy_id == policy_id, v.version == version
    )
    return (await c.execute(query)).one_or_none() is not None


async def insert_initial_version(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    folder: str,
    checkpoint: dict[str, Any],
    now: datetime,
) -> None:
    """Version 0, live; nothing happens where it is there already."""
    version = PolicyVersion(
        tenant_id=tenant_id,
        policy_id=policy_id,
        version=0,
        parent=None,
        state=VersionState.LIVE,
        checkpoint=folder,
        weights=str(checkpoint["weights"]),
        model_sha256=str(checkpoint["model_sha256"]),
        created_at=now,
        live_at=now,
        decision={"decision": "promoted", "reasons": ["initial weights"]},
    )
    await c.execute(insert(t.version).values(values(version)).on_conflict_do_nothing())
    await notify(c, READY_CHANNEL, f"{tenant_id}/{policy_id}")
