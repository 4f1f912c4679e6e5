"""``/rl/…``: sessions, rewards and ends, as AReaL's users know them.

Invariant: what is answered with 200 is a committed row with its outbox entry. Another tenant's
ids answer 404. Both generations of AReaL's bodies are accepted and answered: ``session_id`` and
``api_key`` at the top, and ``group_id`` with ``sessions`` beside them.
"""

from datetime import timedelta
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from archon.failpoints import failpoint
from archon.records import (
    REWARD,
    CloseReason,
    KeyScope,
    Reward,
    Session,
    SessionState,
    parse_reward,
)
from archon.storage.direct import Direct
from archon.storage.keys import find_key, hash_key, is_valid
from archon.storage.rewards import RewardConflict, put_reward, rewards_of
from archon.storage.sessions import (
    GroupConflict,
    Plan,
    Started,
    close_session,
    count_calls,
    find_session,
    refresh_slot,
    session_of_interaction,
    session_of_slot,
    start_sessions,
)
from gateway import metrics
from gateway.auth import Caller
from gateway.errors import ApiError, not_found
from gateway.fields import flag, mapping, optional_text, text, when, whole, wrong
from gateway.request import read_json
from gateway.service import Service

MAX_GROUP = 4096


def answer(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


class RlRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def start_session(self, request: Request) -> Response:
        service = self._service
        caller = await service.keyring.caller(request.headers)
        caller.require(KeyScope.ADMIN, KeyScope.TENANT)
        fields = read_json(await request.body() or b"{}")
        plan = await self._plan(caller, fields)
        api_key = optional_text(fields, "api_key")
        try:
            if api_key is not None:
                if plan.size > 1 or (plan.count or 1) > 1:
                    raise wrong("api_key", "a known key opens one session: leave group_size out")
                started = await self._refresh(caller, plan, api_key)
            else:
                now = service.clock()
                started = await service.rows.transaction(
                    lambda c: start_sessions(c, plan, now, service.new_id)
                )
        except LookupError:
            raise not_found("group", str(plan.group_id)) from None
        except GroupConflict as error:
            raise ApiError(409, str(error), code="group_closed", param="group_id") from error
        return answer(_started(plan, started))

    async def set_reward(self, request: Request) -> Response:
        service = self._service
        caller = await service.keyring.caller(request.headers)
        fields = read_json(await request.body())
        parsed = parse_reward(fields)
        if parsed.value is None:
            metrics.REWARDS.labels("refused").inc()
            raise ApiError(422, f"reward: {parsed.rejected}", param="reward", code="bad_reward")
        session = await self._session_for(caller, fields, parsed.interaction_id)
        settings = await service.catalog.settings(session.tenant_id, session.policy_id)
        key = parsed.idempotency_key or request.headers.get("idempotency-key")
        now = service.clock()
        reward = Reward(
            reward_id=service.new_id(REWARD),
            session_id=session.session_id,
            tenant_id=session.tenant_id,
            policy_id=session.policy_id,
            component=parsed.component,
            source=parsed.source,
            created_at=now,
            value=parsed.value,
            interaction_id=parsed.interaction_id,
            idempotency_key=key,
            raw=parsed.raw,
        )
        closes = settings.close_on == "reward" and parsed.interaction_id is None
        close_after = now + timedelta(seconds=settings.close_grace) if closes else None
        try:
            delivered = await service.rows.statement(lambda c: put_reward(c, reward, close_after))
        except RewardConflict as error:
            metrics.REWARDS.labels("conflict").inc()
            raise ApiError(409, str(error), code="idempotency_conflict") from error
        failpoint("gateway.after_reward_row")
        metrics.REWARDS.labels("duplicate" if delivered.duplicate else "stored").inc()
        return answer(
            {
                "message": "success",
                "reward_id": delivered.reward_id,
                "session_id": session.session_id,
                "interaction_id": parsed.interaction_id,
                "interaction_count": delivered.calls,
                "seq": delivered.seq,
                "duplicate": delivered.duplicate,
                "trajectory_id": session.session_id,
            }
        )

    async def end_session(self, request: Request) -> Response:
        service = self._service
        caller = await service.keyring.caller(request.headers)
        fields = read_json(await request.body() or b"{}")
        session = await self._session_for(caller, fields, None)

        async def end(c: Direct) -> tuple[bool, int]:
            closed = await close_session(
                c, session.tenant_id, session.session_id, CloseReason.END, service.clock()
            )
            return closed, (await count_calls(c, session.session_id))[0]

        closed, calls = await service.rows.statement(end)
        return answer(
            {
                "message": "success",
                "session_id": session.session_id,
                "interaction_count": calls,
                "closed_now": closed,
            }
        )

    async def session(self, request: Request) -> Response:
        """State, rewards and number of calls of one session."""
        service = self._service
        caller = await service.keyring.caller(request.headers)
        session_id = request.path_params["session_id"]
        await service.slots.of_session(caller, session_id)

        async def read(c: Direct) -> tuple[Session | None, tuple[int, int], list[Reward]]:
            return (
                await find_session(c, session_id),
                await count_calls(c, session_id),
                await rewards_of(c, session_id),
            )

        found, (calls, complete), rewards = await service.rows.statement(read)
        if found is None:
            raise not_found("session", session_id)
        return answer(_described(found, calls, complete, rewards))

    async def _plan(self, caller: Caller, fields: dict[str, Any]) -> Plan:
        service = self._service
        tenant_id = optional_text(fields, "tenant") or caller.tenant_id
        if tenant_id != caller.tenant_id and not caller.operator:
            raise not_found("tenant", tenant_id)
        policy_id = await service.slots.policy_for(
            caller, tenant_id, optional_text(fields, "policy"), text(fields, "model")
        )
        settings = await service.catalog.settings(tenant_id, policy_id)
        timeout = timedelta(seconds=settings.group_timeout)
        return Plan(
            tenant_id=tenant_id,
            policy_id=policy_id,
            task_id=text(fields, "task_id"),
            group_id=optional_text(fields, "group_id"),
            size=whole(fields, "group_size", 1, MAX_GROUP) or 1,
            count=whole(fields, "count", 1, MAX_GROUP),
            labels=mapping(fields, "labels"),
            trainable=flag(fields, "trainable", True),
            deadline=when(fields, "deadline") or service.clock() + timeout,
            expires_at=when(fields, "expires_at"),
        )

    async def _refresh(self, caller: Caller, plan: Plan, api_key: str) -> list[Started]:
        """The key keeps its slot: what is open there is closed, and the next session opened."""
        service, now, slot = self._service, self._service.clock(), hash_key(api_key)
        key = await service.rows.statement(lambda c: find_key(c, slot))
        if key is None or key.scope != KeyScope.SESSION or not is_valid(key, now):
            raise not_found("session key", f"{api_key[:12]}…")
        if (key.tenant_id, key.policy_id) != (plan.tenant_id, plan.policy_id):
            raise not_found("session key", f"{api_key[:12]}…")
        one = await service.rows.transaction(
            lambda c: refresh_slot(c, plan, slot, now, service.new_id)
        )
        return [Started(one.session_id, one.group_id, api_key)]

    async def _session_for(
        self, caller: Caller, fields: dict[str, Any], interaction_id: str | None
    ) -> Session:
        """The session that a reward or an end is for; 404 where it is not the caller's."""
        rows = self._service.rows
        named = optional_text(fields, "session_id")
        if interaction_id is not None:
            found = await rows.statement(lambda c: session_of_interaction(c, interaction_id))
            if found is None or named not in (None, found.session_id):
                raise not_found("interaction", interaction_id)
            what, name = "interaction", interaction_id
        elif named is not None:
            found = await rows.statement(lambda c: find_session(c, named))
            what, name = "session", named
        elif caller.scope == KeyScope.SESSION:
            found = await rows.statement(
                lambda c: session_of_slot(c, caller.tenant_id, caller.key_hash)
            )
            what, name = "session", "of this key"
        else:
            raise ApiError(
                400, f"a {caller.scope.value} key must name a session_id", param="session_id"
            )
        if found is None or not caller.may_see(found.tenant_id, found.policy_id):
            raise not_found(what, name)
        if caller.scope == KeyScope.SESSION and found.slot != caller.key_hash:
            raise not_found(what, name)
        return found


def _started(plan: Plan, started: list[Started]) -> dict[str, Any]:
    sessions = [
        {"session_id": one.session_id, "session_api_key": one.secret, "api_key": one.secret}
        for one in started
    ]
    return {
        "session_id": started[0].session_id,
        "api_key": started[0].secret,
        "group_id": started[0].group_id,
        "sessions": sessions,
        "session_ids": [one.session_id for one in started],
        "api_keys": [one.secret for one in started],
        "policy": plan.policy_id,
        "tenant": plan.tenant_id,
    }


def _described(
    session: Session, calls: int, complete: int, rewards: list[Reward]
) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "tenant": session.tenant_id,
        "policy": session.policy_id,
        "group_id": session.group_id,
        "task_id": session.task_id,
        "state": SessionState(session.state).value,
        "close_reason": session.close_reason,
        "labels": session.labels,
        "trainable": session.trainable,
        "created_at": session.created_at,
        "last_call_at": session.last_call_at,
        "close_after": session.close_after,
        "closed_at": session.closed_at,
        "sealed_at": session.sealed_at,
        "interactions": calls,
        "complete": complete,
        "rewards": [
            {
                "reward_id": reward.reward_id,
                "seq": reward.seq,
                "value": reward.value,
                "interaction_id": reward.interaction_id,
                "component": reward.component,
                "source": reward.source,
                "rejected": reward.rejected,
                "created_at": reward.created_at,
            }
            for reward in rewards
        ],
    }
