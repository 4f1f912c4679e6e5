"""``python -m activities.worker``: it seals what it is told of, ends in order, and dies whole."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.client import Client

from archon.records import system_clock
from tests.kit.stack import free_port
from tests.workflows.line import until
from tests.workflows.scene import Scene

pytestmark = [pytest.mark.stack, pytest.mark.kill]


@asynccontextmanager
async def worker(folder: Path, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    config = folder / "archon.toml"
    config.write_text("")
    settings = {"ARCHON_DATA_DIR": str(folder), "ARCHON_CONFIG": str(config)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "activities.worker", env={**os.environ, **settings, **environment}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, float]:
    """The exit status after SIGTERM, and the seconds that it took."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    return await asyncio.wait_for(process.wait(), 30), time.monotonic() - began


async def test_it_seals_a_session_and_ends_in_order(
    scene: Scene, temporal: Client, temporal_address: str, queue_prefix: str, tmp_path: Path
) -> None:
    scene = Scene(scene.db, queue_prefix)
    await scene.policy(late_window=0.0)
    environment = {
        "ARCHON_POSTGRES__URL": scene.db.url,
        "ARCHON_TEMPORAL__ADDRESS": temporal_address,
        "ARCHON_TEMPORAL__QUEUE_PREFIX": queue_prefix,
    }
    async with worker(tmp_path, **environment) as process:
        await scene.session(calls=scene.chain([7]), told=True)
        await scene.reward(1.0, close_after=system_clock())
        await until(lambda: _is_sealed(scene), "sealed", timeout=60)
        status, seconds = await ended(process)
    assert status == 0
    assert seconds < 5


async def _is_sealed(scene: Scene) -> bool:
    return (await scene.one_session()).state == "sealed"


async def test_it_waits_for_temporal_and_can_be_stopped_meanwhile(
    database_url: str, tmp_path: Path
) -> None:
    environment = {
        "ARCHON_POSTGRES__URL": database_url,
        "ARCHON_TEMPORAL__ADDRESS": f"127.0.0.1:{free_port()}",
    }
    async with worker(tmp_path, **environment) as process:
        await asyncio.sleep(6)
        assert process.returncode is None
        status, seconds = await ended(process)
    assert status == 0
    assert seconds < 5
