"""Session → reward → seal → claim → train → commit → rollout, on real servers."""

from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client

from activities.policies import start_policy
from archon.records import system_clock
from archon.records.messages import PolicyStatus, SessionStatus
from archon.storage import Database
from tests.kit.invariants import check_database
from tests.workflows.line import Line, running_line, until
from tests.workflows.scene import POLICY, TENANT, Scene, chain

pytestmark = pytest.mark.stack


@pytest.fixture
async def line(temporal: Client, database: Database, queue_prefix: str) -> AsyncIterator[Line]:
    async with running_line(temporal, database, queue_prefix) as made:
        yield made


async def state(scene: Scene, session: str = "ses_1") -> str:
    return str((await scene.one_session(session)).state.value)


async def test_a_reward_becomes_a_version_that_is_live(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=0.0)
    await start_policy(line.client, line.prefix, TENANT, POLICY)
    await scene.session(calls=chain([7], [8]), told=True)
    await scene.reward(1.0, close_after=system_clock())
    await until(lambda: _live(scene, 1), "version 1 live")
    assert check_database(scene.db.url) == []
    result: SessionStatus = await line.session().result()
    assert result["state"] == "sealed"
    status = await line.policy().query("status", result_type=PolicyStatus)
    assert (status.steps, status.head, status.last_rewards) == (1, 1, (1.0,))


async def _live(scene: Scene, version: int) -> bool:
    return any(v.version == version and v.state == "live" for v in await scene.versions())
