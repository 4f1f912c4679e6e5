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

from archon.records import (
    CloseReason,
    Interaction,
    PolicySettings,
    Reward,
    Sample,
    SampleState,
    Session,
    SessionState,
)
from archon.records.messages import Settled
from archon.storage import sealing_rows as rows
from archon.storage.credit import counted, discounted, superseded, taking_part, unplaced
from archon.storage.direct import Connection
from archon.storage.packing import Packed, pack

LATE_FOR_GROUP = "late_for_group"


class UnknownSession(ValueError):
    """There is no session of that id."""


async def settle(c: Connection, session_id: str, *, close: bool = False, now: datetime) -> Settled:
    """Close and seal the session as far as that is due, and say when to look again."""
    locked = await rows.lock_session(c, session_id)
    if locked is None:
        raise UnknownSession(f"there is no session {session_id} with a policy")
    session, policy = locked
    rewards = await rows.read_rewards(c, session_id)
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


async def _credit(c: Connection, case: _Case, told: Settled) -> Settled:
    """From here on the session takes no calls."""
    session = case.session
    calls = await rows.read_calls(c, session.session_id)
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
    await rows.update_session(c, case.row, session)
    return dataclasses.replace(told, wait=(due - case.now).total_seconds())


async def _end(c: Connection, case: _Case, told: Settled, state: SessionState) -> Settled:
    """Without samples, but the session's group need not wait for it any more."""
    await rows.lock_group(c, case.session.group_id)
    ended = dataclasses.replace(case.session, state=state, sealed_at=case.now)
    await rows.update_session(c, case.row, ended)
    await rows.finish_group(c, case.session)
    return dataclasses.replace(told, state=state.value)


async def _seal(c: Connection, case: _Case, told: Settled, calls: Sequence[Interaction]) -> Settled:
    session = case.session
    group_state = await rows.lock_group(c, session.group_id)
    first = session.state != SessionState.SEALED
    value = discounted(calls, case.rewards, case.policy.gamma)
    revision, newest = (0, {}) if first else await rows.newest_returns(c, session.session_id)
    if value == newest:
        return told
    await rows.add_returns(c, session, revision + 1, value, told.reward_seq, case.now)
    samples, late = 0, False
    if first:
        samples = await _pack(c, case, calls, group_state)
    else:
        late = await rows.is_bound(c, session.session_id)
    sealed = dataclasses.replace(
        session,
        state=SessionState.SEALED,
        sealed_at=session.sealed_at if not first else case.now,
        sealed_reward_seq=told.reward_seq,
    )
    await rows.update_session(c, case.row, sealed)
    if first:
        await rows.finish_group(c, session)
    return dataclasses.replace(
        told, state=sealed.state.value, samples=samples, revision=revision + 1, late=late
    )


async def _pack(c: Connection, case: _Case, calls: Sequence[Interaction], group_state: str) -> int:
    """Write the session's samples, and what was found about its calls."""
    part = taking_part(calls)
    ids = {i.interaction_id for i in part}
    others = [i for i in calls if i.interaction_id not in ids]
    packing = pack(part, [*others, *await rows.read_ancestors(c, calls)], case.policy.samples)
    await rows.flag_calls(c, superseded(calls), packing.gaps)
    if not case.session.trainable or not packing.samples:
        return 0
    fresh = group_state in ("open", "ready")
    for packed in packing.samples:
        await rows.add_sample(c, _sample(case, packed, fresh))
    return len(packing.samples) if fresh else 0


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
