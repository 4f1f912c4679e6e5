"""Which tenant, policy and episode slot a call belongs to.

Invariant: a slot belongs to one tenant and one policy. A session that is named, in the path or in
a header, names its slot: a call finds the slot's open session, whatever became of the named one.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from archon.records import SESSION, KeyScope
from archon.storage.policies import list_policies
from archon.storage.sessions import find_session
from gateway.auth import Caller
from gateway.errors import ApiError, invalid, not_found
from gateway.rows import Rows

OURS, THEIRS = "x-archon-session", "x-session-id"
HELD = 20_000


@dataclass(frozen=True, slots=True)
class Target:
    tenant_id: str
    policy_id: str
    slot: str


@dataclass
class Slots:
    """``_known`` holds the targets of sessions; they never change."""

    rows: Rows
    _known: OrderedDict[str, Target] = field(default_factory=OrderedDict)

    async def target(
        self, caller: Caller, in_path: str | None, headers: Mapping[str, str], model: str
    ) -> Target:
        named = in_path or headers.get(OURS)
        theirs = headers.get(THEIRS, "")
        if named is None and theirs.startswith(f"{SESSION}_"):
            named = theirs
        if named is not None:
            return await self.of_session(caller, named)
        if caller.scope == KeyScope.SESSION:
            return Target(caller.tenant_id, caller.policy_id, caller.key_hash)
        policy_id = await self.policy_for(caller, caller.tenant_id, None, model)
        own = policy_id == caller.policy_id and not theirs
        parts = f"{caller.key_hash} {policy_id} {theirs}"
        slot = caller.key_hash if own else hashlib.sha256(parts.encode()).hexdigest()
        return Target(caller.tenant_id, policy_id, slot)

    async def of_session(self, caller: Caller, session_id: str) -> Target:
        """404 for a session that is not there, is another tenant's or another key's."""
        target = self._known.get(session_id)
        if target is None:
            session = await self.rows.statement(lambda c: find_session(c, session_id))
            if session is None:
                raise not_found("session", session_id)
            target = Target(session.tenant_id, session.policy_id, session.slot)
            self._known[session_id] = target
            if len(self._known) > HELD:
                self._known.popitem(last=False)
        if not caller.may_see(target.tenant_id, target.policy_id) or (
            caller.scope == KeyScope.SESSION and target.slot != caller.key_hash
        ):
            raise not_found("session", session_id)
        return target

    async def policy_for(
        self, caller: Caller, tenant_id: str, asked: str | None, model: str = ""
    ) -> str:
        """The key's policy, or the one asked for, or that ``model`` names, or the only one."""
        if caller.policy_id:
            if asked not in (None, caller.policy_id):
                raise not_found("policy", str(asked))
            return caller.policy_id
        policies = await self.policies(caller, tenant_id)
        if asked is not None:
            if asked not in policies:
                raise not_found("policy", asked)
            return asked
        if model in policies:
            return model
        if len(policies) != 1:
            raise _which(tenant_id, policies)
        return policies[0]

    async def policies(self, caller: Caller, tenant_id: str) -> list[str]:
        """The policies that a key may use, oldest first."""
        if caller.policy_id:
            return [caller.policy_id]
        rows = await self.rows.statement(lambda c: list_policies(c, tenant_id))
        return [row.policy_id for row in rows]


def _which(tenant_id: str, policies: list[str]) -> ApiError:
    if not policies:
        return ApiError(404, f"tenant {tenant_id!r} has no policy", code="policy_not_found")
    names = ", ".join(policies)
    return invalid(f"this key may use several policies: name one of {names}", param="model")
