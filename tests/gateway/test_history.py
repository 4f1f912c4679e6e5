"""What a call continues: prefix parents, previous calls, retries."""

import asyncio
import hashlib

import pytest

from archon.records import Interaction, InteractionStatus
from archon.storage.interactions import whole_ids
from gateway.history import pack_ids, unpack_ids
from tests.gateway.kit import World
from tests.kit.scripted_engine import Answer, ScriptedEngine

pytestmark = pytest.mark.stack

Message = dict[str, object]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def ask(world: World, key: str, *messages: Message, **fields: object) -> str:
    body = {"model": "m", "messages": list(messages), **fields}
    response = await world.post("/v1/chat/completions", key, body)
    assert response.status_code == 200, response.text
    interaction_id: str = response.json()["id"]
    return interaction_id


async def by_id(world: World) -> dict[str, Interaction]:
    return {row.interaction_id: row for row in await world.interactions()}


async def test_a_conversation_is_stored_once(ready: World, engine: ScriptedEngine) -> None:
    """Only the ids after the prefix are stored, and the sampled ones stand in the next prompt."""
    odd = ready.codec.encode("a") + ready.codec.encode("b") + ready.codec.encode("<|im_end|>")
    engine.push(Answer(odd), ready.say("two"), ready.say("three"))
    key = (await ready.start())["api_key"]
    first = await ask(ready, key, user("one"))
    second = await ask(ready, key, user("one"), said("ab"), user("go"))
    talk = [user("one"), said("ab"), user("go"), said("two"), user("on")]
    third = await ask(ready, key, *talk)
    rows = await by_id(ready)
    assert [rows[i].prefix_parent for i in (first, second, third)] == [None, first, second]
    assert [rows[i].previous for i in (first, second, third)] == [None, first, second]
    assert [rows[i].seq for i in (first, second, third)] == [1, 2, 3]
    sent = [request.body["token_ids"] for request in engine.generated]
    assert sent[1][: len(sent[0]) + len(odd)] == sent[0] + odd
    assert sent[2] == ready.codec.render(talk)
    assert unpack_ids(rows[third].prompt_ids) == sent[2][len(sent[1]) + len(ready.ids("two")) :]
    assert rows[third].prompt_length == len(sent[2])
    assert rows[third].prompt_sha256 == hashlib.sha256(pack_ids(sent[2])).hexdigest()
    assert rows[third].messages == [user("on")]


async def test_ids_come_from_the_rows_where_memory_lacks_them(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.push(ready.say("1"), ready.say("2"), ready.say("3"))
    key = (await ready.start())["api_key"]
    await ask(ready, key, user("a"))
    second = await ask(ready, key, user("a"), said("1"), user("b"))
    ready.service.history._held.clear()
    talk = [user("a"), said("1"), user("b"), said("2"), user("c")]
    third = await ask(ready, key, *talk)
    rows = await by_id(ready)
    assert rows[third].prefix_parent == second
    assert engine.generated[2].body["token_ids"] == ready.codec.render(talk)
    async with ready.database.connect() as c:
        whole = await whole_ids(c, third)
    assert whole == (pack_ids(engine.generated[2].body["token_ids"]), pack_ids(ready.ids("3")))


async def test_a_changed_past_is_rendered_anew(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("1"), ready.say("2"))
    key = (await ready.start())["api_key"]
    first = await ask(ready, key, user("a"))
    changed = [user("A"), said("1"), user("b")]
    second = await ask(ready, key, *changed)
    rows = await by_id(ready)
    assert rows[second].prefix_parent is None and rows[second].previous == first
    assert unpack_ids(rows[second].prompt_ids) == ready.codec.render(changed)
    assert rows[second].messages == changed


async def test_other_tools_are_another_past(ready: World, engine: ScriptedEngine) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    engine.push(ready.say("1"), ready.say("2"))
    key = (await ready.start())["api_key"]
    first = await ask(ready, key, user("a"))
    second = await ask(ready, key, user("a"), said("1"), user("b"), tools=[tool])
    rows = await by_id(ready)
    assert rows[second].prefix_parent is None and rows[second].previous == first


async def test_of_retries_the_continued_one_is_valid(ready: World, engine: ScriptedEngine) -> None:
    """Two answers to byte-equal messages: the one that a later request contains."""
    engine.push(ready.say("A"), ready.say("B"), ready.say("end"))
    key = (await ready.start())["api_key"]
    lost = await ask(ready, key, user("q"))
    kept = await ask(ready, key, user("q"))
    rows = await by_id(ready)
    assert rows[lost].request_digest == rows[kept].request_digest
    assert rows[lost].previous is None and rows[kept].previous is None
    assert {rows[i].status for i in (lost, kept)} == {InteractionStatus.COMPLETE}
    last = await ask(ready, key, user("q"), said("B"), user("go"))
    rows = await by_id(ready)
    assert rows[lost].status == InteractionStatus.SUPERSEDED
    assert rows[kept].status == rows[last].status == InteractionStatus.COMPLETE
    assert rows[last].prefix_parent == kept


async def test_a_superseded_answer_that_is_continued_after_all_is_valid_again(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.push(ready.say("A"), ready.say("B"), ready.say("1"), ready.say("2"))
    key = (await ready.start())["api_key"]
    a = await ask(ready, key, user("q"))
    b = await ask(ready, key, user("q"))
    await ask(ready, key, user("q"), said("B"), user("x"))
    assert (await by_id(ready))[a].status == InteractionStatus.SUPERSEDED
    last = await ask(ready, key, user("q"), said("A"), user("y"))
    rows = await by_id(ready)
    assert rows[a].status == rows[b].status == InteractionStatus.COMPLETE
    assert rows[last].prefix_parent == a


async def test_equal_answers_to_a_retry_count_once(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("A"), ready.say("A"), ready.say("end"))
    key = (await ready.start())["api_key"]
    first = await ask(ready, key, user("q"))
    second = await ask(ready, key, user("q"))
    last = await ask(ready, key, user("q"), said("A"), user("go"))
    rows = await by_id(ready)
    assert rows[last].prefix_parent == second
    assert rows[first].status == InteractionStatus.SUPERSEDED


async def test_calls_at_once_get_numbers_of_their_own(ready: World, engine: ScriptedEngine) -> None:
    engine.default = Answer([70])
    key = (await ready.start())["api_key"]
    await asyncio.gather(*(ask(ready, key, user(f"q{i}")) for i in range(12)))
    assert sorted(row.seq for row in await ready.interactions()) == list(range(1, 13))


async def test_a_last_message_of_the_assistant_opens_a_new_turn(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.push(ready.say("x"))
    key = (await ready.start())["api_key"]
    talk = [user("a"), said("begun: ")]
    await ask(ready, key, *talk)
    assert engine.generated[0].body["token_ids"] == ready.codec.render(talk)


async def test_a_large_conversation(ready: World, engine: ScriptedEngine) -> None:
    """Rendered and stored in threads; the same row."""
    await ready.policy("large", max_model_len=1 << 20)
    ready.codec.max_len_hint, hint = None, ready.codec.max_len_hint
    served = await ready.service.catalog.get(ready.tenant, "large")
    served.codec.max_len_hint = None
    try:
        await ready.replica(engine, "large")
        engine.push(ready.say("1"), ready.say("2"))
        key = (await ready.start(policy="large"))["api_key"]
        long = "word " * 20_000
        first = await ask(ready, key, user(long))
        second = await ask(ready, key, user(long), said("1"), user("b"))
    finally:
        served.codec.max_len_hint = hint
    rows = await by_id(ready)
    assert rows[second].prefix_parent == first
    assert rows[second].prompt_length > 100_000 and len(rows[second].prompt_ids) < 400
    assert engine.generated[1].body["token_ids"][-20:] == ready.codec.render([user("b")])[-20:]


async def test_the_history_in_memory_is_bounded(ready: World, engine: ScriptedEngine) -> None:
    history = ready.service.history
    history._held.clear()
    history._size, limit, history.limit = 0, history.limit, 2000
    try:
        engine.default = ready.say("a")
        key = (await ready.start())["api_key"]
        for i in range(8):
            await ask(ready, key, user("x" * 100 + str(i)))
        held = sum(len(prompt) + len(output) for prompt, output in history._held.values())
        assert 0 < held == history._size <= 2000
    finally:
        history.limit = limit
