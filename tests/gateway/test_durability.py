"""The gateway as a process: killed at its commit points, ended in order, refused, kept small."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from archon.records import InteractionStatus
from archon.storage import tables
from tests.gateway.kit import World, secrets_of
from tests.kit.scripted_engine import Answer, ScriptedEngine

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}
ROOT = Path(__file__).resolve().parents[2]


@contextlib.asynccontextmanager
async def process(
    world: World, folder: Path, failpoints: str = ""
) -> AsyncIterator[tuple[subprocess.Popen[str], httpx.AsyncClient]]:
    """A gateway of its own on the world's database."""
    secrets_of(folder)
    environment = os.environ | {
        "ARCHON_DATA_DIR": str(folder),
        "ARCHON_POSTGRES__URL": world.service.settings.postgres.url.get_secret_value(),  # type: ignore[union-attr]
        "ARCHON_GATEWAY__PORT": "0",
        "ARCHON_FAILPOINTS": failpoints,
    }
    command = [sys.executable, "-m", "gateway"]
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        said = await asyncio.to_thread(running.stdout.readline)
        assert said.startswith("listening on "), said
        async with httpx.AsyncClient(base_url=said.split()[-1], timeout=20) as http:
            yield running, http
    finally:
        running.kill()
        running.wait()


async def lines(http: httpx.AsyncClient, key: str) -> list[str]:
    """What a client sees of a stream, to its end or its break."""
    seen: list[str] = []
    body = {"messages": [USER], "stream": True}
    with contextlib.suppress(httpx.HTTPError):
        async with http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-api-key": key}
        ) as response:
            async for line in response.aiter_lines():
                seen += [line] if line else []
    return seen


@pytest.mark.kill
async def test_killed_at_the_commit_points(
    ready: World, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """A client that saw its answer end has its row; one that did not may or may not."""
    engine.default = Answer(ready.ids("abc"), delays=[0.0, 0.0, 0.0, 0.05])
    key = (await ready.start())["api_key"]
    headers = {"x-api-key": key}
    reward: dict[str, Any] = {"reward": 1.0, "idempotency_key": "r1"}

    async with process(ready, tmp_path, "gateway.before_row=kill") as (gateway, http):
        seen = await lines(http, key)
        assert gateway.wait(5) == -signal.SIGKILL
    assert any('"content":"a"' in line for line in seen)
    assert not any('"finish_reason":"' in line or "[DONE]" in line for line in seen)
    assert await ready.interactions() == []

    async with process(ready, tmp_path, "gateway.after_row=kill") as (gateway, http):
        seen = await lines(http, key)
        assert gateway.wait(5) == -signal.SIGKILL
    assert not any('"finish_reason":"' in line or "[DONE]" in line for line in seen)
    [row] = await ready.interactions()
    assert row.status == InteractionStatus.COMPLETE and row.output_ids

    async with process(ready, tmp_path, "gateway.after_reward_row=kill") as (gateway, http):
        assert (await lines(http, key))[-1] == "data: [DONE]"
        assert len(await ready.interactions()) == 2
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/rl/set_reward", json=reward, headers=headers)
        assert gateway.wait(5) == -signal.SIGKILL
    [stored] = await ready.rows(tables.reward)
    [entry] = await ready.rows(tables.outbox, kind="reward")
    assert entry["ref"] == stored["reward_id"]

    async with process(ready, tmp_path) as (_, http):
        again = await http.post("/rl/set_reward", json=reward, headers=headers)
        assert again.json()["duplicate"] is True
        assert again.json()["reward_id"] == stored["reward_id"]
    assert len(await ready.rows(tables.outbox, kind="reward")) == 1


async def test_it_ends_in_order(ready: World, engine: ScriptedEngine, tmp_path: Path) -> None:
    """SIGTERM: within about three seconds, a running call kept as aborted."""
    engine.push(Answer(ready.ids("abc"), delays=[0.0, 60.0]))
    key = (await ready.start())["api_key"]
    async with process(ready, tmp_path) as (gateway, http):
        call = asyncio.create_task(lines(http, key))
        while not engine.generated or engine.generated[0].sent_tokens < 1:
            await asyncio.sleep(0.01)
        asked = time.monotonic()
        gateway.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait, 10) == 0
        assert time.monotonic() - asked < 5
        assert "data: [DONE]" not in await call
    [row] = await ready.interactions()
    assert row.status == InteractionStatus.ABORTED and len(row.output_ids) == 4


def test_a_public_bind_needs_an_admin_key(tmp_path: Path) -> None:
    environment = os.environ | {
        "ARCHON_DATA_DIR": str(tmp_path),
        "ARCHON_POSTGRES__URL": "postgresql://nobody@127.0.0.1:1/none",
        "ARCHON_GATEWAY__HOST": "0.0.0.0",
        "ARCHON_GATEWAY__PORT": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "gateway"], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2 and "admin" in ended.stderr and "0.0.0.0" in ended.stderr


def test_it_stays_small() -> None:
    script = "import sys, gateway.app, gateway.service; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"torch", "temporalio", "pyarrow", "sqlmodel", "transformers", "numpy", "pandas"}
    assert heavy & set(loaded) == set()
