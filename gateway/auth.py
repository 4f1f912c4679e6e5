"""Who is calling: from a bearer token or ``x-api-key`` to a key's tenant, policy and scope.

Invariant: secrets are compared by their hashes, in constant time. A key that was looked up is
believed for ``TTL`` seconds at most; a chat call looks at its key's row each time all the same.
"""

import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass

from archon.records import Clock, Key, KeyScope
from archon.storage.keys import find_key, hash_key, is_valid
from gateway.errors import ApiError
from gateway.rows import Rows

TTL = 2.0
HELD = 20_000


@dataclass(frozen=True, slots=True)
class Caller:
    """``policy_id`` is empty where the key may use any policy of its tenant.

    ``operator``: the key of this installation's secrets folder, which has no row and is at home
    in every tenant.
    """

    scope: KeyScope
    tenant_id: str
    policy_id: str
    key_hash: str
    operator: bool = False

    def may_see(self, tenant_id: str, policy_id: str) -> bool:
        return self.operator or (self.tenant_id == tenant_id and self.policy_id in ("", policy_id))

    def require(self, *scopes: KeyScope) -> None:
        if self.scope not in scopes:
            wanted = " or ".join(scope.value for scope in scopes)
            raise ApiError(
                403, f"this needs a key of scope {wanted}; yours is a {self.scope.value} key"
            )


@dataclass
class Keyring:
    rows: Rows
    clock: Clock
    operator_hash: str | None
    operator_tenant: str

    def __post_init__(self) -> None:
        self._held: dict[str, tuple[float, Key]] = {}

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request; 401 where there is none."""
        secret = secret_of(headers)
        key_hash = hash_key(secret)
        if self.operator_hash is not None and hmac.compare_digest(key_hash, self.operator_hash):
            return Caller(KeyScope.ADMIN, self.operator_tenant, "", key_hash, operator=True)
        key = await self._key(key_hash)
        if key is None or not is_valid(key, self.clock()):
            raise unknown_key()
        return Caller(key.scope, key.tenant_id, key.policy_id, key_hash)

    async def _key(self, key_hash: str) -> Key | None:
        now = time.monotonic()
        held = self._held.get(key_hash)
        if held is not None and now - held[0] < TTL:
            return held[1]
        key = await self.rows.statement(lambda c: find_key(c, key_hash))
        if key is None or not hmac.compare_digest(key.key_hash, key_hash):
            return None
        if len(self._held) >= HELD:
            self._held.clear()
        self._held[key_hash] = (now, key)
        return key

    def forget(self, key_hash: str) -> None:
        self._held.pop(key_hash, None)


def secret_of(headers: Mapping[str, str]) -> str:
    """The secret that a request carries; 401 where it carries none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    secret = token.strip() if kind.lower() == "bearer" else ""
    secret = secret or headers.get("x-api-key", "").strip()
    if not secret:
        raise ApiError(
            401, "no API key: send 'Authorization: Bearer sk-…' or 'x-api-key: sk-…'",
            code="invalid_api_key",
        )  # fmt: skip
    return secret


def unknown_key() -> ApiError:
    return ApiError(
        401, "this API key is not known here, was revoked or has expired", code="invalid_api_key"
    )
