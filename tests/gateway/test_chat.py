"""Chat completions by the OpenAI SDK: what the client sees, and the row that is stored."""

import contextlib
import hashlib
import re
from array import array
from typing import Any

import httpx
import pytest

from archon.codec import messages_digest
from archon.records import InteractionStatus
from gateway import chat
from gateway.errors import unavailable
from tests.gateway.kit import World
from tests.kit.scripted_engine import Answer, ScriptedEngine

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}


def floats(data: bytes) -> list[float]:
    values = array("f")
    values.frombytes(data)
    return values.tolist()


def ints(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return values.tolist()


async def test_an_answer_and_its_row(ready: World, engine: ScriptedEngine) -> None:
    ids = ready.ids("hi")
    engine.push(Answer(ids, logprobs=[-0.25, -1.5, -0.125], versions=[3, 3, 4]))
    started = await ready.start()
    client = ready.openai(started["api_key"])
    completion = await client.chat.completions.create(
        model="default", messages=[USER], max_tokens=16, seed=7
    )
    assert completion.choices[0].message.content == "hi"
    assert completion.choices[0].finish_reason == "stop"
    prompt = ready.codec.render([USER])
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 3
    assert completion.usage.total_tokens == len(prompt) + 3
    [row] = await ready.interactions()
    assert row.interaction_id == completion.id
    assert row.session_id == started["session_id"]
    assert (row.seq, row.status, row.finish_reason) == (1, InteractionStatus.COMPLETE, "stop")
    assert ints(row.prompt_ids) == prompt
    assert row.prompt_length == len(prompt)
    assert row.prompt_sha256 == hashlib.sha256(array("i", prompt).tobytes()).hexdigest()
    assert ints(row.output_ids) == ids
    assert floats(row.logprobs) == [-0.25, -1.5, -0.125]
    assert row.support == b"\0\0\0"
    assert row.versions == [
        {"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3},
    ]  # fmt: skip
    assert row.sampling["seed"] == 7 and row.sampling["max_tokens"] == 16
    assert row.evidence_gaps == [] and row.codec_digest == ready.codec.digest
    assert row.messages == [USER]
    assert row.messages_digest == messages_digest([USER, {"role": "assistant", "content": "hi"}])
    sent = engine.generated[0].body
    assert sent["token_ids"] == prompt
    assert sent["sampling_params"]["stop_token_ids"] == list(ready.codec.stop_token_ids)


async def test_a_stream_is_the_same_answer(ready: World, engine: ScriptedEngine) -> None:
    engine.push(Answer(ready.ids("grüße"), chunk=1))
    client = ready.openai((await ready.start())["api_key"])
    stream = await client.chat.completions.create(
        model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "grüße"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == ["stop"] and reasons[-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ready.ids("grüße"))
    assert len({chunk.id for chunk in chunks}) == 1
    [row] = await ready.interactions()
    assert ints(row.output_ids) == ready.ids("grüße") and row.interaction_id == chunks[0].id


async def test_no_usage_chunk_unless_asked(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("a"))
    key = (await ready.start())["api_key"]
    body = {"model": "m", "messages": [USER], "stream": True}
    response = await ready.post("/v1/chat/completions", key, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n") and '"choices":[]' not in response.text


@pytest.mark.parametrize(
    ("asked", "shown"), [({}, False), ({"logprobs": None}, False), ({"logprobs": False}, False),
                         ({"logprobs": 0}, False), ({"logprobs": True, "top_logprobs": 0}, True)],
)  # fmt: skip
async def test_log_probs_are_stored_always_and_shown_where_asked(
    ready: World, engine: ScriptedEngine, asked: dict[str, object], shown: bool
) -> None:
    engine.push(Answer(ready.ids("ab"), logprobs=[-0.5, -1.0, -2.0]))
    key = (await ready.start())["api_key"]
    body = {"model": "m", "messages": [USER], **asked}
    choice = (await ready.post("/v1/chat/completions", key, body)).json()["choices"][0]
    assert engine.generated[0].body["sampling_params"]["logprobs"] == 1
    assert floats((await ready.interactions())[0].logprobs) == [-0.5, -1.0, -2.0]
    if not shown:
        assert choice["logprobs"] is None
        return
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "<|im_end|>"]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.0, -2.0]


async def test_log_probs_of_a_stream_are_whole(ready: World, engine: ScriptedEngine) -> None:
    engine.push(Answer(ready.ids("abc"), logprobs=[-1.0, -2.0, -3.0, -4.0], chunk=2))
    client = ready.openai((await ready.start())["api_key"])
    stream = await client.chat.completions.create(
        model="m", messages=[USER], stream=True, logprobs=True
    )
    shown = [
        entry.logprob
        async for chunk in stream
        if (logprobs := chunk.choices[0].logprobs)
        for entry in logprobs.content or []
    ]
    assert shown == [-1.0, -2.0, -3.0, -4.0]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look something up",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CALL = 'well\n<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'


async def test_tools_are_rendered_and_calls_parsed(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say(CALL), ready.say("done"))
    client = ready.openai((await ready.start())["api_key"])
    completion = await client.chat.completions.create(
        model="m", messages=[USER], tools=[TOOL], tool_choice="auto", parallel_tool_calls=True
    )
    message = completion.choices[0].message
    assert engine.generated[0].body["token_ids"] == ready.codec.render([USER], [TOOL])
    assert completion.choices[0].finish_reason == "tool_calls" and message.content == "well"
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert (
        call.type == "function"
        and call.function.name == "look"
        and call.function.arguments == '{"q": "x"}'
    )
    history = [
        USER,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    answer = await client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    assert answer.choices[0].message.content == "done"
    first, second = await ready.interactions()
    assert second.prefix_parent == first.interaction_id
    sent = engine.generated[1].body["token_ids"]
    begun = ready.codec.render([USER], [TOOL]) + ready.ids(CALL)
    assert sent[: len(begun)] == begun


async def test_a_streamed_tool_call_is_whole(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say(CALL))
    client = ready.openai((await ready.start())["api_key"])
    stream = await client.chat.completions.create(
        model="m", messages=[USER], tools=[TOOL], stream=True
    )
    chunks = [chunk async for chunk in stream]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert len(calls) == 1 and calls[0].index == 0 and calls[0].id
    assert calls[0].function is not None and calls[0].function.arguments == '{"q": "x"}'
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "well"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        ({}, b"\0"), ({"temperature": 0.7}, b"\0"), ({"top_p": 1.0, "top_k": -1}, b"\0"),
        ({"temperature": 0}, b"\1"), ({"top_p": 0.9}, b"\2"), ({"top_k": 5}, b"\2"),
    ],
)  # fmt: skip
async def test_support_says_what_a_token_was_sampled_from(
    ready: World, engine: ScriptedEngine, sampling: dict[str, object], support: bytes
) -> None:
    engine.push(ready.say("a"))
    key = (await ready.start())["api_key"]
    body = {"model": "m", "messages": [USER], **sampling}
    assert (await ready.post("/v1/chat/completions", key, body)).status_code == 200
    assert (await ready.interactions())[0].support == support * 2


@pytest.mark.parametrize(
    ("answer", "gap"),
    [
        (Answer([70, 71], logprobs=[]), "logprobs_missing"),
        (Answer([70, 71], logprobs=[-1.0], chunk=2), "logprobs_length"),
        (Answer([70, 71], versions=[]), "versions_missing"),
    ],
)
async def test_what_does_not_fit_is_kept_and_named(
    ready: World, engine: ScriptedEngine, answer: Answer, gap: str
) -> None:
    engine.push(answer)
    key = (await ready.start())["api_key"]
    body = {"model": "m", "messages": [USER], "logprobs": True}
    assert (await ready.post("/v1/chat/completions", key, body)).status_code == 200
    [row] = await ready.interactions()
    assert ints(row.output_ids) == [70, 71]
    assert [entry.split(":")[0] for entry in row.evidence_gaps] == [gap]
    assert row.evidence_gaps[0].endswith("sent at 3")


async def test_room_for_the_answer(world: World, engine: ScriptedEngine) -> None:
    prompt = len(world.codec.render([USER]))
    await world.policy(max_model_len=prompt + 5, max_tokens=3)
    await world.replica(engine)
    engine.default = Answer([70])
    key = (await world.start())["api_key"]

    async def asked(**fields: object) -> int:
        body = {"model": "m", "messages": [USER], **fields}
        assert (await world.post("/v1/chat/completions", key, body)).status_code == 200
        value: int = engine.generated[-1].body["sampling_params"]["max_tokens"]
        return value

    assert await asked() == 3
    assert await asked(max_tokens=2) == 2
    assert await asked(max_completion_tokens=128000) == 3
    assert await asked(max_completion_tokens=1, max_tokens=100) == 1


@pytest.mark.parametrize("room", [0, 1])
async def test_a_prompt_as_long_as_the_context(
    world: World, engine: ScriptedEngine, room: int
) -> None:
    prompt = len(world.codec.render([USER]))
    await world.policy(max_model_len=prompt + room)
    await world.replica(engine)
    engine.push(Answer([70]))
    key = (await world.start())["api_key"]
    response = await world.post("/v1/chat/completions", key, {"model": "m", "messages": [USER]})
    if room:
        assert engine.generated[0].body["sampling_params"]["max_tokens"] == 1
        return
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert f"maximum context length is {prompt} tokens" in error["message"]
    assert error["param"] == "messages" and await world.interactions() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("stop", ["x"]), ("stop", "x"), ("logit_bias", {"5": 1}), ("top_logprobs", 2),
        ("frequency_penalty", 0.1), ("presence_penalty", -1), ("repetition_penalty", 1.1),
        ("response_format", {"type": "json_object"}), ("tool_choice", "required"),
        ("tool_choice", "none"), ("functions", [{"name": "f"}]), ("reasoning_effort", "low"),
        ("parallel_tool_calls", False), ("min_p", 0.1), ("chat_template_kwargs", {"a": 1}),
        ("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("max_tokens", 0),
        ("max_tokens", "many"), ("seed", 1.5), ("stream", "yes"), ("messages", []),
        ("messages", [{"role": "bear"}]), ("messages", None), ("tools", {"a": 1}),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_by_name(
    ready: World, engine: ScriptedEngine, field: str, value: object
) -> None:
    key = (await ready.start())["api_key"]
    body = {"model": "m", "messages": [USER], field: value}
    response = await ready.post("/v1/chat/completions", key, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field) and field in error["message"] + error["param"]
    assert engine.generated == [] and await ready.interactions() == []


async def test_neutral_and_harmless_fields_are_accepted(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.push(ready.say("a"))
    client = ready.openai((await ready.start())["api_key"])
    await client.chat.completions.create(
        model="m", messages=[USER], n=1, stop=None, logit_bias={}, frequency_penalty=0,
        presence_penalty=0.0, response_format={"type": "text"}, user="u", metadata={"a": "b"},
        store=False, service_tier="auto", parallel_tool_calls=True, top_logprobs=None,
        extra_body={"prompt_cache_key": "k", "something_new": [1]},
    )  # fmt: skip
    assert len(await ready.interactions()) == 1


@pytest.mark.parametrize("base", ["", "/v1", "/v1/v1"])
@pytest.mark.parametrize("in_session", [False, True])
async def test_every_path(
    ready: World, engine: ScriptedEngine, base: str, in_session: bool
) -> None:
    engine.push(ready.say("a"))
    started = await ready.start()
    prefix = f"/s/{started['session_id']}" if in_session else ""
    client = ready.openai(started["api_key"], prefix + base)
    await client.chat.completions.create(model="m", messages=[USER])
    [row] = await ready.interactions()
    assert row.session_id == started["session_id"]
    models = await client.models.list()
    assert [model.id for model in models.data] == ["default"]
    assert (await client.models.retrieve("default")).id == "default"


async def test_x_api_key_is_as_good_as_a_bearer(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("a"))
    started = await ready.start()
    response = await ready.http.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": [USER]},
        headers={"x-api-key": started["api_key"]},
    )
    assert response.status_code == 200
    assert response.headers["x-archon-session"] == started["session_id"]


async def test_text_that_postgres_cannot_hold(ready: World, engine: ScriptedEngine) -> None:
    """NUL is no text of JSONB, half a surrogate pair none of UTF-8; the ids stay exact."""
    engine.push(ready.say("a\0b"), ready.say("c"))
    key = (await ready.start())["api_key"]
    for content in (r"x\u0000y", r"\ud83d half"):
        body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % content.encode()
        response = await ready.http.post(
            "/v1/chat/completions", content=body, headers={"authorization": f"Bearer {key}"}
        )
        assert response.status_code == 200, response.text
    first, second = await ready.interactions()
    assert ints(first.output_ids) == ready.ids("a\0b")
    assert first.messages[0]["content"] == "x\ufffdy" and first.answer["content"] == "a\ufffdb"
    assert second.messages[0]["content"] == "\ufffd half"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_waits_for_the_commit(
    ready: World, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Without its row an answer has no end, and its tool call and what follows stay here."""

    async def refuse(*_: object) -> None:
        raise unavailable("a test says so")

    monkeypatch.setattr(chat, "put_interaction", refuse)
    engine.push(Answer(ready.ids(f"{CALL} after"), delays=[0.005]))
    key = (await ready.start())["api_key"]
    body = {"model": "m", "messages": [USER], "tools": [TOOL], "stream": stream}
    seen = ""
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with ready.http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-api-key": key}
        ) as response:
            async for part in response.aiter_text():
                seen += part
    assert response.status_code == (200 if stream else 503) and "a test says so" in seen
    said = "".join(re.findall(r'"content":"(.*?)"', seen))
    assert said == ("well" if stream else "")
    for late in ("tool_calls", "look", '"finish_reason":"', "[DONE]"):
        assert late not in seen
    assert await ready.interactions() == []
