"""Reading the outbox: which sessions have something that Temporal was not told yet.

Invariant: an entry stays unsent until its signal was accepted; so a crash between the two sends it
again, which does no harm, and never loses it.

A reward that will close its session is held until it may: before that its workflow could only look
and set a timer. When many sessions begin, their starts may be held for ``START_HOLD`` too: most
short episodes are over by then, and their workflow is told all of it at once, for half the cost.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import psycopg
import sqlalchemy as sa

from archon.records import PolicySettings, loads
from archon.records.messages import SessionTimes, Wake
from archon.storage.database import libpq_url
from archon.storage.direct import Connection

START_HOLD = timedelta(seconds=4)
_RANK = {"session": 0, "reward": 1, "close": 2}

# The oldest entries, whole sessions only: a session's news goes out as one signal.
_UNSENT = sa.text("""
WITH fresh AS (
  SELECT o.outbox_id, o.session_id, o.kind, o.ref, o.created_at, s.tenant_id, s.policy_id, s.state
  FROM outbox o JOIN session s USING (session_id)
  WHERE o.sent_at IS NULL AND o.session_id <> ALL(CAST(:skip AS text[]))
    AND NOT (o.kind = 'reward' AND s.state = 'open' AND coalesce(s.close_after > :now, false))
    AND NOT (o.kind = 'session' AND s.state = 'open' AND coalesce(s.close_after > :now, true)
             AND o.created_at > CAST(:started AS timestamptz))
), due AS (
  SELECT session_id FROM (
    SELECT session_id, outbox_id FROM fresh ORDER BY outbox_id LIMIT :entries
  ) oldest GROUP BY session_id ORDER BY min(outbox_id) LIMIT :sessions
)
SELECT fresh.*, p.settings
FROM fresh
JOIN policy p ON p.tenant_id = fresh.tenant_id AND p.policy_id = fresh.policy_id
WHERE fresh.session_id IN (SELECT session_id FROM due)
ORDER BY fresh.outbox_id
""")
_NEXT_DUE = sa.text("""
SELECT least(
  min(s.close_after) FILTER (WHERE o.kind = 'reward' AND s.close_after > :now),
  min(o.created_at) FILTER (WHERE o.kind = 'session') + CAST(:hold AS interval)
) AS due FROM outbox o JOIN session s USING (session_id)
WHERE o.sent_at IS NULL AND s.state = 'open' AND o.kind IN ('reward', 'session')
""")
_MARK = sa.text("UPDATE outbox SET sent_at = :now WHERE outbox_id = ANY(:ids) AND sent_at IS NULL")
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('archon.outbox-relay', 0))"


@dataclass(frozen=True)
class News:
    """All unsent entries of one session as one wake-up; ``outbox_ids`` are what it stands for.

    ``began`` is when the session did, if that is part of the news.
    """

    session_id: str
    tenant_id: str
    policy_id: str
    closed: bool
    times: SessionTimes
    wake: Wake
    outbox_ids: list[int]
    began: datetime | None = None


async def unsent(
    c: Connection,
    now: datetime,
    *,
    hold: timedelta = START_HOLD,
    skip: Collection[str] = (),
    sessions: int = 200,
) -> list[News]:
    """The sessions with the oldest unsent entries that are due, without those in ``skip``."""
    values = {
        "now": now,
        "started": now - hold,
        "skip": list(skip),
        "sessions": sessions,
        "entries": 4 * sessions,
    }
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
                began=row.created_at if row.kind == "session" else None,
            )
            continue
        before.outbox_ids.append(row.outbox_id)
        if _RANK[row.kind] >= _RANK[before.wake.what]:
            news[row.session_id] = replace(before, wake=Wake(row.kind, row.ref))
    return list(news.values())


async def next_due(c: Connection, now: datetime, hold: timedelta = START_HOLD) -> datetime | None:
    """When the first of the held entries may go."""
    values = {"now": now, "hold": hold}
    due: datetime | None = (await c.execute(_NEXT_DUE, values)).one().due
    return due


async def mark_sent(c: Connection, ids: Collection[int], now: datetime) -> None:
    await c.execute(_MARK, {"ids": list(ids), "now": now})


@asynccontextmanager
async def relay_lock(url: str, poll: float) -> AsyncIterator[None]:
    """Be the one relay: two would send out of order. Held by a connection of its own, whose end,
    however it comes, gives it up."""
    connection = await psycopg.AsyncConnection.connect(
        libpq_url(url), autocommit=True, connect_timeout=3
    )
    async with connection:
        while True:
            row = await (await connection.execute(_LOCK)).fetchone()
            if row and row[0]:
                break
            await asyncio.sleep(poll)
        yield


def session_times(policy: PolicySettings) -> SessionTimes:
    return SessionTimes(
        close_on=policy.close_on,
        close_grace=policy.close_grace,
        idle_timeout=policy.idle_timeout,
        reward_timeout=policy.reward_timeout,
        late_window=policy.late_window,
    )
