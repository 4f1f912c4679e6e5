"""Rewards as they are delivered.

Invariant: an acknowledged reward is a row with its outbox entry. The newest ``seq`` of a slot
(session, interaction or none, component, source) counts; an idempotency key only removes
deliveries of one and the same reward.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from archon.records import Reward
from archon.storage.database import OUTBOX_CHANNEL
from archon.storage.direct import Connection

_COLUMNS = (
    "reward_id, session_id, tenant_id, policy_id, component, source, created_at, value,"
    " interaction_id, idempotency_key, rejected, raw"
)
_FIELDS = (*_COLUMNS.split(", "), "seq")
_INSERT = sa.text(
    f"WITH put AS (INSERT INTO reward ({_COLUMNS})"
    " VALUES (:reward_id, :session_id, :tenant_id, :policy_id, :component, :source, :created_at,"
    " :value, :interaction_id, :idempotency_key, :rejected, :raw)"
    " ON CONFLICT DO NOTHING"
    " RETURNING seq, reward_id, session_id, tenant_id, policy_id, created_at),"
    " told AS (INSERT INTO outbox (tenant_id, policy_id, session_id, kind, ref, created_at)"
    " SELECT tenant_id, policy_id, session_id, 'reward', reward_id, created_at FROM put),"
    " closing AS (UPDATE session s SET close_after = COALESCE(s.close_after, :close_after)"
    " FROM put WHERE s.session_id = put.session_id AND s.state = 'open'"
    " AND CAST(:close_after AS timestamptz) IS NOT NULL)"
    " SELECT put.seq, pg_notify(:channel, ''), (SELECT count(*) FROM interaction i"
    " WHERE i.session_id = put.session_id) AS calls FROM put"
)
_THERE = sa.text(
    f"SELECT {_COLUMNS}, seq, (SELECT count(*) FROM interaction i"
    " WHERE i.session_id = reward.session_id) AS calls FROM reward WHERE reward_id = :reward_id"
    " OR session_id = :session_id AND idempotency_key = :idempotency_key"
)
_OF_SESSION = sa.text(
    f"SELECT {_COLUMNS}, seq FROM reward WHERE session_id = :session_id ORDER BY seq"
)


@dataclass(frozen=True)
class Delivered:
    """``duplicate``: this delivery was there already, and ``seq`` and ``reward_id`` are its.

    ``calls`` is how many calls of the session were captured so far.
    """

    reward_id: str
    seq: int
    duplicate: bool
    calls: int


class RewardConflict(ValueError):
    """The idempotency key was used for another reward."""


async def put_reward(
    c: Connection, reward: Reward, close_after: datetime | None = None
) -> Delivered:
    """Store a reward and tell of it, in one statement. The same record again changes nothing.

    ``close_after`` is given where the policy closes an episode by its reward: it is set on the
    session if that is open and has none yet.
    """
    values = {name: getattr(reward, name) for name in _FIELDS if name != "seq"}
    values |= {"close_after": close_after, "channel": OUTBOX_CHANNEL}
    row = (await c.execute(_INSERT, values)).one_or_none()
    if row is not None:
        return Delivered(reward.reward_id, row.seq, duplicate=False, calls=row.calls)
    key = {name: values[name] for name in ("reward_id", "session_id", "idempotency_key")}
    row = (await c.execute(_THERE, key)).one()
    old = _reward(row)
    if not _same(old, reward):
        raise RewardConflict(
            f"idempotency key {reward.idempotency_key!r} of session {reward.session_id} was used "
            f"for reward {old.reward_id} with value {old.value}: send another key"
        )
    repeated = old.reward_id != reward.reward_id
    return Delivered(old.reward_id, old.seq, duplicate=repeated, calls=row.calls)


async def rewards_of(c: Connection, session_id: str) -> list[Reward]:
    """All deliveries to a session, oldest first."""
    return [_reward(row) for row in await c.execute(_OF_SESSION, {"session_id": session_id})]


def _same(old: Reward, new: Reward) -> bool:
    return (old.value, old.interaction_id, old.component, old.source) == (
        new.value, new.interaction_id, new.component, new.source,
    )  # fmt: skip


def _reward(row: sa.Row[Any]) -> Reward:
    return Reward(**{name: getattr(row, name) for name in _FIELDS})
