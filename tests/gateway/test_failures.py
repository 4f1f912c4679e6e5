"""Clients that leave, engines that die, replicas that come and go."""

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa

from archon.records import Interaction, InteractionStatus
from archon.storage import tables
from gateway.history import unpack_ids
from tests.gateway.kit import ENGINE_TOKEN, World
from tests.kit.scripted_engine import Answer, ScriptedEngine

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}


async def a_row(world: World) -> Interaction:
    await world.eventually_rows(tables.interaction, 1)
    [row] = await world.interactions()
    return row


async def until(condition: object, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves(ready: World, engine: ScriptedEngine, stream: bool) -> None:
    """The engine's request is cancelled within a second and what came is kept, not as complete."""
    ids = ready.ids("abcdefgh")
    engine.push(Answer(ids, delays=[0.0, 0.0, 0.0, 30.0]))
    started = await ready.start()
    async with httpx.AsyncClient(base_url=ready.url) as http:
        body = {"messages": [USER], "stream": stream}
        headers = {"x-api-key": started["api_key"]}
        request = http.build_request("POST", "/v1/chat/completions", json=body, headers=headers)
        sending = asyncio.create_task(http.send(request, stream=True))
        await until(lambda: engine.generated and engine.generated[0].sent_tokens == 3)
        if stream:
            response = await sending
            async for line in response.aiter_lines():
                if '"content":"c"' in line:
                    break
            await response.aclose()
        else:
            sending.cancel()
    left = time.monotonic()
    await until(lambda: engine.generated[0].cancelled)
    assert time.monotonic() - left < 1
    row = await a_row(ready)
    assert row.status == InteractionStatus.ABORTED and row.finish_reason == "abort"
    assert unpack_ids(row.output_ids) == ids[:3] and len(row.logprobs) == 4 * 3
    assert row.answer["content"] == "abc"
    await until(lambda: ready.service.inflight == 0)


async def test_a_partial_answer_is_nobodys_past(ready: World, engine: ScriptedEngine) -> None:
    engine.push(Answer(ready.ids("abc"), die_after=2), ready.say("d"))
    key = (await ready.start())["api_key"]
    await ready.post("/v1/chat/completions", key, {"messages": [USER]})
    talk = [USER, {"role": "assistant", "content": "ab"}, USER]
    await ready.post("/v1/chat/completions", key, {"messages": talk})
    _, second = await ready.interactions()
    assert second.status == InteractionStatus.COMPLETE
    assert second.prefix_parent is None and second.previous is None


@pytest.mark.parametrize(
    "death", [{"die_after": 2}, {"error_after": 2}, {"done": False}, {"finish_reason": "abort"}]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_never_ends_cleanly(
    ready: World, engine: ScriptedEngine, stream: bool, death: dict[str, object]
) -> None:
    engine.push(Answer(ready.ids("abc"), delays=[0.0, 0.0, 0.05], **death))  # type: ignore[arg-type]
    key = (await ready.start())["api_key"]
    client = ready.openai(key)
    seen = ""
    with pytest.raises(openai.APIError) as failed:
        answer = await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        async for chunk in answer:  # type: ignore[union-attr]
            seen += chunk.choices[0].delta.content or ""
            assert chunk.choices[0].finish_reason is None
    if stream:
        assert seen.startswith("ab") and "int_" in failed.value.message
    else:
        assert isinstance(failed.value, openai.InternalServerError)
        assert failed.value.status_code == 503
        assert failed.value.response.headers["retry-after"] == "1"
    row = await a_row(ready)
    aborted = death.get("finish_reason") == "abort"
    assert row.status == (InteractionStatus.ABORTED if aborted else InteractionStatus.FAILED)
    assert unpack_ids(row.output_ids) == ready.ids("abc")[: len(unpack_ids(row.output_ids))]
    assert len(unpack_ids(row.output_ids)) >= 2


async def test_a_broken_stream_is_cut(ready: World, engine: ScriptedEngine) -> None:
    """The error event, then the end of the connection without the end of the body."""
    engine.push(Answer(ready.ids("abc"), die_after=2))
    key = (await ready.start())["api_key"]
    body, seen = {"messages": [USER], "stream": True}, ""
    with pytest.raises(httpx.RemoteProtocolError):
        async with ready.http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-api-key": key}
        ) as response:
            async for part in response.aiter_text():
                seen += part
    last = seen.strip().split("\n\n")[-1]
    assert last.startswith('data: {"error":{"message":') and "[DONE]" not in seen


async def test_another_replica_takes_a_call_that_had_not_begun(
    world: World, engine: ScriptedEngine
) -> None:
    with ScriptedEngine(version=3, token=ENGINE_TOKEN, default=world.say("alive")) as other:
        engine.default = Answer([70], die_after=-1)
        await world.policy()
        await world.replica(engine)
        await world.replica(other)
        for _ in range(4):
            key = (await world.start())["api_key"]
            answer = await world.post("/v1/chat/completions", key, {"messages": [USER]})
            assert answer.json()["choices"][0]["message"]["content"] == "alive"
        engine.kill()
        for _ in range(4):
            key = (await world.start())["api_key"]
            answer = await world.post("/v1/chat/completions", key, {"messages": [USER]})
            assert answer.status_code == 200
    assert {row.status for row in await world.interactions()} == {InteractionStatus.COMPLETE}


async def test_sessions_keep_their_replica_and_spread(world: World, engine: ScriptedEngine) -> None:
    with ScriptedEngine(version=3, token=ENGINE_TOKEN, default=Answer([70])) as other:
        engine.default = Answer([70])
        await world.policy()
        names = {await world.replica(engine), await world.replica(other)}
        used = []
        for _ in range(12):
            key = (await world.start())["api_key"]
            for _ in range(2):
                await world.post("/v1/chat/completions", key, {"messages": [USER]})
        for session in await world.rows(tables.session):
            rows = await world.interactions(session["session_id"])
            assert len({row.replica_id for row in rows}) == 1
            used.append(rows[0].replica_id)
        assert set(used) == names


async def test_a_call_waits_for_a_replica(world: World, engine: ScriptedEngine) -> None:
    """One that is not proven yet (no version) is not used; the call is held until it is."""
    engine.default = world.say("at last")
    await world.policy()
    engine.version, proven = None, engine.version
    replica_id = await world.replica(engine)
    key = (await world.start())["api_key"]
    call = asyncio.create_task(world.post("/v1/chat/completions", key, {"messages": [USER]}))
    await asyncio.sleep(0.3)
    assert not call.done() and engine.generated == []
    engine.version = proven
    async with world.database.begin() as c:
        await c.execute(
            tables.replica.update()
            .where(tables.replica.c.replica_id == replica_id)
            .values(version=proven)
        )
    shown = time.monotonic()
    response = await call
    assert response.status_code == 200 and time.monotonic() - shown < 2


async def test_without_a_replica_a_call_ends_in_503(world: World) -> None:
    await world.policy()
    key = (await world.start())["api_key"]
    settings, hold = world.service.settings.gateway, world.service.settings.gateway.hold_seconds
    settings.hold_seconds = 0.2
    try:
        response = await world.post("/v1/chat/completions", key, {"messages": [USER]})
    finally:
        settings.hold_seconds = hold
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "service_unavailable_error"
    assert await world.interactions() == []


async def test_a_replica_that_comes_back(world: World, engine: ScriptedEngine) -> None:
    """The same process at once; another process only when its row says that it was proven."""
    engine.default = world.say("a")
    await world.policy()
    replica_id = await world.replica(engine)
    [member] = [m for m in world.service.pool.members.values() if m.replica_id == replica_id]
    world.service.pool.mark_dead(member, "a test says so")
    key = (await world.start())["api_key"]
    assert (await world.post("/v1/chat/completions", key, {"messages": [USER]})).status_code == 200
    engine.instance = "another"
    world.service.pool.mark_dead(member, "a test says so")
    await asyncio.sleep(0.5)
    assert not member.alive
    async with world.database.begin() as c:
        await c.execute(
            tables.replica.update()
            .where(tables.replica.c.replica_id == replica_id)
            .values(instance="another")
        )
    assert (await world.post("/v1/chat/completions", key, {"messages": [USER]})).status_code == 200


async def test_a_call_whose_session_was_removed_is_not_acknowledged(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.push(Answer(ready.ids("a"), delays=[0.2]))
    started = await ready.start()
    call = asyncio.create_task(
        ready.post("/v1/chat/completions", started["api_key"], {"messages": [USER]})
    )
    await until(lambda: engine.running == 1)
    async with ready.database.begin() as c:
        await c.execute(
            tables.session.delete().where(tables.session.c.session_id == started["session_id"])
        )
    assert (await call).status_code == 404
    assert await ready.interactions() == []


async def test_a_call_that_ends_after_the_seal_says_so(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.push(Answer(ready.ids("a"), delays=[0.2]))
    started = await ready.start()
    call = asyncio.create_task(
        ready.post("/v1/chat/completions", started["api_key"], {"messages": [USER]})
    )
    await until(lambda: engine.running == 1)
    async with ready.database.begin() as c:
        await c.execute(
            tables.session.update()
            .where(tables.session.c.session_id == started["session_id"])
            .values(state="sealed")
        )
    assert (await call).status_code == 200
    assert [gap.split(":")[0] for gap in (await a_row(ready)).evidence_gaps] == ["after_seal"]


async def test_a_replica_with_a_senseless_address_harms_nobody(
    world: World, engine: ScriptedEngine
) -> None:
    engine.default = world.say("a")
    await world.policy()
    replica_id = await world.replica(engine)
    async with world.database.begin() as c:
        values = sa.select(tables.replica).where(tables.replica.c.replica_id == replica_id)
        row = dict((await c.execute(values)).one()._mapping)
        row |= {"replica_id": f"{replica_id}-x", "url": "nowhere"}
        await c.execute(tables.replica.insert().values(row))
    await world.service.pool.refresh()
    key = (await world.start())["api_key"]
    response = await world.post("/v1/chat/completions", key, {"messages": [USER]})
    assert response.status_code == 200


async def test_a_call_is_held_while_the_engine_is_paused(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.default = ready.say("a")
    client = httpx.AsyncClient(
        base_url=engine.url, headers={"authorization": f"Bearer {ENGINE_TOKEN}"}
    )
    async with client:
        await client.post("/pause")
        key = (await ready.start())["api_key"]
        call = asyncio.create_task(ready.post("/v1/chat/completions", key, {"messages": [USER]}))
        await asyncio.sleep(0.2)
        assert not call.done()
        await client.post("/update", json={"version": 4, "path": "x", "sha256": None})
        await client.post("/resume")
    assert (await call).status_code == 200
    assert (await ready.interactions())[0].versions == [{"version": 4, "start": 0, "end": 2}]
