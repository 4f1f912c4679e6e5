"""Groups as they are planned: when one may start, and what happens when it loses members.

Invariant: the groups that are in flight, ready, bound to a step or trained but not yet live are
never more than ``(max_staleness + 1) * batch_groups``, for any number of agents and trainers; so
what an agent begins now is, by its turn, no staler than the policy allows.
"""

from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import (
    CloseReason,
    Group,
    GroupState,
    PolicySettings,
    SampleState,
    loads,
)
from archon.records.messages import GroupPlan, LostMembers
from archon.storage import tables as t
from archon.storage.rows import fetch_one, insert_record
from archon.storage.sealing_rows import finish_group, lock_group
from archon.storage.sessions import close_session
from archon.storage.versions import lock_policy, read_chain

LOST_MEMBER = "lost_member"


def capacity(max_staleness: int, batch: int, accepted: int, version: int) -> int:
    """How many more groups may start, ``accepted`` having started since version 0.

    Each version up to ``version`` has taken one batch of them. World size has no part in it.
    """
    return (max_staleness + 1) * batch - (accepted - version * batch)


_OUTSTANDING = sa.text("""
SELECT count(*) FROM rollout_group
WHERE tenant_id = :tenant_id AND policy_id = :policy_id
  AND (state IN ('ready', 'claimed')
       OR state = 'open' AND task_id <> '' AND (deadline IS NULL OR deadline > :now))
""")


async def admit(c: AsyncConnection, plan: GroupPlan, now: datetime) -> bool:
    """Open the group if there is room; True where it is open, or was before."""
    locked = await lock_policy(c, plan.tenant_id, plan.policy_id)
    policy = loads(PolicySettings, locked.settings)
    if await get_group(c, plan.group_id) is not None:
        return True
    if policy.admission and await _room(c, plan, policy, now) <= 0:
        return False
    group = Group(
        group_id=plan.group_id,
        tenant_id=plan.tenant_id,
        policy_id=plan.policy_id,
        task_id=plan.task_id,
        size=plan.size,
        state=GroupState.OPEN,
        created_at=now,
        deadline=now + timedelta(seconds=policy.group_timeout),
    )
    await c.execute(insert_record(t.group, group))
    return True


async def _room(c: AsyncConnection, plan: GroupPlan, policy: PolicySettings, now: datetime) -> int:
    keys = {"tenant_id": plan.tenant_id, "policy_id": plan.policy_id, "now": now}
    outstanding = (await c.execute(_OUTSTANDING, keys)).scalar_one()
    chain = await read_chain(c, plan.tenant_id, plan.policy_id, policy.max_staleness + 1)
    # Counted from live, which is what agents are served; a batch past it is still outstanding.
    ahead = 0 if chain is None else chain.ahead
    accepted = outstanding + ahead * policy.batch_groups
    return capacity(policy.max_staleness, policy.batch_groups, accepted, 0)


async def get_group(c: AsyncConnection, group_id: str) -> Group | None:
    return await fetch_one(c, Group, sa.select(t.group).where(t.group.c.group_id == group_id))


async def lose_members(c: AsyncConnection, lost: LostMembers, now: datetime) -> int:
    """Take lost agent runs' sessions out of their group; returns how many there were.

    They are closed and kept, and what they sampled is not trained on: the runs that take their
    places are.
    """
    group = await get_group(c, lost.group_id)
    if group is None:
        return 0
    s = t.session.c
    query = sa.select(s.session_id).where(
        s.group_id == lost.group_id,
        s.labels["member"].astext.in_([str(member) for member in lost.members]),
        s.labels["wave"].astext == str(lost.wave),
    )
    sessions = list((await c.execute(query.order_by(s.session_id))).scalars())
    for session_id in sessions:
        await close_session(c, group.tenant_id, session_id, CloseReason.LOST, now)
    await c.execute(
        sa.update(t.session)
        .where(s.session_id.in_(sessions))
        .values(trainable=False, close_reason=CloseReason.LOST.value)
    )
    await lock_group(c, lost.group_id)  # after the sessions, as sealing does
    await c.execute(
        sa.update(t.sample)
        .where(
            t.sample.c.session_id.in_(sessions),
            t.sample.c.state == SampleState.FREE.value,
        )
        .values(state=SampleState.DROPPED.value, drop_reason=LOST_MEMBER)
    )
    return len(sessions)


async def shrink(c: AsyncConnection, group_id: str, size: int) -> None:
    """Let the group be whole with ``size`` members; with none it is over."""
    group = await get_group(c, group_id)
    if group is None:
        return
    await lock_group(c, group_id)
    over = {"state": GroupState.DONE.value} if size == 0 else {"size": size}
    await c.execute(
        sa.update(t.group)
        .where(t.group.c.group_id == group_id, t.group.c.state == GroupState.OPEN.value)
        .values(over)
    )
    await finish_group(c, group)
