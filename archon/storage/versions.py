"""The chain of a policy's versions, and the commit that makes the next one.

Invariant: a version is inserted only where its manifest is claimed and its base is still the head,
in one transaction with the samples' and the manifest's end. A repeated commit finds what the first
one did; a zombie's changes nothing.
"""

import math
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import (
    BatchManifest,
    GroupState,
    ManifestState,
    PolicyVersion,
    Reward,
    SampleState,
    VersionState,
    loads,
)
from archon.records.messages import StepResult, Trained
from archon.storage import tables as t
from archon.storage.credit import counted
from archon.storage.database import READY_CHANNEL, notify
from archon.storage.rows import fetch_all, insert_record

BASELINE_MEMORY = 0.9
"""How much of the running baseline's weight is left after each step."""

_CHAIN = sa.text("""
WITH RECURSIVE chain AS (
  SELECT version, parent, state, checkpoint, model_sha256, 0 AS age FROM policy_version
  WHERE tenant_id = :tenant_id AND policy_id = :policy_id AND version = (
    SELECT max(version) FROM policy_version
    WHERE tenant_id = :tenant_id AND policy_id = :policy_id
      AND state NOT IN ('rejected', 'rolled_back'))
  UNION ALL
  SELECT v.version, v.parent, v.state, v.checkpoint, v.model_sha256, chain.age + 1
  FROM policy_version v JOIN chain ON v.version = chain.parent
  WHERE v.tenant_id = :tenant_id AND v.policy_id = :policy_id AND chain.age < :depth
)
SELECT version, state, checkpoint, model_sha256 FROM chain ORDER BY age
""")


class UnknownPolicy(ValueError):
    """There is no policy of that name."""


class UnknownManifest(ValueError):
    """There is no manifest of that id."""


@dataclass(frozen=True)
class Chain:
    """Versions from the head back along their parents; ``live`` is −1 where it is further back."""

    versions: tuple[int, ...]
    live: int
    checkpoint: str
    model_sha256: str

    @property
    def head(self) -> int:
        return self.versions[0]

    @property
    def ahead(self) -> int:
        """Steps of the head past live."""
        return self.versions.index(self.live) if self.live >= 0 else len(self.versions)

    def age(self, version: int) -> int | None:
        """Staleness of a token of ``version`` in a step on the head; None: not in the chain."""
        return self.versions.index(version) if version in self.versions else None


@dataclass(frozen=True)
class ManifestRow:
    manifest_id: str
    tenant_id: str
    policy_id: str
    state: str
    base_version: int
    reason: str
    body: str


@dataclass(frozen=True)
class PolicyRow:
    settings: dict[str, Any]
    baseline: float | None
    baseline_weight: float


async def lock_policy(c: AsyncConnection, tenant_id: str, policy_id: str) -> PolicyRow:
    """Claims, commits, promotions and rejections of one policy come one after the other."""
    p = t.policy.c
    query = sa.select(p.settings, p.baseline, p.baseline_weight).where(
        p.tenant_id == tenant_id, p.policy_id == policy_id
    )
    row = (await c.execute(query.with_for_update())).one_or_none()
    if row is None:
        raise UnknownPolicy(f"there is no policy {tenant_id}/{policy_id}")
    return PolicyRow(*row)


async def read_chain(
    c: AsyncConnection, tenant_id: str, policy_id: str, depth: int
) -> Chain | None:
    """The head and ``depth`` versions before it; None where no version is there yet."""
    values = {"tenant_id": tenant_id, "policy_id": policy_id, "depth": depth}
    rows = (await c.execute(_CHAIN, values)).all()
    if not rows:
        return None
    live = next((row.version for row in rows if row.state == VersionState.LIVE.value), -1)
    versions = tuple(row.version for row in rows)
    return Chain(versions, live, rows[0].checkpoint, rows[0].model_sha256)


async def read_manifest(
    c: AsyncConnection, manifest_id: str, *, lock: bool = False
) -> ManifestRow | None:
    m = t.manifest.c
    query = sa.select(
        m.manifest_id, m.tenant_id, m.policy_id, m.state, m.base_version, m.reason, m.body
    ).where(m.manifest_id == manifest_id)
    row = (await c.execute(query.with_for_update() if lock else query)).one_or_none()
    return None if row is None else ManifestRow(*row)


async def locked_manifest(c: AsyncConnection, manifest_id: str) -> ManifestRow:
    """The manifest under its policy's lock, which is always taken first."""
    found = await read_manifest(c, manifest_id)
    if found is None:
        raise UnknownManifest(f"there is no manifest {manifest_id}")
    await lock_policy(c, found.tenant_id, found.policy_id)
    row = await read_manifest(c, manifest_id, lock=True)
    assert row is not None, f"manifest {manifest_id} is never deleted"
    return row


async def commit(c: AsyncConnection, trained: Trained, now: datetime) -> StepResult:
    """Make the trained checkpoint the policy's next version, or say why it is not."""
    row = await locked_manifest(c, trained.manifest_id)
    if row.state != ManifestState.CLAIMED:
        return await step_result(c, row)
    chain = await read_chain(c, row.tenant_id, row.policy_id, 0)
    if chain is None or chain.head != row.base_version:
        return await end_manifest(
            c, row, "base_rejected", now, samples=SampleState.FREE, groups=GroupState.READY
        )
    manifest = loads(BatchManifest, row.body)
    number = await _next_number(c, row)
    metrics = {name: value for name, value in trained.metrics.items() if math.isfinite(value)}
    metrics |= {f"seconds_{name}": value for name, value in trained.spans.items()}
    metrics |= await _reward_metrics(c, manifest)
    version = PolicyVersion(
        tenant_id=row.tenant_id,
        policy_id=row.policy_id,
        version=number,
        parent=row.base_version,
        state=VersionState.TRAINED,
        checkpoint=trained.checkpoint,
        weights=trained.weights,
        model_sha256=trained.model_sha256,
        created_at=now,
        manifest_id=row.manifest_id,
        metrics=metrics,
    )
    await c.execute(insert_record(t.version, version))
    await _end_samples(c, row, SampleState.TRAINED, "")
    await _end_groups(c, row, GroupState.DONE)
    await _set_manifest(c, row, ManifestState.COMMITTED, "", now, metrics)
    await _move_baseline(c, manifest)
    await notify(c, READY_CHANNEL, f"{row.tenant_id}/{row.policy_id}")
    return StepResult(row.manifest_id, "committed", number, "", metrics.get("reward_mean"))


async def step_result(c: AsyncConnection, row: ManifestRow) -> StepResult:
    """What a manifest's row says of its step."""
    if row.state == ManifestState.COMMITTED:
        v = t.version.c
        query = sa.select(v.version, v.metrics).where(v.manifest_id == row.manifest_id)
        made = (await c.execute(query)).one()
        mean = made.metrics.get("reward_mean")
        return StepResult(row.manifest_id, "committed", made.version, "", mean)
    if row.state == ManifestState.DROPPED:
        outcome = "empty_signal" if row.reason.startswith("empty_signal") else "dropped"
        return StepResult(row.manifest_id, outcome, reason=row.reason)
    outcome = "failed" if row.state == ManifestState.FAILED else "running"
    return StepResult(row.manifest_id, outcome, reason=row.reason)


async def drop(c: AsyncConnection, manifest_id: str, reason: str, now: datetime) -> StepResult:
    """Give the step up: its samples are dropped for ``reason``, and counted."""
    row = await locked_manifest(c, manifest_id)
    if row.state not in (ManifestState.CLAIMED, ManifestState.FAILED):
        return await step_result(c, row)
    return await end_manifest(
        c, row, reason, now, samples=SampleState.DROPPED, groups=GroupState.DONE
    )


async def release(c: AsyncConnection, manifest_id: str, reason: str, now: datetime) -> StepResult:
    """Give the step up and its samples back: the next claim takes what is still fresh."""
    row = await locked_manifest(c, manifest_id)
    if row.state not in (ManifestState.CLAIMED, ManifestState.FAILED):
        return await step_result(c, row)
    return await end_manifest(
        c, row, reason, now, samples=SampleState.FREE, groups=GroupState.READY
    )


async def fail(c: AsyncConnection, manifest_id: str, reason: str) -> StepResult:
    """claimed → failed; the samples stay bound until a retry or a drop."""
    row = await locked_manifest(c, manifest_id)
    if row.state == ManifestState.CLAIMED:
        await _set_manifest(c, row, ManifestState.FAILED, reason, None, None)
        return StepResult(manifest_id, "failed", reason=reason)
    return await step_result(c, row)


async def retry(c: AsyncConnection, manifest_id: str) -> StepResult:
    """failed → claimed, the same manifest."""
    row = await locked_manifest(c, manifest_id)
    if row.state == ManifestState.FAILED:
        await _set_manifest(c, row, ManifestState.CLAIMED, "", None, None)
        return StepResult(manifest_id, "running")
    return await step_result(c, row)


async def end_manifest(
    c: AsyncConnection,
    row: ManifestRow,
    reason: str,
    now: datetime,
    *,
    samples: SampleState,
    groups: GroupState,
) -> StepResult:
    """claimed or failed → dropped, without a version."""
    await _end_groups(c, row, groups)
    await _end_samples(c, row, samples, reason)
    await _set_manifest(c, row, ManifestState.DROPPED, reason, now, None)
    await notify(c, READY_CHANNEL, f"{row.tenant_id}/{row.policy_id}")
    outcome = "empty_signal" if reason.startswith("empty_signal") else "dropped"
    return StepResult(row.manifest_id, outcome, reason=reason)


async def _next_number(c: AsyncConnection, row: ManifestRow) -> int:
    v = t.version.c
    query = sa.select(sa.func.max(v.version)).where(
        v.tenant_id == row.tenant_id, v.policy_id == row.policy_id
    )
    return int((await c.execute(query)).scalar_one()) + 1


async def _end_samples(
    c: AsyncConnection, row: ManifestRow, state: SampleState, reason: str
) -> None:
    s = t.sample.c
    changes: dict[str, object] = {"state": state.value, "drop_reason": reason}
    if state == SampleState.FREE:
        changes = {"state": state.value, "manifest_id": None}
    await c.execute(
        sa.update(t.sample)
        .where(s.manifest_id == row.manifest_id, s.state == SampleState.CLAIMED.value)
        .values(changes)
    )


async def _end_groups(c: AsyncConnection, row: ManifestRow, state: GroupState) -> None:
    groups = sa.select(t.sample.c.group_id).where(t.sample.c.manifest_id == row.manifest_id)
    await c.execute(
        sa.update(t.group)
        .where(t.group.c.group_id.in_(groups), t.group.c.state == GroupState.CLAIMED.value)
        .values(state=state.value)
    )


async def _set_manifest(
    c: AsyncConnection,
    row: ManifestRow,
    state: ManifestState,
    reason: str,
    ended_at: datetime | None,
    metrics: dict[str, float] | None,
) -> None:
    m = t.manifest.c
    result = await c.execute(
        sa.update(t.manifest)
        .where(m.manifest_id == row.manifest_id, m.state == row.state)
        .values(state=state.value, reason=reason, ended_at=ended_at, metrics=metrics)
    )
    assert result.rowcount == 1, f"manifest {row.manifest_id} changed under its lock"


async def _reward_metrics(c: AsyncConnection, manifest: BatchManifest) -> dict[str, float]:
    """What the batch's sessions were paid, as their rewards say at the commit."""
    sessions = {ref.session_id for ref in manifest.samples}
    query = sa.select(t.reward).where(t.reward.c.session_id.in_(sessions))
    total = dict.fromkeys(sessions, 0.0)
    for reward in counted(await fetch_all(c, Reward, query)):
        total[reward.session_id] += reward.value or 0.0
    return {"reward_mean": fmean(total.values()), "sessions": float(len(total))}


def session_values(manifest: BatchManifest) -> list[float]:
    """Per session the mean of its returns, which is what a group's baseline is made of too."""
    returns: dict[str, list[float]] = {}
    for ref in manifest.samples:
        returns.setdefault(ref.session_id, []).extend(item.value for item in ref.returns)
    return [fmean(items) for items in returns.values()]


def moved_baseline(
    baseline: float | None, weight: float, found: list[float]
) -> tuple[float, float]:
    """The running mean with ``found`` added and what it knew before fading."""
    kept = weight * BASELINE_MEMORY
    total = kept + len(found)
    return ((baseline or 0.0) * kept + math.fsum(found)) / total, total


async def _move_baseline(c: AsyncConnection, manifest: BatchManifest) -> None:
    p = t.policy.c
    where = (p.tenant_id == manifest.tenant_id, p.policy_id == manifest.policy_id)
    row = (await c.execute(sa.select(p.baseline, p.baseline_weight).where(*where))).one()
    baseline, weight = moved_baseline(row.baseline, row.baseline_weight, session_values(manifest))
    await c.execute(
        sa.update(t.policy).where(*where).values(baseline=baseline, baseline_weight=weight)
    )
