"""The whole line in one process: relay, worker and workflows, with a trainer that only pretends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.policies import start_policy
from activities.relay import Relay
from activities.sessions import SessionActivities
from activities.steps import StepActivities
from activities.workers import activity_methods, make_worker
from archon.records.messages import (
    PolicyKey,
    RolloutInput,
    RolloutResult,
    StepInput,
    Trained,
    policy_workflow_id,
    session_workflow_id,
    trainer_queue,
)
from archon.storage import Database
from archon.storage.versions import read_manifest
from tests.workflows.scene import TENANT, Scene
from workflows.policy import PolicyWorkflow
from workflows.session import SessionWorkflow
from workflows.step import TrainingStepWorkflow


@workflow.defn(name="WeightRolloutWorkflow", sandboxed=False)
class PretendedRollout:
    """Promotes everything by the activity ``promote_version``."""

    @workflow.run
    async def run(self, rollout: RolloutInput) -> RolloutResult:
        decision: str = await workflow.execute_activity(
            "promote_version",
            rollout,
            start_to_close_timeout=timedelta(seconds=30),
            result_type=str,
        )
        return RolloutResult(rollout.version, decision)


class Pretender:
    """Trains nothing. ``script`` says what the next steps do; then they succeed."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.script: list[Trained | ApplicationError] = []
        self.trained: list[str] = []
        self.promote = True

    @activity.defn
    async def ensure_initial_version(self, key: PolicyKey) -> int:
        return 0

    @activity.defn
    async def train_step(self, step: StepInput) -> Trained:
        self.trained.append(step.manifest_id)
        async with self.db.connect() as c:
            row = await read_manifest(c, step.manifest_id)
        if row is not None and row.state == "failed":
            raise ApplicationError("it is failed", type="ManifestNotClaimed", non_retryable=True)
        if self.script:
            planned = self.script.pop(0)
            if isinstance(planned, ApplicationError):
                raise planned
            return Trained(step.manifest_id, planned.outcome, reason=planned.reason)
        return Trained(step.manifest_id, "trained", f"/c/{step.manifest_id}", "w", "sha")

    @activity.defn
    async def promote_version(self, rollout: RolloutInput) -> str:
        from archon.records import system_clock
        from archon.storage.rollouts import promote

        if not self.promote:
            return "superseded"
        async with self.db.begin() as c:
            return await promote(
                c, rollout.tenant_id, rollout.policy_id, rollout.version, [], [], system_clock()
            )


@dataclass
class Line:
    client: Client
    db: Database
    prefix: str
    scene: Scene
    trainer: Pretender
    relay: Relay

    def session(self, session: str = "") -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(session_workflow_id(session or self.scene.ses))

    def policy(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(policy_workflow_id(TENANT, self.scene.policy_id))

    async def start_policy(self) -> None:
        await start_policy(self.client, self.prefix, TENANT, self.scene.policy_id)


WORKFLOWS: Sequence[type] = (
    SessionWorkflow,
    PolicyWorkflow,
    TrainingStepWorkflow,
    PretendedRollout,
)


@asynccontextmanager
async def running_line(client: Client, scene: Scene, prefix: str) -> AsyncIterator[Line]:
    """Worker, trainer's worker and relay, until the end of the block."""
    db = scene.db
    trainer = Pretender(db)
    methods = activity_methods(SessionActivities(db), StepActivities(db))
    main = make_worker(client, prefix, WORKFLOWS, [*methods, trainer.promote_version])
    queue = trainer_queue(prefix)
    pretends = Worker(
        client, task_queue=queue, activities=[trainer.ensure_initial_version, trainer.train_step]
    )
    line = Line(client, db, prefix, scene, trainer, Relay(client, db, prefix))
    async with main, pretends:
        relay = asyncio.create_task(line.relay.run())
        try:
            yield line
        finally:
            relay.cancel()
            with suppress(asyncio.CancelledError):
                await relay


async def until(
    holds: Callable[[], Awaitable[Any]], what: str = "it", timeout: float = 20.0
) -> Any:
    """Ask until the answer is truthy; the error says what was waited for."""
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        if answer := await holds():
            return answer
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout} s")
        await asyncio.sleep(0.05)
