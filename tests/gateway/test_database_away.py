"""While PostgreSQL is away nothing is acknowledged, and when it is back all goes on by itself."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from archon.stack import postgres
from archon.storage import tables
from tests.gateway.kit import World, running
from tests.kit.scripted_engine import Answer, ScriptedEngine
from tests.kit.stack import Databases, short_folder, wait_for_postgres
from tests.kit.stack import running as run_process

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}


class Server:
    """A PostgreSQL that a test may kill and start."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        fast = (("fsync", "off"), ("autovacuum", "off"))
        self._server = postgres.prepare(
            folder / "postgres", folder / "password", options=fast, sync=False
        )
        self.start()
        self.url = Databases(self._server).create()

    def start(self) -> None:
        log = self._folder / "postgres.log"
        self._process: subprocess.Popen[bytes] = self._stack.enter_context(
            run_process(self._server.spec(), log)
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    with short_folder() as folder, ExitStack() as stack:
        yield Server(folder, stack)


@pytest.fixture
async def world(server: Server, tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[World]:
    async with running(server.url, tmp_path) as made:
        await made.policy()
        await made.replica(engine)
        yield made


async def timed(call: "asyncio.Future[httpx.Response]") -> tuple[httpx.Response, float]:
    started = time.monotonic()
    return await call, time.monotonic() - started


@pytest.mark.kill
async def test_a_database_that_is_killed(
    world: World, server: Server, engine: ScriptedEngine
) -> None:
    engine.default = world.say("a")
    key = (await world.start())["api_key"]
    chat = {"messages": [USER]}
    assert (await world.post("/v1/chat/completions", key, chat)).status_code == 200
    engine.push(Answer(world.ids("abc"), delays=[0.0, 0.0, 0.3]))
    caught = asyncio.create_task(world.post("/v1/chat/completions", key, chat))
    while len(engine.generated) < 2:
        await asyncio.sleep(0.01)
    server.kill()
    asked = [
        caught,
        asyncio.ensure_future(world.post("/v1/chat/completions", key, chat)),
        asyncio.ensure_future(world.post("/rl/set_reward", key, {"reward": 1})),
        asyncio.ensure_future(world.start_anyway()),
    ]
    for response, seconds in await asyncio.gather(*(timed(call) for call in asked)):
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"] == "1" and seconds < 4
        assert "database" in response.json()["error"]["message"]
    assert (await world.http.get("/health")).status_code == 200
    server.start()
    await asyncio.to_thread(wait_for_postgres, server.url)
    await world.database.engine.dispose()
    response = await world.post("/v1/chat/completions", key, chat)
    assert response.status_code == 200, response.text
    assert (await world.post("/rl/set_reward", key, {"reward": 1})).status_code == 200
    rows = await world.interactions()
    assert [row.seq for row in rows] == [1, 2] and len(await world.rows(tables.reward)) == 1


@pytest.mark.kill
async def test_a_database_that_restarts_under_a_call(
    world: World, server: Server, engine: ScriptedEngine
) -> None:
    """An answer that is ready waits a little for its row, and is not lost to a restart."""
    key = (await world.start())["api_key"]
    engine.push(Answer(world.ids("abc"), delays=[0.2]))
    call = asyncio.create_task(world.post("/v1/chat/completions", key, {"messages": [USER]}))
    while not engine.generated:
        await asyncio.sleep(0.01)
    server.kill()
    server.start()
    response = await call
    assert response.status_code == 200, response.text
    await world.database.engine.dispose()
    assert len(await world.interactions()) == 1
