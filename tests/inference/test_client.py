"""The client against the scripted engine: what arrives, and how each way of ending is told."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archon.inference import (
    EngineClient,
    EngineDied,
    EngineRefused,
    EngineUnavailable,
    GapKind,
    GenerateChunk,
    GenerateRequest,
    SamplingParams,
    VersionConflict,
    VersionRange,
)
from tests.kit.scripted_engine import Answer, ScriptedEngine

REQUEST = GenerateRequest("int_1", (3, 17, 4), SamplingParams(16, seed=7))


async def eventually(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


async def test_stream_gives_ids_logprobs_and_versions() -> None:
    answer = Answer([11, 12, 2], [-0.25, -1.5, -0.125], versions=[4, 4, 5], chunk=2)
    with ScriptedEngine([answer], version=4) as engine:
        async with EngineClient(engine.url) as client:
            chunks = [c async for c in client.generate(REQUEST)]
    assert chunks == [
        GenerateChunk((11, 12), (-0.25, -1.5), (VersionRange(4, 0, 2),), None),
        GenerateChunk((2,), (-0.125,), (VersionRange(5, 2, 3),), "stop"),
    ]
    assert engine.requests[0].body["token_ids"] == [3, 17, 4]


async def test_complete_merges_ranges_and_reuses_the_connection() -> None:
    answer = Answer([11, 12, 2], [-0.25, -1.5, -0.125], versions=[4, 4, 5])
    with ScriptedEngine(default=answer, version=4) as engine:
        async with EngineClient(engine.url) as client:
            for _ in range(3):
                result = await client.complete(REQUEST)
            assert len(engine._connections) == 1
    assert result.token_ids == (11, 12, 2)
    assert result.logprobs == (-0.25, -1.5, -0.125)
    assert result.weight_versions == (VersionRange(4, 0, 2), VersionRange(5, 2, 3))
    assert result.finish_reason == "stop"


async def test_a_gap_is_flagged_and_nothing_is_lost() -> None:
    answers = [Answer([11, 12], [-0.25]), Answer([11, 12], versions=[4])]
    with ScriptedEngine(answers, version=4) as engine:
        async with EngineClient(engine.url) as client:
            without_logprob = await client.complete(REQUEST)
            without_version = await client.complete(REQUEST)
    assert without_logprob.token_ids == without_version.token_ids == (11, 12)
    assert without_logprob.evidence_gap is not None
    assert without_logprob.evidence_gap.kind == GapKind.LOGPROBS_LENGTH
    assert without_version.evidence_gap is not None
    assert without_version.evidence_gap.kind == GapKind.VERSIONS_MISSING


@pytest.mark.parametrize(
    "answer",
    [
        Answer([11, 12, 13], die_after=2),
        Answer([11, 12], done=False),
        Answer([11, 12, 13], error_after=2, message="out of memory"),
    ],
    ids=["cut", "no [DONE]", "error event"],
)
async def test_an_answer_that_breaks_off_is_a_death_with_its_count(answer: Answer) -> None:
    received: list[int] = []
    with ScriptedEngine([answer], version=4) as engine:
        async with EngineClient(engine.url) as client:
            with pytest.raises(EngineDied) as caught:
                async for chunk in client.generate(REQUEST):
                    received.extend(chunk.token_ids)
    assert received == [11, 12]
    assert caught.value.received == 2
    assert answer.error_after is None or "out of memory" in str(caught.value)


async def test_death_before_the_first_token() -> None:
    answers = [Answer([11], die_after=-1), Answer([11], die_after=0)]
    with ScriptedEngine(answers, version=4) as engine:
        async with EngineClient(engine.url) as client:
            for _ in answers:
                with pytest.raises(EngineDied) as caught:
                    await client.complete(REQUEST)
                assert caught.value.received == 0
    assert len(engine.requests) == 2, "a fresh connection is not tried again"


async def test_an_idle_connection_that_went_away_is_replaced() -> None:
    with ScriptedEngine([Answer([11]), Answer([12])], version=4) as engine:
        async with EngineClient(engine.url) as client:
            await client.complete(REQUEST)
            engine.push(Answer([13]))
            # The engine cuts the idle connection at the moment of the next request.
            engine.answers.appendleft(Answer([0], die_after=-1))
            assert (await client.complete(REQUEST)).token_ids == (12,)


async def test_killed_engine_is_a_death_now_and_unavailable_later() -> None:
    with ScriptedEngine(default=Answer([11, 12], delays=[0, 30]), version=4) as engine:
        async with EngineClient(engine.url) as client:
            with pytest.raises(EngineDied) as died:
                async for _ in client.generate(REQUEST):
                    engine.kill()
            assert died.value.received == 1
            with pytest.raises(EngineUnavailable):
                await client.complete(REQUEST)


async def test_statuses_are_typed() -> None:
    answers = [
        Answer([], status=503, message="the queue is full", retry_after=7),
        Answer([], status=400, message="maximum context length is 64"),
        Answer([], status=500, message="boom"),
    ]
    with ScriptedEngine(answers, version=4) as engine:
        async with EngineClient(engine.url) as client:
            with pytest.raises(EngineUnavailable, match="queue is full") as unavailable:
                await client.complete(REQUEST)
            with pytest.raises(EngineRefused, match="maximum context length"):
                await client.complete(REQUEST)
            with pytest.raises(EngineDied, match="boom"):
                await client.complete(REQUEST)
            assert len(engine._connections) == 1, "an answered refusal keeps the connection"
    assert unavailable.value.retry_after == 7.0


async def test_empty_engine_is_unavailable_and_a_wrong_token_refused() -> None:
    with ScriptedEngine(token="right") as engine:
        async with EngineClient(engine.url, "right") as client:
            with pytest.raises(EngineUnavailable, match="no weights"):
                await client.complete(REQUEST)
            assert (await client.versions()).version is None
            assert (await client.versions()).model is None
        async with EngineClient(engine.url, "wrong") as client:
            await client.health()
            with pytest.raises(EngineRefused) as refused:
                await client.versions()
    assert refused.value.code == 401


async def test_cancelling_closes_the_connection_at_once() -> None:
    with ScriptedEngine(default=Answer([11, 12], delays=[0, 30]), version=4) as engine:
        async with EngineClient(engine.url) as client:
            task = asyncio.create_task(client.complete(REQUEST))
            await eventually(lambda: bool(engine.requests) and engine.requests[0].sent_tokens == 1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await eventually(lambda: engine.requests[0].cancelled)

            async with contextlib.aclosing(client.generate(REQUEST)) as stream:
                async for _ in stream:
                    break
            await eventually(lambda: engine.requests[1].cancelled)
            assert (await client.versions()).running == 0


async def test_update_versions_conflict_and_rollback() -> None:
    with ScriptedEngine(default=Answer([11])) as engine:
        async with EngineClient(engine.url) as client:
            first = await client.update(5, "/weights/v5", "aa")
            assert (first.version, first.changed) == (5, True)
            assert not (await client.update(5, "/weights/v5", "aa")).changed
            with pytest.raises(VersionConflict):
                await client.update(5, "/weights/other", "bb")
            with pytest.raises(VersionConflict):
                await client.update(4, "/weights/v4")
            assert (await client.complete(REQUEST)).weight_versions == (VersionRange(5, 0, 1),)
            assert (await client.update(4, "/weights/v4", rollback=True)).changed
            assert (await client.versions()).version == 4


async def test_an_answer_in_another_shape_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(self: ScriptedEngine, request: object) -> dict[str, object]:
        return {"version": 5}

    monkeypatch.setattr(ScriptedEngine, "_control", odd)
    with ScriptedEngine(version=1) as engine:
        async with EngineClient(engine.url) as client:
            with pytest.raises(EngineDied, match="unreadable answer to versions"):
                await client.versions()
            with pytest.raises(EngineDied, match="unreadable answer to an update"):
                await client.update(5, "/weights/v5")


async def test_requests_are_held_while_paused() -> None:
    with ScriptedEngine(default=Answer([11]), version=1) as engine:
        async with EngineClient(engine.url) as client:
            await client.pause()
            assert (await client.versions()).paused
            task = asyncio.create_task(client.complete(REQUEST))
            await asyncio.sleep(0.05)
            assert not task.done()
            await client.update(2, "/weights/v2")
            await client.resume()
            assert (await task).weight_versions == (VersionRange(2, 0, 1),)


async def test_prompt_logprobs_come_with_their_version() -> None:
    def probe(ids: list[int], version: int) -> list[float]:
        return [-float(version) - i / 8 for i in ids[1:]]

    with ScriptedEngine(version=3, probe=probe) as engine:
        async with EngineClient(engine.url) as client:
            probed = await client.prompt_logprobs((3, 17, 4))
    assert probed.logprobs == (-3 - 17 / 8, -3.5)
    assert probed.version == 3
    assert engine.requests[0].body["sampling_params"]["prompt_logprobs"] == 0


async def test_silence_is_bounded() -> None:
    with ScriptedEngine(default=Answer([11], delays=[30]), version=1) as engine:
        async with EngineClient(engine.url, idle_timeout_s=0.1) as client:
            with pytest.raises(EngineDied, match=r"nothing came for 0\.1 s"):
                await client.complete(REQUEST)


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(EngineUnavailable, match="cannot connect"):
            await client.health()


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://"])
def test_a_wrong_address_is_the_callers_error(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        EngineClient(url)


async def test_standalone_double(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"token_ids": [5]}, {"token_ids": [6], "logprobs": [-2.0]}]))
    command = [sys.executable, "-m", "tests.kit.scripted_engine", "--version", "1"]
    process = subprocess.Popen(
        [*command, "--script", str(script)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        async with EngineClient(url) as client:
            answers = [(await client.complete(REQUEST)).token_ids for _ in range(3)]
        assert answers == [(5,), (6,), (6,)]
    finally:
        process.kill()
        process.communicate()


def test_the_client_does_not_import_torch() -> None:
    code = "import sys, archon.inference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
