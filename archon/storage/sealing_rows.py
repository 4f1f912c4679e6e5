"""The statements of sealing: what is read of a session, and what is written about it.

Invariant: all of it is ``text``, so that either kind of connection runs it; a session is written by
compare-and-set on the state and the reward sequence that were read.
"""

import dataclasses
from collections.abc import Collection, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

import sqlalchemy as sa
from psycopg.types.json import Jsonb

from archon.records import (
    Group,
    Interaction,
    PolicySettings,
    Reward,
    Sample,
    Session,
    loads,
)
from archon.records.wire import build, hints_of
from archon.storage.database import READY_CHANNEL
from archon.storage.direct import Connection

T = TypeVar("T")


def _columns(record: type, prefix: str = "") -> str:
    return ", ".join(prefix + f.name for f in dataclasses.fields(record))


_SESSION = sa.text(
    f"SELECT {_columns(Session, 's.')}, p.settings FROM session s"
    " JOIN policy p ON p.tenant_id = s.tenant_id AND p.policy_id = s.policy_id"
    " WHERE s.session_id = :session_id FOR UPDATE OF s"
)
_REWARDS = sa.text(f"SELECT {_columns(Reward)} FROM reward WHERE session_id = :session_id")
# The texts of a call are large and no credit depends on them.
_CALL = _columns(Interaction).replace(" messages,", " '[]'::jsonb AS messages,")
_CALL = _CALL.removesuffix("answer") + "'{}'::jsonb AS answer"
_CALLS = sa.text(f"SELECT {_CALL} FROM interaction WHERE session_id = :session_id")
_CALLS_BY_ID = sa.text(f"SELECT {_CALL} FROM interaction WHERE interaction_id = ANY(:ids)")
_RETURNS = sa.text(
    "SELECT interaction_id, value, revision FROM interaction_return"
    " WHERE session_id = :session_id AND revision = ("
    "SELECT max(revision) FROM interaction_return WHERE session_id = :session_id)"
)
_ADD_RETURNS = sa.text(
    "INSERT INTO interaction_return (interaction_id, revision, session_id, tenant_id, policy_id,"
    " value, reward_seq, created_at)"
    " SELECT r.name, :revision, :session_id, :tenant_id, :policy_id, r.value, :reward_seq, :now"
    " FROM unnest(CAST(:names AS text[]), CAST(:values AS float8[])) AS r (name, value)"
)
_ADD_SAMPLE = sa.text(
    f"INSERT INTO sample ({_columns(Sample)})"
    f" VALUES ({_columns(Sample, ':')}) ON CONFLICT DO NOTHING"
)
_BOUND = sa.text(
    "SELECT count(*) AS n FROM sample"
    " WHERE session_id = :session_id AND state IN ('claimed', 'trained')"
)
_SUPERSEDE = sa.text(
    "UPDATE interaction SET status = 'superseded' WHERE interaction_id = ANY(:ids)"
)
_GAPS = sa.text(
    "UPDATE interaction SET evidence_gaps = evidence_gaps || :gaps WHERE interaction_id = :name"
)
_UPDATE = sa.text(
    "UPDATE session SET state = :state, close_reason = :close_reason, closed_at = :closed_at,"
    " sealed_at = :sealed_at, sealed_reward_seq = :sealed_reward_seq"
    " WHERE session_id = :session_id AND state = :old_state AND sealed_reward_seq = :old_seq"
    " RETURNING session_id"
)
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


async def lock_session(c: Connection, session_id: str) -> tuple[Session, PolicySettings] | None:
    """The session under its row lock, and the settings of its policy."""
    row = (await c.execute(_SESSION, {"session_id": session_id})).one_or_none()
    return None if row is None else (_record(Session, row), loads(PolicySettings, row.settings))


async def read_rewards(c: Connection, session_id: str) -> list[Reward]:
    return [_record(Reward, r) for r in await c.execute(_REWARDS, {"session_id": session_id})]


async def read_calls(c: Connection, session_id: str) -> list[Interaction]:
    """Without their texts."""
    return [_record(Interaction, r) for r in await c.execute(_CALLS, {"session_id": session_id})]


async def read_ancestors(c: Connection, calls: Collection[Interaction]) -> list[Interaction]:
    """Calls of the slot's earlier sessions that prefixes go back to."""
    known = {i.interaction_id for i in calls}
    found: list[Interaction] = []
    missing = {i.prefix_parent for i in calls if i.prefix_parent} - known
    while missing:
        rows = await c.execute(_CALLS_BY_ID, {"ids": sorted(missing)})
        step = [_record(Interaction, row) for row in rows]
        found += step
        known |= missing
        missing = {i.prefix_parent for i in step if i.prefix_parent} - known
    return found


async def newest_returns(c: Connection, session_id: str) -> tuple[int, dict[str, float]]:
    """The newest revision and its values; 0 and none where there is no revision yet."""
    rows = list(await c.execute(_RETURNS, {"session_id": session_id}))
    return rows[0].revision if rows else 0, {row.interaction_id: row.value for row in rows}


async def add_returns(
    c: Connection,
    session: Session,
    revision: int,
    value: Mapping[str, float],
    reward_seq: int,
    now: datetime,
) -> None:
    parameters = {
        "names": list(value),
        "values": list(value.values()),
        "revision": revision,
        "session_id": session.session_id,
        "tenant_id": session.tenant_id,
        "policy_id": session.policy_id,
        "reward_seq": reward_seq,
        "now": now,
    }
    await c.execute(_ADD_RETURNS, parameters)


async def add_sample(c: Connection, sample: Sample) -> None:
    """Once per id, which names the content."""
    values = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
    values |= {"state": sample.state.value, "interactions": Jsonb(sample.interactions)}
    await c.execute(_ADD_SAMPLE, values)


async def is_bound(c: Connection, session_id: str) -> bool:
    """Whether a sample of the session went into a step."""
    return bool((await c.execute(_BOUND, {"session_id": session_id})).one().n)


async def flag_calls(
    c: Connection, superseded: Collection[str], gaps: Mapping[str, list[str]]
) -> None:
    """Write down which calls a retry replaced, and what is wrong with which evidence."""
    if superseded:
        await c.execute(_SUPERSEDE, {"ids": sorted(superseded)})
    for name, found in gaps.items():
        await c.execute(_GAPS, {"name": name, "gaps": Jsonb(found)})


async def update_session(c: Connection, old: Session, new: Session) -> None:
    """Write what sealing may change of a session."""
    if new == old:
        return
    values = {
        "session_id": new.session_id,
        "state": new.state.value,
        "close_reason": new.close_reason,
        "closed_at": new.closed_at,
        "sealed_at": new.sealed_at,
        "sealed_reward_seq": new.sealed_reward_seq,
        "old_state": old.state.value,
        "old_seq": old.sealed_reward_seq,
    }
    written = (await c.execute(_UPDATE, values)).one_or_none()
    assert written is not None, f"session {new.session_id} changed under its lock"


async def lock_group(c: Connection, group_id: str) -> str:
    """Members of a group finish one after the other, so that the last one sees that it is."""
    row = (await c.execute(_LOCK_GROUP, {"group_id": group_id})).one_or_none()
    assert row is not None, f"group {group_id} has members but no row"
    return str(row.state)


async def finish_group(c: Connection, session: Session | Group) -> None:
    """open → ready or done, where the group (of the session) is whole."""
    parameters: dict[str, Any] = {
        "group_id": session.group_id,
        "channel": READY_CHANNEL,
        "payload": f"{session.tenant_id}/{session.policy_id}",
    }
    await c.execute(_FINISH_GROUP, parameters)


def _record(cls: type[T], row: Any) -> T:
    """The record of a row that has (at least) the record's columns."""
    hints = hints_of(cls)
    return cls(**{name: _value(hint, getattr(row, name)) for name, hint in hints.items()})


def _value(hint: Any, value: Any) -> Any:
    """As it is, but for the few fields whose type JSON and SQL do not have."""
    return build(hint, value) if isinstance(hint, type) and issubclass(hint, StrEnum) else value
