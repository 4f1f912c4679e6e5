"""Errors as the OpenAI SDK meets them, and what a client is told when there is no room."""

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.kit import ADMIN, World
from tests.kit.scripted_engine import Answer, ScriptedEngine

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}


async def test_the_sdk_knows_our_errors(ready: World, engine: ScriptedEngine) -> None:
    engine.push(Answer([], status=400, message="too odd"))
    started = await ready.start()
    client = ready.openai(started["api_key"])
    with pytest.raises(openai.AuthenticationError) as unknown:
        await ready.openai("sk-sess-nobody").chat.completions.create(model="m", messages=[USER])
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=[USER], n=2)
    assert refused.value.param == "n" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        await ready.openai(ADMIN, "/s/ses_none/v1").chat.completions.create(
            model="m", messages=[USER]
        )
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")
    with pytest.raises(openai.PermissionDeniedError):
        await client.post("/rl/start_session", cast_to=object, body={})
    with pytest.raises(openai.UnprocessableEntityError) as bad:
        await client.post("/rl/set_reward", cast_to=object, body={"reward": "good"})
    assert bad.value.code == "bad_reward"
    with pytest.raises(openai.BadRequestError, match="too odd"):
        await client.chat.completions.create(model="m", messages=[USER])


async def test_routes_that_are_not_there(ready: World) -> None:
    for response in (await ready.get("/v1/nothing", ADMIN), await ready.get("/v2", "x")):
        error = response.json()["error"]
        assert response.status_code == 404 and error["type"] == "not_found_error"
        assert set(error) == {"message", "type", "param", "code"}
    response = await ready.get("/v1/chat/completions", ADMIN)
    assert response.status_code == 405 and "error" in response.json()


async def test_no_key_at_all(ready: World) -> None:
    for headers in ({}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}):
        response = await ready.http.post("/v1/chat/completions", json={}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"messages": NaN}', b"\xff"])
async def test_a_body_that_is_none(ready: World, body: bytes) -> None:
    key = (await ready.start())["api_key"]
    response = await ready.http.post(
        "/v1/chat/completions", content=body, headers={"x-api-key": key}
    )
    assert response.status_code == 400 and response.json()["error"]["message"]


async def test_more_calls_than_places(ready: World, engine: ScriptedEngine) -> None:
    engine.default = Answer([70], delays=[0.5])
    key = (await ready.start())["api_key"]
    settings, limit = ready.service.settings.gateway, ready.service.settings.gateway.max_inflight
    settings.max_inflight = 2
    try:
        client = ready.openai(key)
        calls = [
            asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
            for _ in range(2)
        ]
        while engine.running < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="m", messages=[USER])
        assert full.value.response.headers["retry-after"] == "1"
        await asyncio.gather(*calls)
        await client.chat.completions.create(model="m", messages=[USER])
    finally:
        settings.max_inflight = limit


async def test_health_and_metrics(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("a"))
    key = (await ready.start())["api_key"]
    await ready.post("/v1/chat/completions", key, {"messages": [USER]})
    assert (await ready.http.get("/health")).status_code == 200
    shown = (await ready.http.get("/metrics")).text
    assert 'archon_gateway_calls_total{outcome="200",policy="default"}' in shown
    settings = ready.service.settings.gateway
    settings.host = "0.0.0.0"
    try:
        assert (await ready.http.get("/metrics")).status_code == 401
        assert (await ready.get("/metrics", key)).status_code == 403
        assert (await ready.get("/metrics", ADMIN)).status_code == 200
    finally:
        settings.host = "127.0.0.1"
