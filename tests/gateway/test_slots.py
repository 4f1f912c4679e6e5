"""Episode slots: what closes a session, and how the next one opens without the agent's noticing."""

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from archon.storage import tables
from tests.gateway.kit import ADMIN, Clock, World, running
from tests.kit.scripted_engine import Answer, ScriptedEngine
from tests.kit.stack import Databases

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}
CLOCK = Clock()


@pytest.fixture(scope="module")
async def timed(
    databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """A gateway whose time is set by the test."""
    folder: Path = tmp_path_factory.mktemp("timed")
    async with running(databases.create(), folder, clock=CLOCK) as made:
        yield made


@pytest.fixture
async def slot(timed: World, engine: ScriptedEngine) -> World:
    world = dataclasses.replace(timed, tenant=f"t-{secrets.token_hex(4)}")
    engine.default = Answer([70])
    await world.policy()
    await world.replica(engine)
    return world


async def call(world: World, key: str, path: str = "/v1", **headers: str) -> str:
    response = await world.post(
        f"{path}/chat/completions", key, {"model": "m", "messages": [USER]}, headers=headers
    )
    assert response.status_code == 200, response.text
    return response.headers["x-archon-session"]


async def state(world: World, session_id: str) -> tuple[str, str]:
    [row] = await world.rows(tables.session, session_id=session_id)
    return row["state"], row["close_reason"]


async def told(world: World, kind: str) -> list[str]:
    rows = await world.rows(tables.outbox, kind=kind)
    return [row["session_id"] for row in sorted(rows, key=lambda row: row["outbox_id"])]


async def test_a_reward_closes_after_its_grace_and_the_next_call_opens(slot: World) -> None:
    started = await slot.start(task_id="t1", labels={"a": "b"})
    key, first = started["api_key"], started["session_id"]
    assert await call(slot, key) == first
    assert (await slot.post("/rl/set_reward", key, {"reward": 1.0})).status_code == 200
    [row] = await slot.rows(tables.session, session_id=first)
    assert row["close_after"] == CLOCK.now + timedelta(seconds=2)
    CLOCK.now += timedelta(seconds=1.9)
    assert await call(slot, key) == first
    CLOCK.now += timedelta(seconds=0.1)
    second = await call(slot, key)
    assert second != first
    assert await state(slot, first) == ("closed", "reward")
    assert await state(slot, second) == ("open", "")
    [row] = await slot.rows(tables.session, session_id=second)
    assert row["task_id"] == "t1" and row["labels"] == {"a": "b"}
    [group] = await slot.rows(tables.group, group_id=row["group_id"])
    assert group["size"] == 1 and row["group_id"] != started["group_id"]
    assert await told(slot, "session") == [first, second]
    assert await told(slot, "close") == [first]
    calls = await slot.interactions(second)
    assert [(c.seq, c.previous) for c in calls] == [(1, None)]


async def test_the_first_reward_sets_the_time(slot: World) -> None:
    started = await slot.start()
    key = started["api_key"]
    await call(slot, key)
    await slot.post("/rl/set_reward", key, {"reward": 1.0})
    begun = CLOCK.now
    CLOCK.now += timedelta(seconds=1)
    await slot.post("/rl/set_reward", key, {"reward": 0.5, "component": "style"})
    [row] = await slot.rows(tables.session, session_id=started["session_id"])
    assert row["close_after"] == begun + timedelta(seconds=2)


async def test_a_reward_for_one_call_does_not_close(slot: World) -> None:
    started = await slot.start()
    key = started["api_key"]
    await call(slot, key)
    [interaction] = await slot.interactions()
    body = {"reward": 0.5, "interaction_id": interaction.interaction_id}
    assert (await slot.post("/rl/set_reward", key, body)).status_code == 200
    CLOCK.now += timedelta(seconds=60)
    assert await call(slot, key) == started["session_id"]


@pytest.mark.parametrize("close_on", ["end", "idle"])
async def test_a_policy_may_close_otherwise(
    timed: World, engine: ScriptedEngine, close_on: str
) -> None:
    world = dataclasses.replace(timed, tenant=f"t-{secrets.token_hex(4)}")
    engine.default = Answer([70])
    await world.policy(close_on=close_on)
    await world.replica(engine)
    started = await world.start()
    key = started["api_key"]
    await call(world, key)
    await world.post("/rl/set_reward", key, {"reward": 1.0})
    CLOCK.now += timedelta(seconds=60)
    assert await call(world, key) == started["session_id"]
    ended = await world.post("/rl/end_session", key)
    assert ended.status_code == 200 and ended.json()["interaction_count"] == 2
    assert await call(world, key) != started["session_id"]
    assert await state(world, started["session_id"]) == ("closed", "end")


async def test_a_refresh_closes_and_opens_under_the_same_key(slot: World) -> None:
    started = await slot.start(task_id="t1")
    key = started["api_key"]
    await call(slot, key)
    again = await slot.start(task_id="t2", api_key=key)
    assert again["api_key"] == key and again["session_id"] != started["session_id"]
    assert await state(slot, started["session_id"]) == ("closed", "refresh")
    assert await call(slot, key) == again["session_id"]
    assert (await told(slot, "close"), len(await told(slot, "session"))) == (
        [started["session_id"]], 2,
    )  # fmt: skip
    unknown = await slot.post(
        "/rl/start_session", ADMIN, {"tenant": slot.tenant, "api_key": "sk-sess-nobody"}
    )
    assert unknown.status_code == 404


async def test_an_end_is_once_and_needs_no_call(slot: World) -> None:
    started = await slot.start()
    for closed_now in (True, False):
        ended = await slot.post("/rl/end_session", started["api_key"])
        assert ended.status_code == 200
        assert ended.json()["closed_now"] is closed_now
        assert ended.json()["interaction_count"] == 0
    assert await told(slot, "close") == [started["session_id"]]


async def test_a_late_reward_goes_to_the_closed_session(slot: World) -> None:
    started = await slot.start()
    key = started["api_key"]
    await call(slot, key)
    await slot.post("/rl/end_session", key)
    response = await slot.post("/rl/set_reward", key, {"reward": 0.25})
    assert response.json()["session_id"] == started["session_id"]
    [reward] = await slot.rows(tables.reward)
    assert (reward["session_id"], reward["value"]) == (started["session_id"], 0.25)
    assert await state(slot, started["session_id"]) == ("closed", "end")


async def test_a_tenant_key_has_one_open_session(slot: World) -> None:
    key = await tenant_key(slot)
    first = await call(slot, key)
    assert await call(slot, key) == first
    ended = await slot.post("/rl/end_session", key, {"session_id": first})
    assert ended.status_code == 200
    assert await call(slot, key) != first


async def test_a_clients_own_session_header_is_a_slot(slot: World) -> None:
    key = await tenant_key(slot)
    plain = await call(slot, key)
    mine = await call(slot, key, **{"x-session-id": "chat 1"})
    assert await call(slot, key, **{"x-session-id": "chat 2"}) not in (plain, mine)
    assert await call(slot, key, **{"x-session-id": "chat 1"}) == mine != plain
    started = await slot.start()
    named = started["session_id"]
    for header in ("x-archon-session", "x-session-id"):
        assert await call(slot, key, **{header: named}) == named
    body = {"model": "m", "messages": [USER]}
    response = await slot.post(
        "/v1/chat/completions", key, body, headers={"x-archon-session": "ses_none"}
    )
    assert response.status_code == 404


async def test_a_session_in_the_path_names_its_slot(slot: World) -> None:
    started, key = await slot.start(), await tenant_key(slot)
    named = started["session_id"]
    for caller in (started["api_key"], key, ADMIN):
        assert await call(slot, caller, f"/s/{named}/v1") == named
    await slot.post("/rl/end_session", started["api_key"])
    following = await call(slot, key, f"/s/{named}/v1")
    assert following != named
    assert await call(slot, started["api_key"]) == following
    other = await slot.start()
    body = {"model": "m", "messages": [USER]}
    response = await slot.post(f"/s/{named}/v1/chat/completions", other["api_key"], body)
    assert response.status_code == 404


async def test_calls_that_race_open_one_session(slot: World) -> None:
    key = await tenant_key(slot)
    opened = await asyncio.gather(*(call(slot, key) for _ in range(8)))
    assert len(set(opened)) == 1
    assert len(await slot.rows(tables.session)) == len(await slot.rows(tables.group)) == 1
    assert await told(slot, "session") == opened[:1]


async def tenant_key(world: World) -> str:
    response = await world.post("/rl/keys", ADMIN, {"tenant": world.tenant, "label": "agent"})
    assert response.status_code == 200, response.text
    key: str = response.json()["api_key"]
    return key
