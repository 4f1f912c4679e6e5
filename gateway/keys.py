"""``/rl/keys``: making, listing and revoking keys. Only an admin key may.

Invariant: a secret is shown in the answer to its making and never again.
"""

from datetime import timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from archon.records import Key, KeyScope
from archon.storage.keys import create_key, list_keys, revoke_key
from gateway.auth import Caller
from gateway.errors import not_found
from gateway.fields import optional_text, text, when, whole, wrong
from gateway.request import read_json
from gateway.rl import answer
from gateway.service import Service

SCOPES = {"tenant": KeyScope.TENANT, "admin": KeyScope.ADMIN}
TEN_YEARS = 10 * 366 * 86400


class KeyRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        service = self._service
        caller = await self._admin(request)
        fields = read_json(await request.body() or b"{}")
        tenant_id = self._tenant(caller, optional_text(fields, "tenant"))
        name = text(fields, "scope") or "tenant"
        if name not in SCOPES:
            raise wrong("scope", "must be tenant or admin; /rl/start_session makes session keys")
        scope = SCOPES[name]
        policy_id = ""
        if scope == KeyScope.TENANT:
            asked = optional_text(fields, "policy")
            policy_id = await service.slots.policy_for(caller, tenant_id, asked)
        now = service.clock()
        seconds = whole(fields, "expires_in", 1, TEN_YEARS)
        expires_at = now + timedelta(seconds=seconds) if seconds else when(fields, "expires_at")
        secret, key = await service.rows.transaction(
            lambda c: create_key(
                c, tenant_id, policy_id, scope, now, text(fields, "label"), expires_at
            )
        )
        return answer({"api_key": secret, **_shown(key)})

    async def list(self, request: Request) -> Response:
        caller = await self._admin(request)
        tenant_id = self._tenant(caller, request.query_params.get("tenant"))
        of_sessions = request.query_params.get("scope") == "session"
        scopes = [KeyScope.SESSION] if of_sessions else [KeyScope.TENANT, KeyScope.ADMIN]
        keys = await self._service.rows.statement(lambda c: list_keys(c, tenant_id, scopes))
        return answer({"keys": [_shown(key) for key in keys]})

    async def revoke(self, request: Request) -> Response:
        service = self._service
        caller = await self._admin(request)
        key_id = request.path_params["key_id"]
        tenant_id = self._tenant(caller, request.query_params.get("tenant"))
        now = service.clock()
        if not await service.rows.statement(lambda c: revoke_key(c, tenant_id, key_id, now)):
            raise not_found("key", key_id)
        service.keyring.forget(key_id)
        return answer({"key_id": key_id, "revoked": True})

    async def _admin(self, request: Request) -> Caller:
        caller = await self._service.keyring.caller(request.headers)
        caller.require(KeyScope.ADMIN)
        return caller

    def _tenant(self, caller: Caller, asked: str | None) -> str:
        if asked not in (None, caller.tenant_id) and not caller.operator:
            raise not_found("tenant", str(asked))
        return asked or caller.tenant_id


def _shown(key: Key) -> dict[str, Any]:
    return {
        "key_id": key.key_hash,
        "tenant": key.tenant_id,
        "policy": key.policy_id,
        "scope": KeyScope(key.scope).value,
        "label": key.label,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }
