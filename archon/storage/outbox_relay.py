"""Reading the outbox: which sessions have something that Temporal was not told yet.

Invariant: an entry stays unsent until its signal was accepted; so a crash between the two sends it
again, which does no harm, and never loses it.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import PolicySettings, loads
from archon.records.messages import SessionTimes, Wake

_RANK = {"session": 0, "reward": 1, "close": 2}

# The oldest entries, whole sessions only: a session's news goes out as one signal.
_UNSENT = sa.text("""
WITH due AS (
  SELECT session_id FROM (
    SELECT session_id, outbox_id FROM outbox
    WHERE sent_at IS NULL AND session_id <> ALL(:skip)
    ORDER BY outbox_id LIMIT :entries
  ) oldest GROUP BY session_id ORDER BY min(outbox_id) LIMIT :sessions
)
SELECT o.outbox_id, o.session_id, o.kind, o.ref, s.tenant_id, s.policy_id, s.state, p.settings
FROM outbox o
JOIN session s USING (session_id)
JOIN policy p ON p.tenant_id = s.tenant_id AND p.policy_id = s.policy_id
WHERE o.sent_at IS NULL AND o.session_id IN (SELECT session_id FROM due)
ORDER BY o.outbox_id
""")
_MARK = sa.text("UPDATE outbox SET sent_at = :now WHERE outbox_id = ANY(:ids) AND sent_at IS NULL")
_LOCK = sa.text("SELECT pg_try_advisory_lock(hashtextextended('archon.outbox-relay', 0))")


@dataclass(frozen=True)
class News:
    """All unsent entries of one session as one wake-up; ``outbox_ids`` are what it stands for."""

    session_id: str
    tenant_id: str
    policy_id: str
    closed: bool
    times: SessionTimes
    wake: Wake
    outbox_ids: list[int]


async def unsent(
    c: AsyncConnection, *, skip: Collection[str] = (), sessions: int = 200
) -> list[News]:
    """The sessions with the oldest unsent entries, without those in ``skip``."""
    values = {"skip": list(skip), "sessions": sessions, "entries": 4 * sessions}
    news: dict[str, News] = {}
    settings: dict[tuple[str, str], SessionTimes] = {}
    for row in await c.execute(_UNSENT, values):
        before = news.get(row.session_id)
        if before is None:
            policy = (row.tenant_id, row.policy_id)
            if policy not in settings:
                settings[policy] = session_times(loads(PolicySettings, row.settings))
            news[row.session_id] = News(
                session_id=row.session_id,
                tenant_id=row.tenant_id,
                policy_id=row.policy_id,
                closed=row.state != "open",
                times=settings[policy],
                wake=Wake(row.kind, row.ref),
                outbox_ids=[row.outbox_id],
            )
            continue
        before.outbox_ids.append(row.outbox_id)
        if _RANK[row.kind] >= _RANK[before.wake.what]:
            news[row.session_id] = replace(before, wake=Wake(row.kind, row.ref))
    return list(news.values())


async def mark_sent(c: AsyncConnection, ids: Collection[int], now: datetime) -> None:
    await c.execute(_MARK, {"ids": list(ids), "now": now})


async def take_relay_lock(c: AsyncConnection) -> bool:
    """Whether this connection is the one relay, until it ends: two would send out of order."""
    return bool((await c.execute(_LOCK)).scalar_one())


def session_times(policy: PolicySettings) -> SessionTimes:
    return SessionTimes(
        close_on=policy.close_on,
        close_grace=policy.close_grace,
        idle_timeout=policy.idle_timeout,
        reward_timeout=policy.reward_timeout,
        late_window=policy.late_window,
    )
