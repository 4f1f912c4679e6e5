"""API keys: who calls, for which tenant and policy, and how far it may go.

Invariant: only the SHA-256 of a secret reaches the database; the secret is shown once, at its
making. A key that is revoked or past its time names nobody.
"""

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from archon.records import Key, KeyScope
from archon.storage.direct import Connection

PREFIXES = {KeyScope.ADMIN: "sk-admin-", KeyScope.TENANT: "sk-", KeyScope.SESSION: "sk-sess-"}

_COLUMNS = "key_hash, tenant_id, policy_id, scope, label, created_at, expires_at, revoked_at"
_INSERT = sa.text(
    f"INSERT INTO api_key ({_COLUMNS}) VALUES (:key_hash, :tenant_id, :policy_id, :scope, :label,"
    " :created_at, :expires_at, NULL)"
)
_FIND = sa.text(f"SELECT {_COLUMNS} FROM api_key WHERE key_hash = :key_hash")
_LIST = sa.text(
    f"SELECT {_COLUMNS} FROM api_key WHERE tenant_id = :tenant_id AND scope = ANY(:scopes)"
    " ORDER BY created_at, key_hash"
)
_REVOKE = sa.text(
    "UPDATE api_key SET revoked_at = COALESCE(revoked_at, :now)"
    " WHERE key_hash = :key_hash AND tenant_id = :tenant_id RETURNING key_hash"
)


def hash_key(secret: str) -> str:
    """The name under which a secret is kept."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret(scope: KeyScope) -> str:
    return PREFIXES[scope] + secrets.token_urlsafe(24)


def is_valid(key: Key, now: datetime) -> bool:
    return key.revoked_at is None and (key.expires_at is None or now < key.expires_at)


async def create_key(
    c: Connection,
    tenant_id: str,
    policy_id: str,
    scope: KeyScope,
    now: datetime,
    label: str = "",
    expires_at: datetime | None = None,
) -> tuple[str, Key]:
    """Make a key; the secret is in the answer and nowhere else."""
    secret = new_secret(scope)
    key = Key(hash_key(secret), tenant_id, policy_id, scope, label, now, expires_at)
    await insert_key(c, key)
    return secret, key


async def insert_key(c: Connection, key: Key) -> None:
    values = {
        "key_hash": key.key_hash,
        "tenant_id": key.tenant_id,
        "policy_id": key.policy_id,
        "scope": key.scope.value,
        "label": key.label,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
    }
    await c.execute(_INSERT, values)


async def find_key(c: Connection, key_hash: str) -> Key | None:
    row = (await c.execute(_FIND, {"key_hash": key_hash})).one_or_none()
    return None if row is None else _key(row)


async def list_keys(
    c: Connection, tenant_id: str, scopes: Sequence[KeyScope] = (KeyScope.TENANT,)
) -> list[Key]:
    """A tenant's keys, revoked ones too, oldest first."""
    names = [scope.value for scope in scopes]
    return [_key(row) for row in await c.execute(_LIST, {"tenant_id": tenant_id, "scopes": names})]


async def revoke_key(c: Connection, tenant_id: str, key_hash: str, now: datetime) -> bool:
    """False where the tenant has no such key. Revoking twice keeps the first time."""
    values = {"key_hash": key_hash, "tenant_id": tenant_id, "now": now}
    return (await c.execute(_REVOKE, values)).one_or_none() is not None


def _key(row: sa.Row[Any]) -> Key:
    fields = row._asdict()
    return Key(**{**fields, "scope": KeyScope(fields["scope"])})
