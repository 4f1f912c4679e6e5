"""Captured calls: finding what a request continues, and writing what was sampled.

Invariant: an interaction's whole prompt is its prefix parents' ids followed by its own
``prompt_ids``; ``prompt_length`` and ``prompt_sha256`` are of the whole, and are checked when it is
put together again. ``seq`` counts a session's interactions from 1 without gaps.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
import sqlalchemy as sa
from psycopg.errors import UniqueViolation
from sqlalchemy.exc import IntegrityError

from archon.records import Interaction
from archon.storage.direct import Connection

SEALED_BEFORE = "after_seal: the session was sealed before this call ended"

# One round trip per call: the key, the slot's open session, and the call that is continued. The
# parts about a request without a parent are not looked up for one that has a parent.
_LOOK = sa.text(
    "SELECT k.key_hash AS key_hash, s.session_id, s.close_after,"
    " p.interaction_id AS parent_id, p.messages_digest AS parent_digest,"
    " p.request_digest AS parent_request, p.codec_digest AS parent_codec, p.contested,"
    " r.previous AS retried_previous, r.interaction_id AS retried_id, l.interaction_id AS last_id"
    " FROM (SELECT 1) one"
    " LEFT JOIN api_key k ON k.key_hash = :key_hash AND k.revoked_at IS NULL"
    " AND (k.expires_at IS NULL OR k.expires_at > :now)"
    " LEFT JOIN session s ON s.tenant_id = :tenant_id AND s.slot = :slot AND s.state = 'open'"
    " LEFT JOIN LATERAL (SELECT i.interaction_id, i.messages_digest, i.request_digest,"
    " i.codec_digest, i.status = 'superseded' OR EXISTS (SELECT 1 FROM interaction b"
    " WHERE b.session_id = i.session_id AND b.request_digest = i.request_digest"
    " AND b.interaction_id <> i.interaction_id) AS contested"
    " FROM interaction i WHERE i.session_id = s.session_id"
    " AND i.messages_digest = ANY(CAST(:digests AS text[]))"
    " AND i.status IN ('complete', 'superseded')"
    " ORDER BY array_position(CAST(:digests AS text[]), i.messages_digest),"
    " i.status = 'complete' DESC, i.seq DESC LIMIT 1) p ON true"
    " LEFT JOIN LATERAL (SELECT i.interaction_id, i.previous FROM interaction i"
    " WHERE p.interaction_id IS NULL AND i.session_id = s.session_id"
    " AND i.request_digest = :request_digest ORDER BY i.seq LIMIT 1) r ON true"
    " LEFT JOIN LATERAL (SELECT i.interaction_id FROM interaction i"
    " WHERE p.interaction_id IS NULL AND i.session_id = s.session_id AND i.status = 'complete'"
    " ORDER BY i.seq DESC LIMIT 1) l ON true"
)
_CHAIN = sa.text(
    "WITH RECURSIVE chain AS (SELECT prefix_parent, prompt_ids, output_ids, prompt_length,"
    " prompt_sha256, 0 AS back FROM interaction WHERE interaction_id = :interaction_id"
    " UNION ALL SELECT i.prefix_parent, i.prompt_ids, i.output_ids, i.prompt_length,"
    " i.prompt_sha256, c.back + 1 FROM interaction i JOIN chain c"
    " ON i.interaction_id = c.prefix_parent)"
    " SELECT prompt_ids, output_ids, prompt_length, prompt_sha256 FROM chain ORDER BY back DESC"
)
_COLUMNS = tuple(field.name for field in dataclasses.fields(Interaction))
_JSON = frozenset({"versions", "sampling", "evidence_gaps", "messages", "answer"})
_VALUES = {
    **{name: f":{name}" for name in _COLUMNS},
    **{name: f"CAST(:{name} AS jsonb)" for name in _JSON},
    "seq": "COALESCE((SELECT max(seq) FROM interaction WHERE session_id = :session_id), 0) + 1",
    "started_at": "CAST(:started_at AS timestamptz)",
    "ended_at": "CAST(:ended_at AS timestamptz)",
    # The session's row is locked by `live`: a seal is either seen here or sees this row.
    "evidence_gaps": "CASE WHEN live.state IN ('open', 'closed')"
    " THEN CAST(:evidence_gaps AS jsonb)"
    " ELSE CAST(:evidence_gaps AS jsonb) || to_jsonb(CAST(:sealed_before AS text)) END",
}
_LIVE = (
    "WITH live AS (UPDATE session SET last_call_at = GREATEST(COALESCE(last_call_at, :ended_at),"
    " :ended_at) WHERE session_id = :session_id RETURNING state)"
)
# Of several answers to one request, the one that is continued is the valid one.
_DECIDE = (
    ", decided AS (UPDATE interaction b SET status ="
    " CASE WHEN b.interaction_id = :winner THEN 'complete' ELSE 'superseded' END"
    " WHERE b.session_id = :session_id AND b.request_digest = :winner_request"
    " AND (b.interaction_id = :winner OR b.status = 'complete' AND NOT EXISTS"
    " (SELECT 1 FROM interaction n WHERE n.session_id = b.session_id"
    " AND n.previous = b.interaction_id)))"
)
_INSERT = (
    f" INSERT INTO interaction ({', '.join(_COLUMNS)})"
    f" SELECT {', '.join(_VALUES[name] for name in _COLUMNS)} FROM live"
    " ON CONFLICT (interaction_id) DO NOTHING RETURNING interaction_id"
)
_IS_THERE = sa.text("SELECT 1 FROM interaction WHERE interaction_id = :interaction_id")
_PUT = sa.text(_LIVE + _INSERT)
_PUT_AND_DECIDE = sa.text(_LIVE + _DECIDE + _INSERT)
_MAX_RACES = 200


class SessionGone(LookupError):
    """The session's row is no longer there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands in its session, as read before it is generated.

    ``session_id`` is None where the slot has no open session. ``parent_id`` is the earlier call
    whose answer the request's messages contain, with everything before it unchanged.
    ``contested``: other calls were made with the parent's own request.
    """

    key_valid: bool
    session_id: str | None
    close_after: datetime | None
    parent_id: str | None
    parent_digest: str | None
    parent_request: str | None
    parent_codec: str | None
    contested: bool
    previous: str | None


async def look(
    c: Connection,
    key_hash: str,
    tenant_id: str,
    slot: str,
    digests: Sequence[str],
    request_digest: str,
    now: datetime,
) -> Standing:
    """``digests`` name the beginnings of the conversation that end in an answer, longest first."""
    values = {
        "key_hash": key_hash,
        "tenant_id": tenant_id,
        "slot": slot,
        "digests": list(digests),
        "request_digest": request_digest,
        "now": now,
    }
    row = (await c.execute(_LOOK, values)).one()
    if row.parent_id is not None:
        previous = row.parent_id
    elif row.retried_id is not None:
        previous = row.retried_previous
    else:
        previous = row.last_id
    return Standing(
        key_valid=row.key_hash is not None,
        session_id=row.session_id,
        close_after=row.close_after,
        parent_id=row.parent_id,
        parent_digest=row.parent_digest,
        parent_request=row.parent_request,
        parent_codec=row.parent_codec,
        contested=bool(row.contested),
        previous=previous,
    )


async def whole_ids(c: Connection, interaction_id: str) -> tuple[bytes, bytes] | None:
    """An interaction's whole prompt and its output, as int32.

    None where they are not all there or do not agree with the digest of the prompt.
    """
    prompt = output = b""
    for row in await c.execute(_CHAIN, {"interaction_id": interaction_id}):
        prompt += output + row.prompt_ids
        output = row.output_ids
        if len(prompt) != 4 * row.prompt_length:
            return None
        if hashlib.sha256(prompt).hexdigest() != row.prompt_sha256:
            return None
    return (prompt, output) if prompt else None


async def put_interaction(
    c: Connection, record: Interaction, winner: tuple[str, str] | None = None
) -> None:
    """Store a call; again is harmless. Runs in autocommit: when this returns, it is committed.

    ``winner`` is (id, request digest) of the call that this one continues, where other answers
    were given to the same request: they are superseded. ``record.seq`` is chosen here.
    """
    values: dict[str, Any] = {name: getattr(record, name) for name in _COLUMNS}
    values |= {name: _jsonb(values[name]) for name in _JSON}
    values |= {"status": record.status.value, "sealed_before": SEALED_BEFORE}
    statement = _PUT
    if winner is not None:
        statement = _PUT_AND_DECIDE
        values |= {"winner": winner[0], "winner_request": winner[1]}
    for _ in range(_MAX_RACES):
        try:
            if (await c.execute(statement, values)).one_or_none() is None:
                await _check_there(c, record)
            return
        except (IntegrityError, UniqueViolation) as error:
            if "interaction_seq" not in str(error):
                raise
    raise RuntimeError(
        f"session {record.session_id}: {_MAX_RACES} other calls took the number of "
        f"{record.interaction_id}"
    )


async def _check_there(c: Connection, record: Interaction) -> None:
    """Nothing was inserted: because it is there already, or because its session is gone."""
    values = {"interaction_id": record.interaction_id}
    if (await c.execute(_IS_THERE, values)).one_or_none() is None:
        raise SessionGone(f"session {record.session_id} was removed: its call is not stored")


def _jsonb(value: object) -> str:
    """JSON text as Postgres takes it, which has no NUL: in what people read it becomes U+FFFD."""
    text = orjson.dumps(value)
    return orjson.dumps(_without_nul(value)).decode() if b"\\u0000" in text else text.decode()


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, list):
        return [_without_nul(item) for item in value]
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(item) for key, item in value.items()}
    return value
