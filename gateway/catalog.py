"""The policies that are served: their settings, and the codec of their model.

Invariant: rendering and parsing are done by the codec of the policy's own model folder, loaded
once for each folder, in a thread.
"""

import asyncio
from dataclasses import dataclass, field

from archon.codec import Codec
from archon.records import PolicySettings
from archon.storage.policies import PolicyCache
from gateway.errors import ApiError, not_found
from gateway.rows import Rows


@dataclass(frozen=True, slots=True)
class Served:
    settings: PolicySettings
    codec: Codec


@dataclass
class Catalog:
    rows: Rows
    _settings: PolicyCache = field(default_factory=PolicyCache)
    _codecs: dict[str, asyncio.Task[Codec]] = field(default_factory=dict)

    async def get(self, tenant_id: str, policy_id: str) -> Served:
        settings = await self.settings(tenant_id, policy_id)
        return Served(settings, await self._codec(policy_id, settings.model))

    async def settings(self, tenant_id: str, policy_id: str) -> PolicySettings:
        """404 where the tenant has no such policy."""
        settings = self._settings.peek(tenant_id, policy_id)
        if settings is None:
            settings = await self.rows.statement(
                lambda c: self._settings.get(c, tenant_id, policy_id)
            )
        if settings is None:
            raise not_found("policy", policy_id)
        return settings

    async def _codec(self, policy_id: str, model: str) -> Codec:
        loading = self._codecs.get(model)
        if loading is None:
            loading = asyncio.ensure_future(asyncio.to_thread(Codec.load, model))
            self._codecs[model] = loading
        if loading.done() and not loading.exception():
            return loading.result()
        try:
            return await asyncio.shield(loading)
        except (OSError, ValueError, KeyError) as error:
            self._codecs.pop(model, None)
            raise ApiError(
                500, f"policy {policy_id!r}: its tokenizer or chat template cannot be read: {error}"
            ) from error
