"""The worker is killed at each of its commit points; nothing is lost, and nothing is done twice."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.policies import start_policy
from archon.records import system_clock
from tests.kit.invariants import Acknowledged, check_database
from tests.workflows.line import until
from tests.workflows.scene import TENANT, Scene, chain

pytestmark = [pytest.mark.stack, pytest.mark.kill, pytest.mark.timeout(180)]

POINTS = [
    "relay.after_signal", "seal.before_commit", "seal.after_commit", "claim.before_commit",
    "claim.after_commit", "commit.before_commit", "commit.after_commit",
]  # fmt: skip


@asynccontextmanager
async def supervised(*arguments: str, folder: Path) -> AsyncIterator[list[int]]:
    """A process that is started again whenever it dies; yields how it ended each time."""
    ends: list[int] = []
    environment = os.environ | {
        "ARCHON_FAILPOINTS": ";".join(f"{point}=kill" for point in POINTS),
        "ARCHON_FAILPOINT_DIR": str(folder),
    }
    running: list[asyncio.subprocess.Process] = []

    async def supervise() -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.workflows.line_process", *arguments, env=environment
            )
            running[:] = [process]
            ends.append(await process.wait())

    task = asyncio.create_task(supervise())
    try:
        yield ends
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_killed_at_every_commit_point_it_goes_on_once(
    scene: Scene, temporal: Client, temporal_address: str, queue_prefix: str, tmp_path: Path
) -> None:
    scene = Scene(scene.db, queue_prefix)
    await scene.policy(late_window=0.0, batch_groups=2, max_ahead=1, max_staleness=4)
    await start_policy(temporal, queue_prefix, TENANT, scene.policy_id)
    kept = Acknowledged()
    async with supervised(scene.db.url, temporal_address, queue_prefix, folder=tmp_path) as ends:
        for n in range(6):
            name = f"{scene.ses}_{n}"
            calls = chain([7], [8, 9], session=name)
            await scene.session(name, calls, told=True)
            made = await scene.reward(n / 8, name, close_after=system_clock())
            kept.interactions |= {c.interaction_id for c in calls}
            kept.rewards[made.reward_id] = n / 8
        await until(lambda: _live(scene, 3), "three versions", timeout=150)
    assert ends == [-signal.SIGKILL] * len(POINTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"{p}.fired" for p in POINTS)
    assert [v.version for v in await scene.versions()] == [0, 1, 2, 3]
    samples = await scene.samples()
    assert [s.state for s in samples] == ["trained"] * 6
    assert {revision for _, revision in await scene.returns()} == {1}
    assert check_database(scene.db.url, kept) == []


async def _live(scene: Scene, version: int) -> bool:
    return any(v.version == version and v.state == "live" for v in await scene.versions())
