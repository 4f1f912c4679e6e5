"""What an episode's workflow asks of the database: room for a group, and repairs of one.

Invariant: a group is opened at most once, however often it asks; those that wait are served in the
order in which they came to this process, and only the first of them looks at the database.
"""

import asyncio
from collections import defaultdict

from temporalio import activity

from activities.beats import heartbeats
from archon.records import system_clock
from archon.records.messages import GroupPlan, GroupSize, LostMembers
from archon.storage import READY_CHANNEL, Database, Listener, groups

_BEAT_S = 4.0
_POLL_S = 5.0


class AdmissionActivities:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._turns: dict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    @activity.defn
    async def admit_group(self, plan: GroupPlan) -> None:
        """Return when the group may start; by then it is open."""
        async with heartbeats(every=_BEAT_S), self._turns[plan.tenant_id, plan.policy_id]:
            if await self._admitted(plan):
                return
            async with Listener(self._db.url, READY_CHANNEL) as ready:
                while not await self._admitted(plan):
                    await ready.wait(_POLL_S)

    @activity.defn
    async def lose_members(self, lost: LostMembers) -> None:
        """Agent runs failed or were lost: their sessions are closed and not trained on."""
        async with self._db.begin() as c:
            await groups.lose_members(c, lost, system_clock())

    @activity.defn
    async def shrink_group(self, group: GroupSize) -> None:
        """The members that could not be replaced are not waited for any more."""
        async with self._db.begin() as c:
            await groups.shrink(c, group.group_id, group.size)

    async def _admitted(self, plan: GroupPlan) -> bool:
        async with self._db.begin() as c:
            return await groups.admit(c, plan, system_clock())
