"""Claiming whole groups for the next step, and refusing what is too stale.

Invariant: a claim is one transaction under the policy's lock, on the head as base: it binds each
sample once, its manifest copies everything that feeds the step, and every token in it is at most
``max_staleness`` steps older than the base along the parent chain. A policy has at most one
unfinished manifest, so asking again after a crash finds the claim that was made.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime

import numpy as np
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

import archon
from archon.records import (
    MANIFEST,
    BatchManifest,
    GroupState,
    IdSource,
    ManifestState,
    PolicySettings,
    ReturnRef,
    SampleRef,
    SampleState,
    dumps,
    loads,
    random_id,
)
from archon.records.messages import Claimed
from archon.storage import tables as t
from archon.storage.versions import (
    Chain,
    ManifestRow,
    end_manifest,
    lock_policy,
    read_chain,
    read_manifest,
)

STALE = "stale"
REJECTED_VERSION = "rejected_version"
ENGINE_BUILD = f"archon-{archon.__version__}"


async def claim(
    c: AsyncConnection,
    tenant_id: str,
    policy_id: str,
    *,
    at_least: int = 0,
    now: datetime,
    new_id: IdSource = random_id,
) -> Claimed:
    """Bind the next batch, or say why there is none; ``at_least`` groups do, 0: a whole batch."""
    locked = await lock_policy(c, tenant_id, policy_id)
    policy = loads(PolicySettings, locked.settings)
    chain = await read_chain(c, tenant_id, policy_id, policy.max_staleness + policy.max_ahead + 1)
    if chain is None:
        return Claimed(reason="there is no version 0 yet")
    case = _Case(c, tenant_id, policy_id, policy, chain, now)
    unfinished = await _unfinished(case)
    if unfinished is not None:
        return unfinished
    if chain.ahead > policy.max_ahead:
        live = f"live {chain.live}" if chain.live >= 0 else "the live version"
        ahead = f"{chain.ahead}" if chain.live >= 0 else f"more than {len(chain.versions) - 1}"
        return case.none(f"head {chain.head} is {ahead} past {live} (max_ahead {policy.max_ahead})")
    wanted = at_least or policy.batch_groups
    await _finish_overdue(case)
    chosen, dropped = await _fresh_groups(case, max(wanted, policy.batch_groups))
    if len(chosen) < wanted:
        return case.none(f"{len(chosen)} of {wanted} groups ready")
    manifest = await _manifest(case, locked.baseline, chosen, dropped, new_id(MANIFEST))
    await _bind(case, manifest)
    return case.claimed(manifest.manifest_id)


@dataclass(frozen=True)
class _Case:
    c: AsyncConnection
    tenant_id: str
    policy_id: str
    policy: PolicySettings
    chain: Chain
    now: datetime

    def none(self, reason: str) -> Claimed:
        return Claimed(reason=reason, head=self.chain.head, live=self.chain.live)

    def claimed(self, manifest_id: str) -> Claimed:
        return Claimed(
            manifest_id=manifest_id,
            base_version=self.chain.head,
            head=self.chain.head,
            live=self.chain.live,
            step_timeout=self.policy.step_timeout,
        )

    def of(self, table: sa.Table) -> sa.ColumnElement[bool]:
        return sa.and_(table.c.tenant_id == self.tenant_id, table.c.policy_id == self.policy_id)


async def _unfinished(case: _Case) -> Claimed | None:
    """The manifest that was claimed before; one on a base that was rejected since is released."""
    m = t.manifest.c
    query = sa.select(m.manifest_id).where(
        case.of(t.manifest),
        m.state.in_([ManifestState.CLAIMED.value, ManifestState.FAILED.value]),
    )
    name = (await case.c.execute(query)).scalar_one_or_none()
    if name is None:
        return None
    row = await read_manifest(case.c, name, lock=True)
    assert row is not None, f"manifest {name} is never deleted"
    if row.base_version != case.chain.head:
        await _release(case, row)
        return None
    if row.state == ManifestState.FAILED:
        return case.none(f"failed step {name} waits for retry or drop: {row.reason}")
    return case.claimed(name)


async def _release(case: _Case, row: ManifestRow) -> None:
    await end_manifest(
        case.c, row, "base_rejected", case.now, samples=SampleState.FREE, groups=GroupState.READY
    )


# A group past its deadline goes with what it has; one that has nothing is over.
_FINISH_OVERDUE = sa.text("""
UPDATE rollout_group g SET state = CASE WHEN EXISTS (
  SELECT 1 FROM sample s WHERE s.group_id = g.group_id AND s.state = 'free'
) THEN 'ready' ELSE 'done' END
WHERE g.tenant_id = :tenant_id AND g.policy_id = :policy_id
  AND g.state = 'open' AND g.deadline <= :now
""")


async def _finish_overdue(case: _Case) -> None:
    values = {"tenant_id": case.tenant_id, "policy_id": case.policy_id, "now": case.now}
    await case.c.execute(_FINISH_OVERDUE, values)


@dataclass(frozen=True)
class _Free:
    sample_id: str
    session_id: str
    group_id: str
    digest: str
    n_tokens: int
    n_trainable: int
    min_version: int
    max_version: int
    interactions: list[str]


_FREE = [t.sample.c[field.name] for field in fields(_Free)]


@dataclass(frozen=True)
class _Chosen:
    group_id: str
    samples: list[_Free]


async def _fresh_groups(case: _Case, wanted: int) -> tuple[list[_Chosen], Counter[str]]:
    """Up to ``wanted`` ready groups, oldest first, without what is too stale, which is dropped."""
    g = t.group.c
    ready = sa.select(g.group_id).where(case.of(t.group), g.state == GroupState.READY.value)
    page = ready.order_by(g.created_at, g.group_id).limit(wanted)
    chosen: list[_Chosen] = []
    dropped: Counter[str] = Counter()
    after: list[str] = []
    while len(chosen) < wanted:
        query = page.where(g.group_id.not_in(after)) if after else page
        names = list((await case.c.execute(query.with_for_update())).scalars())
        if not names:
            break
        after += names
        kept = await _keep_fresh(case, names, dropped)
        for name in names:
            if kept[name] and len(chosen) < wanted:
                chosen.append(_Chosen(name, kept[name]))
        await _over(case, [name for name in names if not kept[name]])
    return chosen, dropped


async def _keep_fresh(
    case: _Case, names: Sequence[str], dropped: Counter[str]
) -> dict[str, list[_Free]]:
    s = t.sample.c
    query = (
        sa.select(*_FREE)
        .where(s.group_id.in_(names), s.state == SampleState.FREE.value)
        .order_by(s.group_id, s.session_id, s.sample_id)
        .with_for_update()
    )
    kept: dict[str, list[_Free]] = defaultdict(list)
    bad: dict[str, list[str]] = defaultdict(list)
    for row in (_Free(*found) for found in await case.c.execute(query)):
        if reason := await _unfit(case, row):
            bad[reason].append(row.sample_id)
        else:
            kept[row.group_id].append(row)
    for reason, ids in bad.items():
        dropped[reason] += len(ids)
        await case.c.execute(
            sa.update(t.sample)
            .where(s.sample_id.in_(ids))
            .values(state=SampleState.DROPPED.value, drop_reason=reason)
        )
    return kept


async def _unfit(case: _Case, row: _Free) -> str:
    """Why a sample may not be trained on the head, or nothing."""
    fresh = set(case.chain.versions[: case.policy.max_staleness + 1])
    if all(v in fresh for v in range(row.min_version, row.max_version + 1)):
        return ""
    s = t.sample.c
    query = sa.select(s.versions, s.mask).where(s.sample_id == row.sample_id)
    arrays = (await case.c.execute(query)).one()
    used = np.frombuffer(arrays.versions, "<i4")[np.frombuffer(arrays.mask, np.uint8) == 1]
    foreign = {int(v) for v in np.unique(used)} - fresh
    if not foreign:
        return ""
    v = t.version.c
    rejected = sa.select(sa.func.count()).where(
        case.of(t.version), v.version.in_(foreign), v.state.in_(["rejected", "rolled_back"])
    )
    return REJECTED_VERSION if (await case.c.execute(rejected)).scalar_one() else STALE


async def _over(case: _Case, names: Sequence[str]) -> None:
    if names:
        await case.c.execute(
            sa.update(t.group)
            .where(t.group.c.group_id.in_(names))
            .values(state=GroupState.DONE.value)
        )


async def _manifest(
    case: _Case,
    baseline: float | None,
    chosen: Sequence[_Chosen],
    dropped: Counter[str],
    manifest_id: str,
) -> BatchManifest:
    rows = [row for group in chosen for row in group.samples]
    returns = await _returns(case, {row.session_id for row in rows})
    oldest = min(row.min_version for row in rows)
    depth = case.chain.age(oldest)
    assert depth is not None, f"version {oldest} was found fresh"
    return BatchManifest(
        manifest_id=manifest_id,
        tenant_id=case.tenant_id,
        policy_id=case.policy_id,
        kind="fresh",
        base_version=case.chain.head,
        base_checkpoint=case.chain.checkpoint,
        base_digest=case.chain.model_sha256,
        parents=case.chain.versions[: depth + 1],
        samples=tuple(_reference(row, returns) for row in rows),
        baseline=baseline,
        algorithm=case.policy.algorithm,
        max_staleness=case.policy.max_staleness,
        codec_digest=await _codec_digest(case, {row.session_id for row in rows}),
        engine_build=ENGINE_BUILD,
        seed=int(hashlib.sha256(manifest_id.encode()).hexdigest()[:7], 16),
        created_at=case.now.isoformat(),
        dropped=dict(dropped),
    )


def _reference(row: _Free, returns: dict[str, ReturnRef]) -> SampleRef:
    return SampleRef(
        sample_id=row.sample_id,
        session_id=row.session_id,
        group_id=row.group_id,
        digest=row.digest,
        n_tokens=row.n_tokens,
        n_trainable=row.n_trainable,
        min_version=row.min_version,
        max_version=row.max_version,
        returns=tuple(returns[name] for name in row.interactions),
    )


async def _returns(case: _Case, sessions: set[str]) -> dict[str, ReturnRef]:
    """The newest return of every interaction of the sessions."""
    r = t.returns.c
    query = (
        sa.select(r.interaction_id, r.value, r.revision)
        .ext(distinct_on(r.interaction_id))
        .where(r.session_id.in_(sessions))
        .order_by(r.interaction_id, r.revision.desc())
    )
    rows = await case.c.execute(query)
    return {row.interaction_id: ReturnRef(*row) for row in rows}


async def _codec_digest(case: _Case, sessions: set[str]) -> str:
    """The digest of the one codec that made the batch, or one over the digests of several."""
    i = t.interaction.c
    query = sa.select(i.codec_digest).distinct().where(i.session_id.in_(sessions))
    found = sorted((await case.c.execute(query)).scalars())
    if len(found) == 1:
        return str(found[0])
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


async def _bind(case: _Case, manifest: BatchManifest) -> None:
    body = dumps(manifest)
    ids = [ref.sample_id for ref in manifest.samples]
    s = t.sample.c
    bound = await case.c.execute(
        sa.update(t.sample)
        .where(s.sample_id.in_(ids), s.state == SampleState.FREE.value)
        .values(state=SampleState.CLAIMED.value, manifest_id=manifest.manifest_id)
    )
    assert bound.rowcount == len(ids), f"{manifest.manifest_id}: a sample is not free any more"
    await case.c.execute(
        sa.update(t.group)
        .where(t.group.c.group_id.in_({ref.group_id for ref in manifest.samples}))
        .values(state=GroupState.CLAIMED.value)
    )
    await case.c.execute(
        t.manifest.insert().values(
            manifest_id=manifest.manifest_id,
            tenant_id=manifest.tenant_id,
            policy_id=manifest.policy_id,
            base_version=manifest.base_version,
            state=ManifestState.CLAIMED.value,
            body=body,
            digest=hashlib.sha256(body.encode()).hexdigest(),
            created_at=case.now,
        )
    )
