"""The states of versions after their commit: canary, live, retired, rejected.

Invariant: at most one version of a policy is live. A rejection takes all descendants with it, in
one transaction with every sample whose trained tokens they sampled and every manifest that rests
on them. Each decision leaves a row.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import (
    ManifestState,
    PolicyVersion,
    RolloutDecision,
    SampleState,
    VersionState,
)
from archon.records.messages import ProbeResult
from archon.storage import tables as t
from archon.storage.database import READY_CHANNEL, notify
from archon.storage.rows import fetch_one, insert_record
from archon.storage.versions import lock_policy, release

REJECTED = (VersionState.REJECTED.value, VersionState.ROLLED_BACK.value)
DROP_REASON = "rejected_version"


@dataclass(frozen=True)
class Rejection:
    """What a rejection took with it. ``restore`` is the version that replicas go back to."""

    versions: list[int]
    samples: int
    tokens: int
    manifests: list[str]
    restore: int | None


def _of(table: sa.Table, tenant_id: str, policy_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.tenant_id == tenant_id, table.c.policy_id == policy_id)


async def get_version(
    c: AsyncConnection, tenant_id: str, policy_id: str, version: int
) -> PolicyVersion | None:
    query = sa.select(t.version).where(
        _of(t.version, tenant_id, policy_id), t.version.c.version == version
    )
    return await fetch_one(c, PolicyVersion, query)


async def live_version(c: AsyncConnection, tenant_id: str, policy_id: str) -> PolicyVersion | None:
    query = sa.select(t.version).where(
        _of(t.version, tenant_id, policy_id), t.version.c.state == VersionState.LIVE.value
    )
    return await fetch_one(c, PolicyVersion, query)


async def newest_version(c: AsyncConnection, tenant_id: str, policy_id: str) -> int | None:
    """Head: the newest version that is not rejected."""
    query = sa.select(sa.func.max(t.version.c.version)).where(
        _of(t.version, tenant_id, policy_id), t.version.c.state.not_in(REJECTED)
    )
    return (await c.execute(query)).scalar_one()


async def mark_canary(c: AsyncConnection, version: PolicyVersion) -> None:
    await _set_state(
        c, version.tenant_id, version.policy_id, [version.version], VersionState.CANARY,
        expected=[VersionState.TRAINED],
    )  # fmt: skip


async def promote(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    version: int,
    reasons: list[str],
    probes: Sequence[ProbeResult],
    now: datetime,
) -> str:
    """Make ``version`` live: ``promoted``; or say why not: ``superseded`` or ``rejected``."""
    await lock_policy(c, tenant_id, policy_id)
    states = await _states(c, tenant_id, policy_id)
    live = max((v for v, (_, s) in states.items() if s == VersionState.LIVE.value), default=None)
    state = states[version][1]
    if state == VersionState.LIVE.value:
        return "promoted"
    if state in REJECTED:
        return "rejected"
    if live is not None and live > version:
        return "superseded"
    if live is not None:
        await _set_state(c, tenant_id, policy_id, [live], VersionState.RETIRED)
    await _set_state(c, tenant_id, policy_id, [version], VersionState.LIVE, live_at=now)
    await _decide(c, tenant_id, policy_id, version, "promoted", reasons, probes, now)
    await notify(c, READY_CHANNEL, f"{tenant_id}/{policy_id}")
    return "promoted"


async def reject(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    version: int,
    reasons: list[str],
    probes: Sequence[ProbeResult],
    now: datetime,
) -> Rejection:
    """Reject ``version`` and its descendants; a live one is rolled back to what was live before."""
    await lock_policy(c, tenant_id, policy_id)
    states = await _states(c, tenant_id, policy_id)
    fallen = _with_descendants(states, version)
    fresh = [v for v in fallen if states[v][1] not in REJECTED]
    was_live = [v for v in fresh if states[v][1] == VersionState.LIVE.value]
    never_live = [v for v in fresh if v not in was_live]
    await _set_state(c, tenant_id, policy_id, never_live, VersionState.REJECTED)
    await _set_state(c, tenant_id, policy_id, was_live, VersionState.ROLLED_BACK)
    restore = await _restored(c, tenant_id, policy_id, bool(was_live), now)
    dropped = await _drop_samples(c, tenant_id, policy_id, fallen)
    manifests = await _release_manifests(c, tenant_id, policy_id, fallen, now)
    if fresh:
        lost = f"{len(dropped)} samples with {sum(dropped.values())} tokens dropped"
        await _decide(c, tenant_id, policy_id, version, "rejected", [*reasons, lost], probes, now)
        await notify(c, READY_CHANNEL, f"{tenant_id}/{policy_id}")
    return Rejection(fallen, len(dropped), sum(dropped.values()), manifests, restore)


async def _states(
    c: AsyncConnection, tenant_id: str, policy_id: str
) -> dict[int, tuple[int | None, str]]:
    v = t.version.c
    query = sa.select(v.version, v.parent, v.state).where(_of(t.version, tenant_id, policy_id))
    return {row.version: (row.parent, row.state) for row in await c.execute(query)}


def _with_descendants(states: dict[int, tuple[int | None, str]], version: int) -> list[int]:
    fallen = {version}
    for number in sorted(states):  # a child's number is greater than its parent's
        if states[number][0] in fallen:
            fallen.add(number)
    return sorted(fallen)


async def _set_state(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    versions: Iterable[int],
    state: VersionState,
    *,
    expected: Sequence[VersionState] = (),
    **changes: Any,
) -> None:
    where = [_of(t.version, tenant_id, policy_id), t.version.c.version.in_(list(versions))]
    if expected:
        where.append(t.version.c.state.in_([s.value for s in expected]))
    await c.execute(sa.update(t.version).where(*where).values(state=state.value, **changes))


async def _restored(
    c: AsyncConnection, tenant_id: str, policy_id: str, fell: bool, now: datetime
) -> int | None:
    """The version that is live after a rejection; if the live one fell, the last one before it."""
    if not fell:
        live = await live_version(c, tenant_id, policy_id)
        return None if live is None else live.version
    query = sa.select(sa.func.max(t.version.c.version)).where(
        _of(t.version, tenant_id, policy_id), t.version.c.state == VersionState.RETIRED.value
    )
    previous: int | None = (await c.execute(query)).scalar_one()
    if previous is not None:
        await _set_state(c, tenant_id, policy_id, [previous], VersionState.LIVE, live_at=now)
    return previous


async def _drop_samples(
    c: AsyncConnection, tenant_id: str, policy_id: str, fallen: list[int]
) -> Counter[str]:
    """Drop what is untrained and has a trainable token of a fallen version: id → such tokens."""
    s = t.sample.c
    query = sa.select(s.sample_id, s.versions, s.mask).where(
        _of(t.sample, tenant_id, policy_id),
        s.state.in_([SampleState.FREE.value, SampleState.CLAIMED.value]),
        s.max_version >= fallen[0],
        s.min_version <= fallen[-1],
    )
    dropped: Counter[str] = Counter()
    for row in await c.execute(query.with_for_update()):
        versions = np.frombuffer(row.versions, "<i4")[np.frombuffer(row.mask, "u1") == 1]
        if count := int(np.isin(versions, fallen).sum()):
            dropped[row.sample_id] = count
    await c.execute(
        sa.update(t.sample)
        .where(s.sample_id.in_(list(dropped)))
        .values(state=SampleState.DROPPED.value, drop_reason=DROP_REASON)
    )
    return dropped


async def _release_manifests(
    c: AsyncConnection, tenant_id: str, policy_id: str, fallen: list[int], now: datetime
) -> list[str]:
    """Give up unfinished steps that rest on a fallen version or lost a sample to one.

    A manifest is never changed: what is left of it goes back to be claimed again.
    """
    m, s = t.manifest.c, t.sample.c
    lost = sa.select(s.manifest_id).where(s.drop_reason == DROP_REASON, s.manifest_id.is_not(None))
    query = sa.select(m.manifest_id).where(
        _of(t.manifest, tenant_id, policy_id),
        m.state.in_([ManifestState.CLAIMED.value, ManifestState.FAILED.value]),
        m.base_version.in_(fallen) | m.manifest_id.in_(lost),
    )
    manifests = list((await c.execute(query)).scalars())
    for manifest_id in manifests:
        await release(c, manifest_id, f"{DROP_REASON} {fallen[0]}", now)
    return manifests


async def _decide(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    version: int,
    decision: str,
    reasons: list[str],
    probes: Sequence[ProbeResult],
    now: datetime,
) -> None:
    row = RolloutDecision(
        tenant_id, policy_id, version, decision, reasons, now, [asdict(p) for p in probes]
    )
    await c.execute(insert_record(t.decision, row))
    await c.execute(
        sa.update(t.version)
        .where(_of(t.version, tenant_id, policy_id), t.version.c.version == version)
        .values(decision={"decision": decision, "reasons": reasons})
    )
