"""The engine over HTTP, through the client that the gateway uses."""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from archon.inference import (
    EngineClient,
    EngineDied,
    EngineRefused,
    EngineUnavailable,
    GenerateRequest,
    SamplingParams,
    VersionConflict,
    VersionRange,
    versions_of,
)
from engine.models import Decoder
from engine.serving import weights
from engine.serving.runner import Runner, Sampled
from tests.engine.serving.kit import QWEN3, decoder, running, save, teacher_forced

LONG = GenerateRequest("long", (3, 17, 4), SamplingParams(60, seed=5))
SHORT = GenerateRequest("short", (3, 17, 4), SamplingParams(1, seed=5))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v1, v2, v3: weights of the seeds 1, 2, 3."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2, 3):
        save(root / f"v{seed}", seed)
    return root


@pytest.fixture
def url() -> Iterator[str]:
    with running(max_batch=8, max_queue=4) as (_, url):
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(url) as client:
        yield client


@pytest.fixture
async def served(client: EngineClient, folders: Path) -> EngineClient:
    await client.update(1, str(folders / "v1"))
    return client


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 20 ms, so that something can happen in the middle of an answer."""
    step = Runner.step

    def slow_step(self: Runner, *arguments: object) -> list[Sampled]:
        time.sleep(0.02)
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "step", slow_step)


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float) -> float:
    started = time.monotonic()
    while not await condition():
        assert time.monotonic() - started < seconds, "it did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


def forced(model: Decoder, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[float]:
    return teacher_forced(model, [*prompt, *answer])[len(prompt) - 1 :]


async def test_an_empty_engine_serves_nothing(client: EngineClient) -> None:
    await client.health()
    versions = await client.versions()
    assert (versions.engine, versions.version, versions.model) == ("embedded", None, None)
    with pytest.raises(EngineUnavailable, match="no weights"):
        await client.complete(SHORT)


async def test_versions_name_the_model_and_the_digest(served: EngineClient, folders: Path) -> None:
    versions = await served.versions()
    assert versions.version == 1
    assert versions.sha256 == weights.digest(folders / "v1")
    assert versions.model is not None
    assert versions.model.architecture == "Qwen3ForCausalLM"
    assert (versions.model.max_model_len, versions.model.vocab_size) == (64, 32)
    assert (versions.running, versions.queued, versions.paused) == (0, 0, False)


async def test_answers_are_reproducible_and_true(served: EngineClient) -> None:
    result = await served.complete(LONG)
    assert result.evidence_gap is None
    assert (len(result.token_ids), result.finish_reason) == (60, "length")
    expected = forced(decoder(seed=1), LONG.token_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=1e-5)
    assert result.weight_versions == (VersionRange(1, 0, 60),)
    others = [GenerateRequest(f"o{i}", (i, 9), SamplingParams(20, seed=i)) for i in range(5)]
    again, *_ = await asyncio.gather(served.complete(LONG), *map(served.complete, others))
    assert again.token_ids == result.token_ids


async def test_without_a_seed_the_engine_chooses(served: EngineClient) -> None:
    request = GenerateRequest("r", (3, 17, 4), SamplingParams(30))
    first, second = await served.complete(request), await served.complete(request)
    assert first.token_ids != second.token_ids


async def test_the_documented_answer_without_a_stream(served: EngineClient, url: str) -> None:
    body = {
        "request_id": "int_1",
        "model": "default",
        "token_ids": [3, 17, 4],
        "sampling_params": {"max_tokens": 2, "seed": 7, "logprobs": 1, "prompt_logprobs": 0},
        "stream": False,
    }
    async with httpx.AsyncClient() as http:
        answer = (await http.post(f"{url}/inference/v1/generate", json=body)).json()
    choice = answer["choices"][0]
    ids = choice["token_ids"]
    assert answer["request_id"] == "int_1"
    assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 2}]
    assert choice["finish_reason"] == "length"
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
    expected = teacher_forced(decoder(seed=1), [3, 17, 4, *ids])
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == pytest.approx(
        expected[2:], abs=1e-5
    )
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["17"]["logprob"] == pytest.approx(expected[0], abs=1e-5)
    assert answer["prompt_logprobs"][2]["4"]["logprob"] == pytest.approx(expected[1], abs=1e-5)


async def test_the_probe_answers_with_its_version(served: EngineClient, folders: Path) -> None:
    prompt = (5, 6, 7, 8, 9)
    await served.update(2, str(folders / "v2"))
    probed = await served.prompt_logprobs(prompt)
    assert probed.version == 2
    expected = teacher_forced(decoder(seed=2), list(prompt))
    assert probed.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("slow")
async def test_update_under_running_streams(served: EngineClient, folders: Path) -> None:
    """No stream breaks; each goes on with the new weights over its whole prefix."""
    new_version = asyncio.Event()
    requests = [GenerateRequest(f"s{i}", (i, i + 1), SamplingParams(25, seed=i)) for i in range(4)]
    begun = 0

    async def stream(request: GenerateRequest) -> tuple[list[int], list[float], list[int]]:
        nonlocal begun
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        async for chunk in served.generate(request):
            begun += not ids
            ids.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            versions.extend(r.version for r in chunk.weight_versions for _ in range(r.start, r.end))
            if begun == len(requests):
                new_version.set()
        return ids, logprobs, versions

    tasks = [asyncio.create_task(stream(r)) for r in requests]
    await new_version.wait()
    assert (await served.update(2, str(folders / "v2"))).changed
    for request, task in zip(requests, tasks, strict=True):
        ids, logprobs, versions = await task
        count = versions.count(1)
        assert versions == [1] * count + [2] * (25 - count) and 0 < count < 25
        old = forced(decoder(seed=1), request.token_ids, tuple(ids))[:count]
        new = forced(decoder(seed=2), request.token_ids, tuple(ids))[count:]
        assert logprobs == pytest.approx(old + new, abs=1e-5)


async def test_no_old_token_after_the_answer_to_an_update(
    served: EngineClient, folders: Path
) -> None:
    for version in range(2, 7):
        before = asyncio.create_task(served.complete(LONG))
        await served.update(version, str(folders / f"v{version % 3 + 1}"))
        after = await served.complete(SHORT)
        assert versions_of(after.weight_versions) == (version,)
        assert set(versions_of((await before).weight_versions)) <= {version - 1, version}


async def test_versions_are_monotonic(served: EngineClient, folders: Path) -> None:
    v2, v3 = str(folders / "v2"), str(folders / "v3")
    digest = weights.digest(folders / "v3")
    assert (await served.update(3, v3, digest)).changed
    assert not (await served.update(3, v3, digest)).changed
    assert not (await served.update(3, v3)).changed
    with pytest.raises(VersionConflict, match="digest"):
        await served.update(3, v2)
    with pytest.raises(VersionConflict, match="older"):
        await served.update(2, v2)
    assert (await served.versions()).version == 3
    assert (await served.update(2, v2, rollback=True)).changed
    result = await served.complete(SHORT)
    assert versions_of(result.weight_versions) == (2,)
    expected = forced(decoder(seed=2), SHORT.token_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=1e-5)


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    save(folder, 9)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _missing(folder: Path) -> None:
    _tensors(folder, lambda t: t.pop("model.norm.weight"))


def _unknown(folder: Path) -> None:
    _tensors(folder, lambda t: t.update(extra=torch.ones(1)))


def _misshapen(folder: Path) -> None:
    _tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(7)}))


def _not_finite(folder: Path) -> None:
    _tensors(folder, lambda t: t["model.norm.weight"].fill_(torch.nan))


def _other_model(folder: Path) -> None:
    save(folder, 9, replace(QWEN3, rope_theta=5000.0))


def _torn(folder: Path) -> None:
    save(folder, 9)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _absent(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, "missing tensors"),
        (_unknown, "unknown tensors"),
        (_misshapen, "has shape"),
        (_not_finite, "not finite"),
        (_other_model, "another model"),
        (_torn, "version 2"),
        (_absent, "no folder"),
    ],
)
async def test_spoilt_weights_are_refused_and_the_old_ones_serve_on(
    served: EngineClient, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    before = await served.complete(LONG)
    spoil(tmp_path / "w")
    with pytest.raises(EngineRefused, match=message) as refused:
        await served.update(2, str(tmp_path / "w"))
    assert refused.value.code == 400
    assert (await served.versions()).version == 1
    assert await served.complete(LONG) == before


async def test_shards_are_one_model(served: EngineClient, tmp_path: Path) -> None:
    model = save(tmp_path, 9)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names, shards = sorted(tensors), ("model-00001-of-00002", "model-00002-of-00002")
    placed: dict[str, str] = {}
    for shard, part in zip(shards, (names[:4], names[4:]), strict=True):
        save_file({n: tensors[n] for n in part}, tmp_path / f"{shard}.safetensors")
        placed |= dict.fromkeys(part, f"{shard}.safetensors")
    index = json.dumps({"weight_map": placed})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    data = b"".join((tmp_path / f"{shard}.safetensors").read_bytes() for shard in shards)
    assert (await served.update(2, str(tmp_path), hashlib.sha256(data).hexdigest())).changed
    result = await served.complete(LONG)
    expected = forced(model, LONG.token_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=1e-5)


async def test_a_wrong_digest_is_refused(served: EngineClient, folders: Path) -> None:
    with pytest.raises(EngineRefused, match="digest"):
        await served.update(2, str(folders / "v2"), "00" * 32)
    assert (await served.versions()).version == 1


@pytest.mark.usefixtures("slow")
async def test_pause_keep_holds_and_resume_goes_on(served: EngineClient, folders: Path) -> None:
    received: list[int] = []

    async def stream() -> None:
        async for chunk in served.generate(LONG):
            received.extend(chunk.token_ids)

    task = asyncio.create_task(stream())
    await eventually(lambda: _true(len(received) > 2), 5)
    await served.pause()
    await asyncio.sleep(0.05)  # what was sampled before the answer may still arrive
    count = len(received)
    held = asyncio.create_task(served.complete(SHORT))
    await asyncio.sleep(0.15)
    versions = await served.versions()
    assert (len(received), held.done()) == (count, False)
    assert (versions.paused, versions.running, versions.queued) == (True, 1, 1)
    await served.update(2, str(folders / "v2"))
    assert (await served.versions()).paused
    await asyncio.sleep(0.05)
    assert len(received) == count
    await served.resume()
    assert versions_of((await held).weight_versions) == (2,)
    await task
    assert len(received) == 60


@pytest.mark.usefixtures("slow")
async def test_pause_abort_returns_what_there_is(served: EngineClient) -> None:
    task = asyncio.create_task(served.complete(LONG))
    await eventually(lambda: _running(served, 1), 5)
    await asyncio.sleep(0.1)
    await served.pause("abort")
    result = await task
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 60
    assert len(result.logprobs) == len(versions_of(result.weight_versions)) == len(result.token_ids)
    await served.resume()
    assert (await served.complete(SHORT)).finish_reason == "length"
    with pytest.raises(EngineRefused, match="mode"):
        await served.pause("wait")


@pytest.mark.usefixtures("slow")
async def test_a_client_that_leaves_frees_its_slot(served: EngineClient) -> None:
    task = asyncio.create_task(served.complete(LONG))
    await eventually(lambda: _running(served, 1), 5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await eventually(lambda: _running(served, 0), 1.0) < 0.5

    await served.pause()
    held = [asyncio.create_task(served.complete(LONG)) for _ in range(3)]
    await eventually(lambda: _queued(served, 3), 1.0)
    held[1].cancel()
    await eventually(lambda: _queued(served, 2), 1.0)
    await served.resume()
    results = await asyncio.gather(*held, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results] == [False, True, False]


async def test_a_full_queue_is_503_with_retry_after(served: EngineClient) -> None:
    """8 rows and 4 that wait."""
    await served.pause()
    held = [asyncio.create_task(served.complete(SHORT)) for _ in range(12)]
    await eventually(lambda: _queued(served, 12), 5)
    with pytest.raises(EngineUnavailable, match="queue is full with 4") as full:
        await served.complete(SHORT)
    assert full.value.retry_after == 1.0
    await served.resume()
    assert len(await asyncio.gather(*held)) == 12


async def test_more_requests_than_slots(served: EngineClient) -> None:
    requests = [GenerateRequest(f"r{i}", (i,), SamplingParams(30, seed=i)) for i in range(11)]
    for request, result in zip(
        requests, await asyncio.gather(*map(served.complete, requests)), strict=True
    ):
        expected = forced(decoder(seed=1), request.token_ids, result.token_ids)
        assert result.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("token_ids", "sampling", "message"),
    [
        ((), {}, "empty"),
        ((32,), {}, "0 to 31"),
        ((-1,), {}, "0 to 31"),
        (tuple([1] * 64), {}, "maximum context length is 64"),
        ((1,), {"max_tokens": 0}, "max_tokens"),
        ((1,), {"temperature": -0.1}, "temperature"),
        ((1,), {"top_p": 0.0}, "top_p"),
        ((1,), {"top_p": 1.5}, "top_p"),
        ((1,), {"top_k": -2}, "top_k"),
        ((1,), {"stop_token_ids": (99,)}, "stop_token_ids"),
    ],
)
async def test_bad_requests_are_refused_with_the_reason(
    served: EngineClient, token_ids: tuple[int, ...], sampling: dict[str, object], message: str
) -> None:
    params = SamplingParams(**({"max_tokens": 4} | sampling))  # type: ignore[arg-type]
    with pytest.raises(EngineRefused, match=message) as refused:
        await served.complete(GenerateRequest("bad", token_ids, params))
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"n": 2}, "n must be 1"),
        ({"logprobs": 5}, "logprobs"),
        ({"temperature": True}, "temperature"),
        ({"seed": "7"}, "seed"),
        ({"prompt_logprobs": 0}, "stream: false"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    served: EngineClient, url: str, sampling: dict[str, object], message: str
) -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1} | sampling, "stream": True}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/inference/v1/generate", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        torn = await http.post(f"{url}/inference/v1/generate", content=b"{")
        assert torn.status_code == 400


async def test_the_context_bounds_the_answer(served: EngineClient) -> None:
    prompt = tuple(i % 32 for i in range(63))
    result = await served.complete(GenerateRequest("r", prompt, SamplingParams(100, seed=1)))
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


async def test_null_max_tokens_is_all_that_is_left(served: EngineClient, url: str) -> None:
    body = {"token_ids": [3, 17, 4], "sampling_params": {"max_tokens": None, "seed": 1}}
    async with httpx.AsyncClient() as http:
        answer = (await http.post(f"{url}/inference/v1/generate", json=body)).json()
    assert len(answer["choices"][0]["token_ids"]) == 61
    assert answer["prompt_logprobs"] is None


async def test_stop_token_ends_the_answer(served: EngineClient) -> None:
    free = await served.complete(LONG)
    stop = free.token_ids[4]
    sampling = SamplingParams(60, seed=5, stop_token_ids=(stop,))
    result = await served.complete(GenerateRequest("r", LONG.token_ids, sampling))
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_control_and_generate_need_the_token(folders: Path) -> None:
    with running(token="secret") as (_, url):
        async with EngineClient(url, "secret") as client:
            await client.update(1, str(folders / "v1"))
            assert (await client.complete(SHORT)).finish_reason == "length"
        async with EngineClient(url) as stranger:
            await stranger.health()
            for call in (
                stranger.complete(SHORT),
                stranger.versions(),
                stranger.pause(),
                stranger.update(2, str(folders / "v2")),
            ):
                with pytest.raises(EngineRefused) as refused:
                    await call
                assert refused.value.code == 401


async def test_logits_that_are_not_finite_fail_their_request_only(
    served: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await served.complete(LONG)
    step = Runner.step

    def spoilt(self: Runner, *arguments: object) -> list[Sampled]:
        sampled = step(self, *arguments)  # type: ignore[arg-type]
        return [Sampled(s.slot, s.token_id, float("nan")) for s in sampled]

    monkeypatch.setattr(Runner, "step", spoilt)
    with pytest.raises(EngineDied, match="nan"):
        await served.complete(LONG)
    monkeypatch.setattr(Runner, "step", step)
    assert await served.complete(LONG) == good


async def test_a_failed_decoding_thread_ends_the_engine(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Runner, *arguments: object) -> list[Sampled]:
        raise RuntimeError("no memory left")

    monkeypatch.setattr("threading.excepthook", lambda _: None)
    with running() as (engine, url):
        async with EngineClient(url) as client:
            await client.update(1, str(folders / "v1"))
            monkeypatch.setattr(Runner, "step", fail)
            with pytest.raises(EngineDied, match="no memory left"):
                await client.complete(SHORT)
            await eventually(lambda: _refuses(client), 5)
    assert engine.crashed


async def _true(value: bool) -> bool:
    return value


async def _running(client: EngineClient, count: int) -> bool:
    return (await client.versions()).running == count


async def _queued(client: EngineClient, count: int) -> bool:
    return (await client.versions()).queued == count


async def _refuses(client: EngineClient) -> bool:
    try:
        await client.health()
    except EngineUnavailable:
        return True
    except EngineDied:
        return False
    return False
