"""What a session's workflow asks for: to be settled, and to have a reward recorded.

Invariant: both are idempotent by what the rows hold; an attempt that is repeated finds the work of
the one before it.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import psycopg
from temporalio import activity
from temporalio.exceptions import ApplicationError

from archon.failpoints import failpoint
from archon.records import REWARD, Clock, IdSource, Reward, parse_reward, random_id, system_clock
from archon.records.messages import RawReward, RewardReceipt, Settled, SettleInput
from archon.storage import Database
from archon.storage.direct import Direct, DirectPool
from archon.storage.policies import PolicyCache
from archon.storage.rewards import RewardConflict, put_reward
from archon.storage.sealing import UnknownSession, settle
from archon.storage.sessions import find_session

CONNECTIONS = 8


class SessionActivities:
    def __init__(
        self, db: Database, clock: Clock = system_clock, new_id: IdSource = random_id
    ) -> None:
        self._pool = DirectPool(db.url, CONNECTIONS)
        self._clock, self._new_id = clock, new_id
        self._policies = PolicyCache()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Direct]:
        try:
            async with self._pool.transaction() as c:
                yield c
        except psycopg.OperationalError:
            await self._pool.forget()
            raise

    @activity.defn
    async def settle_session(self, ask: SettleInput) -> Settled:
        """Close and seal the session as far as that is due."""
        try:
            async with self._transaction() as c:
                settled = await settle(c, ask.session_id, close=ask.close, now=self._clock())
                if settled.revision:
                    failpoint("seal.before_commit")
        except UnknownSession as error:
            raise _final(error) from error
        if settled.revision:
            failpoint("seal.after_commit")
        return settled

    @activity.defn
    async def record_reward(self, raw: RawReward) -> RewardReceipt:
        """A reward that came by Temporal, as a row like any other; once per ``raw.key``."""
        parsed = parse_reward(json.loads(raw.raw))
        now = self._clock()
        async with self._transaction() as c:
            session = await find_session(c, raw.session_id)
            if session is None:
                raise _final(UnknownSession(f"there is no session {raw.session_id}"))
            policy = await self._policies.get(c, session.tenant_id, session.policy_id)
            assert policy is not None, f"session {raw.session_id} has a policy"
            reward = Reward(
                reward_id=self._new_id(REWARD),
                session_id=raw.session_id,
                tenant_id=session.tenant_id,
                policy_id=session.policy_id,
                component=parsed.component,
                source=parsed.source,
                created_at=now,
                value=parsed.value,
                interaction_id=parsed.interaction_id,
                idempotency_key=parsed.idempotency_key or raw.key,
                rejected=parsed.rejected,
                raw=parsed.raw,
            )
            counts = parsed.value is not None and parsed.interaction_id is None
            closes = counts and policy.close_on == "reward"
            close_after = now + timedelta(seconds=policy.close_grace) if closes else None
            try:
                put = await put_reward(c, reward, close_after)
            except RewardConflict as error:
                raise _final(error) from error
        return RewardReceipt(put.reward_id, parsed.value, parsed.rejected)


def _final(error: ValueError) -> ApplicationError:
    return ApplicationError(str(error), type=type(error).__name__, non_retryable=True)
