"""Opening, closing and finding sessions, as a gateway does it.

Invariant: a slot has at most one open session (a unique index holds it), and what opens or closes
a session writes its outbox entry in the same transaction. A state is left by compare-and-set only.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from archon.records import (
    GROUP,
    SESSION,
    CloseReason,
    Group,
    GroupState,
    IdSource,
    KeyScope,
    Session,
    SessionState,
)
from archon.storage.database import OUTBOX_CHANNEL
from archon.storage.direct import Connection
from archon.storage.keys import hash_key, new_secret

_SESSION = (
    "s.session_id, s.tenant_id, s.policy_id, s.group_id, s.slot, s.state, s.created_at, s.task_id,"
    " s.labels, s.close_reason, s.close_after, s.closed_at, s.sealed_at, s.sealed_reward_seq,"
    " s.last_call_at, s.trainable"
)
_FIND = sa.text(f"SELECT {_SESSION} FROM session s WHERE s.session_id = :session_id")
_OF_INTERACTION = sa.text(
    f"SELECT {_SESSION} FROM interaction i JOIN session s USING (session_id)"
    " WHERE i.interaction_id = :interaction_id"
)
_OF_SLOT = sa.text(
    f"SELECT {_SESSION} FROM session s WHERE s.tenant_id = :tenant_id AND s.slot = :slot"
    " ORDER BY (s.state = 'open') DESC, s.created_at DESC, s.session_id DESC LIMIT 1"
)
_GROUP = sa.text(
    "SELECT group_id, tenant_id, policy_id, task_id, size, state, created_at, deadline"
    " FROM rollout_group WHERE group_id = :group_id FOR SHARE"
)
_INSERT_GROUP = sa.text(
    "INSERT INTO rollout_group"
    " (group_id, tenant_id, policy_id, task_id, size, state, created_at, deadline)"
    " VALUES (:group_id, :tenant_id, :policy_id, :task_id, :size, 'open', :now, :deadline)"
    " ON CONFLICT (group_id) DO NOTHING RETURNING group_id"
)
_START = sa.text(
    "WITH new AS (SELECT * FROM unnest(CAST(:session_ids AS text[]), CAST(:slots AS text[]))"
    " AS n (session_id, slot)),"
    " grouped AS (INSERT INTO rollout_group"
    " (group_id, tenant_id, policy_id, task_id, size, state, created_at, deadline)"
    " SELECT :group_id, :tenant_id, :policy_id, :task_id, :size, 'open', :now,"
    " CAST(:deadline AS timestamptz) WHERE :with_group),"
    " opened AS (INSERT INTO session (session_id, tenant_id, policy_id, group_id, slot, state,"
    " created_at, task_id, labels, close_reason, sealed_reward_seq, trainable)"
    " SELECT session_id, :tenant_id, :policy_id, :group_id, slot, 'open', :now, :task_id,"
    " CAST(:labels AS jsonb), '', 0, :trainable FROM new),"
    " keyed AS (INSERT INTO api_key"
    " (key_hash, tenant_id, policy_id, scope, label, created_at, expires_at)"
    " SELECT slot, :tenant_id, :policy_id, 'session', :task_id, :now,"
    " CAST(:expires_at AS timestamptz) FROM new WHERE :with_keys),"
    " told AS (INSERT INTO outbox (tenant_id, policy_id, session_id, kind, ref, created_at)"
    " SELECT :tenant_id, :policy_id, session_id, 'session', session_id, :now FROM new)"
    " SELECT pg_notify(:channel, '')"
)
_CLOSE = sa.text(
    "WITH closed AS (UPDATE session SET state = 'closed', close_reason = :reason, closed_at = :now"
    " WHERE session_id = :session_id AND tenant_id = :tenant_id AND state = 'open'"
    " AND (NOT :only_due OR close_after <= :now)"
    " RETURNING tenant_id, policy_id, session_id),"
    " told AS (INSERT INTO outbox (tenant_id, policy_id, session_id, kind, ref, created_at)"
    " SELECT tenant_id, policy_id, session_id, 'close', session_id, :now FROM closed)"
    " SELECT pg_notify(:channel, '') FROM closed"
)
_OPEN_NEXT = sa.text(
    "WITH opened AS (INSERT INTO session (session_id, tenant_id, policy_id, group_id, slot, state,"
    " created_at, task_id, labels, close_reason, sealed_reward_seq, trainable)"
    " VALUES (:session_id, :tenant_id, :policy_id, :group_id, :slot, 'open', :now, :task_id,"
    " CAST(:labels AS jsonb), '', 0, :trainable)"
    " ON CONFLICT (tenant_id, slot) WHERE state = 'open' AND slot <> '' DO NOTHING"
    " RETURNING session_id),"
    " grouped AS (INSERT INTO rollout_group"
    " (group_id, tenant_id, policy_id, task_id, size, state, created_at, deadline)"
    " SELECT :group_id, :tenant_id, :policy_id, :task_id, 1, 'open', :now,"
    " CAST(:deadline AS timestamptz) FROM opened),"
    " told AS (INSERT INTO outbox (tenant_id, policy_id, session_id, kind, ref, created_at)"
    " SELECT :tenant_id, :policy_id, session_id, 'session', session_id, :now FROM opened)"
    " SELECT pg_notify(:channel, '') FROM opened"
)
_CALLS = sa.text(
    "SELECT count(*) AS calls, count(*) FILTER (WHERE status = 'complete') AS complete"
    " FROM interaction WHERE session_id = :session_id"
)


class GroupConflict(ValueError):
    """The group that was named cannot take these sessions."""


@dataclass(frozen=True)
class Plan:
    """What is to be opened. ``group_id`` of the client's own making is scoped to its tenant.

    ``size`` is the planned size of a new group; ``count`` how many sessions to open now: the whole
    of a new group unless said, one in a group that is there.
    """

    tenant_id: str
    policy_id: str
    task_id: str = ""
    group_id: str | None = None
    size: int = 1
    count: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    trainable: bool = True
    deadline: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True)
class Started:
    """An opened session; ``secret`` is its key, None where the slot's key is another's."""

    session_id: str
    group_id: str
    secret: str | None


def group_name(plan: Plan) -> str:
    """The id under which a client's group is kept: two tenants may use one name."""
    assert plan.group_id is not None
    if plan.group_id.startswith(f"{GROUP}_"):
        return plan.group_id
    name = json.dumps([plan.tenant_id, plan.policy_id, plan.group_id])
    return f"{GROUP}_{hashlib.sha256(name.encode()).hexdigest()[:24]}"


async def start_sessions(
    c: Connection, plan: Plan, now: datetime, new_id: IdSource
) -> list[Started]:
    """Open a group's sessions, each under a new key. The caller owns the transaction."""
    group_id, count = await _group_for(c, plan, now, new_id)
    with_group = plan.group_id is None
    secrets = [new_secret(KeyScope.SESSION) for _ in range(count)]
    ids = [new_id(SESSION) for _ in range(count)]
    await _start(c, plan, group_id, ids, [hash_key(s) for s in secrets], now, True, with_group)
    return [Started(i, group_id, s) for i, s in zip(ids, secrets, strict=True)]


async def refresh_slot(
    c: Connection, plan: Plan, slot: str, now: datetime, new_id: IdSource
) -> Started:
    """Close what is open in the slot and open its next session, under the same key."""
    current = await session_of_slot(c, plan.tenant_id, slot)
    if current is not None and current.state == SessionState.OPEN:
        await close_session(c, plan.tenant_id, current.session_id, CloseReason.REFRESH, now)
    group_id, _ = await _group_for(c, plan, now, new_id)
    session_id, with_group = new_id(SESSION), plan.group_id is None
    await _start(c, plan, group_id, [session_id], [slot], now, False, with_group)
    return Started(session_id, group_id, None)


async def open_next(
    c: Connection,
    tenant_id: str,
    policy_id: str,
    slot: str,
    now: datetime,
    deadline: datetime,
    new_id: IdSource,
) -> None:
    """Make sure that the slot has an open session that is not due to close.

    The next session carries the last one's task and labels, in a group of its own. Of two callers
    that race, one opens it and both go on with it.
    """
    last = await session_of_slot(c, tenant_id, slot)
    if last is not None and last.state == SessionState.OPEN:
        await close_session(c, tenant_id, last.session_id, CloseReason.REWARD, now, only_due=True)
    await c.execute(
        _OPEN_NEXT,
        {
            "session_id": new_id(SESSION),
            "tenant_id": tenant_id,
            "policy_id": policy_id,
            "group_id": new_id(GROUP),
            "slot": slot,
            "now": now,
            "task_id": last.task_id if last else "",
            "labels": json.dumps(last.labels if last else {}),
            "trainable": last.trainable if last else True,
            "deadline": deadline,
            "channel": OUTBOX_CHANNEL,
        },
    )


async def close_session(
    c: Connection,
    tenant_id: str,
    session_id: str,
    reason: CloseReason,
    now: datetime,
    only_due: bool = False,
) -> bool:
    """open → closed; False where it was not open (or, with ``only_due``, not due)."""
    values = {
        "session_id": session_id,
        "tenant_id": tenant_id,
        "reason": reason.value,
        "now": now,
        "only_due": only_due,
        "channel": OUTBOX_CHANNEL,
    }
    return (await c.execute(_CLOSE, values)).one_or_none() is not None


async def find_session(c: Connection, session_id: str) -> Session | None:
    return _session((await c.execute(_FIND, {"session_id": session_id})).one_or_none())


async def session_of_interaction(c: Connection, interaction_id: str) -> Session | None:
    values = {"interaction_id": interaction_id}
    return _session((await c.execute(_OF_INTERACTION, values)).one_or_none())


async def session_of_slot(c: Connection, tenant_id: str, slot: str) -> Session | None:
    """The slot's open session, else its newest."""
    values = {"tenant_id": tenant_id, "slot": slot}
    return _session((await c.execute(_OF_SLOT, values)).one_or_none())


async def count_calls(c: Connection, session_id: str) -> tuple[int, int]:
    """All captured calls of a session, and the complete ones."""
    row = (await c.execute(_CALLS, {"session_id": session_id})).one()
    return row.calls, row.complete


async def _group_for(c: Connection, plan: Plan, now: datetime, new_id: IdSource) -> tuple[str, int]:
    """The group's id and how many sessions to open in it. A group that was named is made here
    if it is new; one that was not is made with its sessions."""
    if plan.group_id is None:
        return new_id(GROUP), plan.size if plan.count is None else plan.count
    group_id = group_name(plan)
    values = {
        "group_id": group_id,
        "tenant_id": plan.tenant_id,
        "policy_id": plan.policy_id,
        "task_id": plan.task_id,
        "size": plan.size,
        "now": now,
        "deadline": plan.deadline,
    }
    if (await c.execute(_INSERT_GROUP, values)).one_or_none() is not None:
        return group_id, plan.size if plan.count is None else plan.count
    group = _group((await c.execute(_GROUP, {"group_id": group_id})).one())
    if (group.tenant_id, group.policy_id) != (plan.tenant_id, plan.policy_id):
        raise LookupError(group_id)
    if group.state != GroupState.OPEN:
        raise GroupConflict(
            f"group {plan.group_id} is {group.state.value} and takes no more sessions: "
            "start another group"
        )
    return group_id, 1 if plan.count is None else plan.count


async def _start(
    c: Connection,
    plan: Plan,
    group_id: str,
    session_ids: Sequence[str],
    slots: Sequence[str],
    now: datetime,
    with_keys: bool,
    with_group: bool,
) -> None:
    await c.execute(
        _START,
        {
            "session_ids": list(session_ids),
            "slots": list(slots),
            "tenant_id": plan.tenant_id,
            "policy_id": plan.policy_id,
            "group_id": group_id,
            "now": now,
            "task_id": plan.task_id,
            "labels": json.dumps(plan.labels),
            "trainable": plan.trainable,
            "expires_at": plan.expires_at,
            "with_keys": with_keys,
            "with_group": with_group,
            "size": plan.size,
            "deadline": plan.deadline,
            "channel": OUTBOX_CHANNEL,
        },
    )


def _session(row: sa.Row[Any] | None) -> Session | None:
    if row is None:
        return None
    return Session(**{**row._asdict(), "state": SessionState(row.state)})


def _group(row: sa.Row[Any]) -> Group:
    return Group(**{**row._asdict(), "state": GroupState(row.state)})
