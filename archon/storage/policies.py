"""The settings of a policy as the database has them.

Invariant: what comes back is a valid :class:`PolicySettings`; the cache is a hint that is at most
``ttl`` seconds old.
"""

import time
from typing import Any

import sqlalchemy as sa

from archon.records import PolicySettings, loads
from archon.storage.direct import Connection

_READ = sa.text(
    "SELECT settings FROM policy WHERE tenant_id = :tenant_id AND policy_id = :policy_id"
)
_LIST = sa.text(
    "SELECT policy_id, created_at FROM policy WHERE tenant_id = :tenant_id ORDER BY created_at,"
    " policy_id"
)


async def read_policy(c: Connection, tenant_id: str, policy_id: str) -> PolicySettings | None:
    row = (await c.execute(_READ, {"tenant_id": tenant_id, "policy_id": policy_id})).one_or_none()
    return None if row is None else loads(PolicySettings, row.settings)


async def list_policies(c: Connection, tenant_id: str) -> list[sa.Row[Any]]:
    """Rows with ``policy_id`` and ``created_at``, oldest first."""
    return list(await c.execute(_LIST, {"tenant_id": tenant_id}))


class PolicyCache:
    """Settings of the policies that were asked for lately."""

    def __init__(self, ttl: float = 5.0) -> None:
        self._ttl = ttl
        self._held: dict[tuple[str, str], tuple[float, PolicySettings]] = {}

    def peek(self, tenant_id: str, policy_id: str) -> PolicySettings | None:
        held = self._held.get((tenant_id, policy_id))
        return held[1] if held and time.monotonic() - held[0] < self._ttl else None

    async def get(self, c: Connection, tenant_id: str, policy_id: str) -> PolicySettings | None:
        settings = self.peek(tenant_id, policy_id)
        if settings is None:
            settings = await read_policy(c, tenant_id, policy_id)
            if settings is not None:
                self._held[tenant_id, policy_id] = (time.monotonic(), settings)
        return settings
