"""Hours of waiting in a moment: the timeouts of a session, on Temporal's time-skipping server."""

import sysconfig
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import WorkflowHandle
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.sessions import SessionActivities
from archon.records.messages import (
    ATTR_STATUS,
    SessionInput,
    SessionStatus,
    SessionTimes,
    Settled,
    SettleInput,
    Wake,
)
from archon.storage import tables as t
from tests.workflows.scene import NOW, POLICY, TENANT, Scene, chain
from workflows.session import SessionWorkflow

pytestmark = pytest.mark.stack
TIMES: dict[str, Any] = {
    "close_on": "reward", "close_grace": 2.0, "idle_timeout": 600.0, "reward_timeout": 3600.0,
    "late_window": 7 * 86400.0,
}  # fmt: skip


class Lab:
    """One session's workflow, the real settling and a clock that skips."""

    def __init__(self, env: WorkflowEnvironment, scene: Scene) -> None:
        self.env, self.scene = env, scene
        self.looked: list[float] = []
        self.start: datetime

    @activity.defn
    async def settle_session(self, ask: SettleInput) -> Settled:
        now = await self.env.get_current_time()
        self.looked.append(round((now - self.start).total_seconds()))
        return await SessionActivities(self.scene.db, lambda: now).settle_session(ask)

    async def begin(
        self, closed: bool = False, **changes: Any
    ) -> WorkflowHandle[Any, SessionStatus]:
        self.start = await self.env.get_current_time()
        await self.scene.policy(**TIMES)
        await self.scene.session(calls=chain([7]), created_at=self.start, **changes)
        if closed:
            await self.scene.reward(1.0)
        return await self.env.client.start_workflow(
            "SessionWorkflow",
            SessionInput("ses_1", TENANT, POLICY, SessionTimes(**TIMES), closed),
            id="session-ses_1",
            task_queue="lab",
            result_type=SessionStatus,
        )

    def at(self, seconds: float) -> datetime:
        return self.start + timedelta(seconds=seconds)

    async def after(self, moment: datetime) -> int:
        """Whole seconds since the start."""
        return round((moment - self.start).total_seconds())


@pytest.fixture
async def lab(scene: Scene) -> AsyncIterator[Lab]:
    server = Path(sysconfig.get_path("scripts")) / "temporal-test-server"
    async with await WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(server)
    ) as env:
        await env.client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=env.client.namespace,
                search_attributes={ATTR_STATUS: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD},
            )
        )
        lab = Lab(env, scene)
        async with Worker(
            env.client,
            task_queue="lab",
            workflows=[SessionWorkflow],
            activities=[lab.settle_session],
        ):
            yield lab


async def test_idle_then_unscored_then_over(lab: Lab) -> None:
    """A call at 500 s: idle at 1,100 s, unscored an hour later, over after a week."""
    handle = await lab.begin()
    async with lab.scene.db.begin() as c:
        await c.execute(t.session.update().values(last_call_at=lab.at(500)))
    result = await handle.result()
    assert result.state == "unscored"
    assert lab.looked == [600, 1100, 4700]
    session = await lab.scene.one_session()
    assert session.closed_at is not None and session.sealed_at is not None
    assert session.close_reason == "idle"
    assert (await lab.after(session.closed_at), await lab.after(session.sealed_at)) == (1100, 4700)
    end = await lab.env.get_current_time()
    assert 0 <= await lab.after(end) - (4700 + 7 * 86400) < 60
    assert await lab.scene.returns() == {}, "no reward is not a reward of 0"


async def test_a_reward_closes_after_the_grace(lab: Lab) -> None:
    handle = await lab.begin()
    await lab.scene.reward(1.0, close_after=lab.at(102), at=0)
    await lab.env.sleep(100)
    await handle.signal(SessionWorkflow.wake, Wake("reward"))
    result = await handle.result()
    assert (result.state, result.seals) == ("sealed", 1)
    assert lab.looked == [100, 102], "too early once, then when it said"


async def test_a_reward_in_the_late_window_begins_the_window_anew(lab: Lab) -> None:
    handle = await lab.begin()
    await handle.signal(SessionWorkflow.close)
    await lab.scene.reward(1.0)
    await handle.signal(SessionWorkflow.wake, Wake("reward"))
    await lab.env.sleep(6 * 86400)
    await lab.scene.reward(0.5)
    await handle.signal(SessionWorkflow.wake, Wake("reward"))
    result = await handle.result()
    assert (result.state, result.seals, result.rewards) == ("sealed", 2, 1)
    end = await lab.after(await lab.env.get_current_time())
    assert 13 * 86400 <= end < 13 * 86400 + 60
    assert (await lab.scene.returns())["int_ses_1_1", 2] == 0.5


async def test_a_closed_session_is_looked_at_at_once(lab: Lab) -> None:
    handle = await lab.begin(closed=True, state="closed", closed_at=NOW)
    result = await handle.result()
    assert (result.state, result.seals, lab.looked) == ("sealed", 1, [0])
