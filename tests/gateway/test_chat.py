"""Chat completions by the OpenAI SDK: what the client sees, and the row that is stored."""

import hashlib
from array import array

import pytest

from archon.codec import messages_digest
from archon.records import InteractionStatus
from archon.storage import tables
from tests.gateway.kit import World
from tests.kit.scripted_engine import Answer, ScriptedEngine

USER = {"role": "user", "content": "hello"}


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
