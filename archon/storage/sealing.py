"""Closing a session and giving it its returns and samples.

Invariant: whatever is due is done in the caller's transaction under the session's row lock, so a
repeated, a late or a racing call finds it done. Returns are written once per revision, samples
once; a session without a reward in time becomes ``unscored``, never a reward of 0.

Rewards come without that lock. So a call compares what the rewards say now with the newest
revision, and never trusts the sequence alone: a lower one may be committed after a higher one.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import (
    CloseReason,
    Group,
    Interaction,
    PolicySettings,
    Return,
    Reward,
    Sample,
    SampleState,
    Session,
    SessionState,
    loads,
)
from archon.records.messages import Settled
from archon.storage import tables as t
from archon.storage.credit import counted, discounted, superseded, taking_part, unplaced
from archon.storage.database import READY_CHANNEL
from archon.storage.packing import Packed, pack
from archon.storage.render import values
from archon.storage.rows import as_record, fetch_all

LATE_FOR_GROUP = "late_for_group"


# The texts of a call are large and no credit depends on them.
_CALLS = sa.select(
    *(column for column in t.interaction.c if column.name not in ("messages", "answer")),
    sa.literal_column("'[]'::jsonb").label("messages"),
    sa.literal_column("'{}'::jsonb").label("answer"),
)


class UnknownSession(ValueError):
    """There is no session of that id."""


async def settle(
    c: AsyncConnection, session_id: str, *, close: bool = False, now: datetime
) -> Settled:
    """Close and seal the session as far as that is due, and say when to look again."""
    session, policy = await _locked(c, session_id)
    rewards = await fetch_all(
        c, Reward, sa.select(t.reward).where(t.reward.c.session_id == session_id)
    )
    after, wait = session, 0.0
    if session.state == SessionState.OPEN:
        after, wait = _closed_if_due(session, policy, close, now)
    told = Settled(
        state=after.state.value,
        wait=wait,
        reward_seq=max((r.seq for r in rewards), default=0),
        rewards=len(counted(rewards)),
        rejected=sum(bool(r.rejected) for r in rewards),
    )
    if after.state in (SessionState.OPEN, SessionState.EMPTY):
        return told
    if after.state == SessionState.UNSCORED and not told.rewards:
        return told
    return await _credit(c, _Case(session, after, policy, rewards, now), told)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A session as its row has it, and as closing leaves it."""

    row: Session
    session: Session
    policy: PolicySettings
    rewards: list[Reward]
    now: datetime


async def _locked(c: AsyncConnection, session_id: str) -> tuple[Session, PolicySettings]:
    query = (
        sa.select(t.session, t.policy.c.settings)
        .join(
            t.policy,
            (t.policy.c.tenant_id == t.session.c.tenant_id)
            & (t.policy.c.policy_id == t.session.c.policy_id),
        )
        .where(t.session.c.session_id == session_id)
        .with_for_update(of=t.session)
    )
    row = (await c.execute(query)).one_or_none()
    if row is None:
        raise UnknownSession(f"there is no session {session_id} with a policy")
    return as_record(Session, row), loads(PolicySettings, row.settings)


def _closed_if_due(
    session: Session, policy: PolicySettings, close: bool, now: datetime
) -> tuple[Session, float]:
    """The session closed, or as it is with the seconds until it may be closed."""
    idle_at = (session.last_call_at or session.created_at) + timedelta(seconds=policy.idle_timeout)
    if close:
        reason = CloseReason.END
    elif session.close_after is not None and session.close_after <= now:
        reason = CloseReason.REWARD
    elif idle_at <= now:
        reason = CloseReason.IDLE
    else:
        due = min(idle_at, session.close_after or idle_at)
        return session, (due - now).total_seconds()
    closed = dataclasses.replace(
        session, state=SessionState.CLOSED, close_reason=reason.value, closed_at=now
    )
    return closed, 0.0


async def _credit(c: AsyncConnection, case: _Case, told: Settled) -> Settled:
    """From here on the session takes no calls."""
    session = case.session
    calls = await fetch_all(
        c, Interaction, _CALLS.where(t.interaction.c.session_id == session.session_id)
    )
    if not taking_part(calls):
        return await _end(c, case, told, SessionState.EMPTY)
    lost = unplaced(calls, case.rewards)
    if len(lost) < told.rewards:
        return await _seal(c, case, told, calls)
    if session.state in (SessionState.SEALED, SessionState.UNSCORED):
        return told
    assert session.closed_at is not None, f"session {session.session_id} is closed without a time"
    due = session.closed_at + timedelta(seconds=case.policy.reward_timeout)
    if due <= case.now:
        return await _end(c, case, told, SessionState.UNSCORED)
    await _update(c, case, session)
    return dataclasses.replace(told, wait=(due - case.now).total_seconds())


async def _end(c: AsyncConnection, case: _Case, told: Settled, state: SessionState) -> Settled:
    """Without samples, but the session's group need not wait for it any more."""
    await lock_group(c, case.session.group_id)
    await _update(c, case, dataclasses.replace(case.session, state=state, sealed_at=case.now))
    await finish_group(c, case.session)
    return dataclasses.replace(told, state=state.value)


async def _seal(
    c: AsyncConnection, case: _Case, told: Settled, calls: Sequence[Interaction]
) -> Settled:
    session = case.session
    group_state = await lock_group(c, session.group_id)
    first = session.state != SessionState.SEALED
    value = discounted(calls, case.rewards, case.policy.gamma)
    revision, newest = (0, {}) if first else await _newest_returns(c, session.session_id)
    if value == newest:
        return told
    made = [
        Return(
            interaction_id=name,
            revision=revision + 1,
            session_id=session.session_id,
            tenant_id=session.tenant_id,
            policy_id=session.policy_id,
            value=number,
            reward_seq=told.reward_seq,
            created_at=case.now,
        )
        for name, number in value.items()
    ]
    await c.execute(insert(t.returns), [values(item) for item in made])
    samples, late = 0, False
    if first:
        samples = await _pack(c, case, calls, group_state)
    else:
        late = await _is_bound(c, session.session_id)
    sealed = dataclasses.replace(
        session,
        state=SessionState.SEALED,
        sealed_at=session.sealed_at if not first else case.now,
        sealed_reward_seq=told.reward_seq,
    )
    await _update(c, case, sealed)
    if first:
        await finish_group(c, session)
    return dataclasses.replace(
        told, state=sealed.state.value, samples=samples, revision=revision + 1, late=late
    )


async def _newest_returns(c: AsyncConnection, session_id: str) -> tuple[int, dict[str, float]]:
    r = t.returns.c
    top = sa.select(sa.func.max(r.revision)).where(r.session_id == session_id).scalar_subquery()
    rows = (
        await c.execute(
            sa.select(r.interaction_id, r.value, r.revision).where(
                r.session_id == session_id, r.revision == top
            )
        )
    ).all()
    return rows[0].revision if rows else 0, {row.interaction_id: row.value for row in rows}


async def _is_bound(c: AsyncConnection, session_id: str) -> bool:
    s = t.sample.c
    bound = [SampleState.CLAIMED.value, SampleState.TRAINED.value]
    query = sa.select(s.sample_id).where(s.session_id == session_id, s.state.in_(bound)).limit(1)
    return (await c.execute(query)).first() is not None


async def _pack(
    c: AsyncConnection, case: _Case, calls: Sequence[Interaction], group_state: str
) -> int:
    """Write the session's samples, and what was found about its calls."""
    part = taking_part(calls)
    ids = {i.interaction_id for i in part}
    others = [i for i in calls if i.interaction_id not in ids]
    packing = pack(part, [*others, *await _ancestors(c, calls)], case.policy.samples)
    await _flag(c, superseded(calls), packing.gaps)
    if not case.session.trainable or not packing.samples:
        return 0
    fresh = group_state in ("open", "ready")
    rows = [values(_sample(case, packed, fresh)) for packed in packing.samples]
    await c.execute(insert(t.sample).on_conflict_do_nothing(), rows)
    return len(rows) if fresh else 0


async def _ancestors(c: AsyncConnection, calls: Sequence[Interaction]) -> list[Interaction]:
    """Calls of the slot's earlier sessions that prefixes go back to."""
    known = {i.interaction_id for i in calls}
    found: list[Interaction] = []
    missing = {i.prefix_parent for i in calls if i.prefix_parent} - known
    while missing:
        query = _CALLS.where(t.interaction.c.interaction_id.in_(missing))
        step = await fetch_all(c, Interaction, query)
        found += step
        known |= missing
        missing = {i.prefix_parent for i in step if i.prefix_parent} - known
    return found


async def _flag(c: AsyncConnection, retried: set[str], gaps: dict[str, list[str]]) -> None:
    i = t.interaction.c
    if retried:
        await c.execute(
            sa.update(t.interaction)
            .where(i.interaction_id.in_(retried))
            .values(status="superseded")
        )
    for name, found in gaps.items():
        await c.execute(
            sa.update(t.interaction)
            .where(i.interaction_id == name)
            .values(evidence_gaps=i.evidence_gaps.op("||")(sa.cast(found, i.evidence_gaps.type)))
        )


def _sample(case: _Case, packed: Packed, fresh: bool) -> Sample:
    session = case.session
    name = f"{session.session_id}/{packed.leaf}/{packed.digest}"
    content = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
    del content["leaf"]
    return Sample(
        sample_id=f"smp_{hashlib.sha256(name.encode()).hexdigest()[:24]}",
        session_id=session.session_id,
        group_id=session.group_id,
        tenant_id=session.tenant_id,
        policy_id=session.policy_id,
        state=SampleState.FREE if fresh else SampleState.DROPPED,
        drop_reason="" if fresh else LATE_FOR_GROUP,
        created_at=case.now,
        **content,
    )


async def _update(c: AsyncConnection, case: _Case, session: Session) -> None:
    """Write what changed; compare-and-set on the state and the reward sequence that were read."""
    old, new = values(case.row), values(session)
    changed = {name: value for name, value in new.items() if value != old[name]}
    if not changed:
        return
    s = t.session.c
    result = await c.execute(
        sa.update(t.session)
        .where(
            s.session_id == session.session_id,
            s.state == case.row.state.value,
            s.sealed_reward_seq == case.row.sealed_reward_seq,
        )
        .values(changed)
    )
    assert result.rowcount == 1, f"session {session.session_id} changed under its lock"


_LOCK_GROUP = sa.text("SELECT state FROM rollout_group WHERE group_id = :group_id FOR UPDATE")

# Whole: as many sealed members as planned, or nobody left to wait for. A group that has nothing
# to train on is over at once.
_FINISH_GROUP = sa.text("""
WITH members AS (
  SELECT count(*) FILTER (WHERE close_reason <> 'lost') AS n,
         count(*) FILTER (WHERE state = 'sealed' AND trainable) AS sealed,
         count(*) FILTER (WHERE state IN ('open', 'closed') AND trainable) AS waiting
  FROM session WHERE group_id = :group_id
), free AS (
  SELECT count(*) AS n FROM sample WHERE group_id = :group_id AND state = 'free'
), moved AS (
  UPDATE rollout_group g SET state = CASE WHEN free.n > 0 THEN 'ready' ELSE 'done' END
  FROM members, free
  WHERE g.group_id = :group_id AND g.state = 'open'
    AND (members.sealed >= g.size OR (members.waiting = 0 AND members.n >= g.size))
  RETURNING 1
)
SELECT pg_notify(:channel, :payload) FROM moved
""")


async def lock_group(c: AsyncConnection, group_id: str) -> str:
    """Members of a group finish one after the other, so that the last one sees that it is."""
    row = (await c.execute(_LOCK_GROUP, {"group_id": group_id})).one_or_none()
    assert row is not None, f"group {group_id} has members but no row"
    return str(row.state)


async def finish_group(c: AsyncConnection, session: Session | Group) -> None:
    """open → ready or done, where the group (of the session) is whole."""
    parameters: dict[str, Any] = {
        "group_id": session.group_id,
        "channel": READY_CHANNEL,
        "payload": f"{session.tenant_id}/{session.policy_id}",
    }
    await c.execute(_FINISH_GROUP, parameters)
