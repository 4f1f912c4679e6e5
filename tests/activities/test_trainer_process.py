"""``python -m activities.trainer`` with the real engine, killed in the middle of a step."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import Worker

from activities.checkpoints import read_checkpoint
from archon.records.messages import PolicyKey, StepInput, Trained, trainer_queue
from archon.storage import Database
from tests.activities.claimed import claim
from tests.activities.test_engine_group import is_alive
from tests.engine.batches import write_model
from tests.rollout.history import POLICY, TENANT, add_policy, states

pytestmark = [pytest.mark.stack, pytest.mark.kill]


@workflow.defn(sandboxed=False)
class AskTrainer:
    """Asks the trainer's queue for one thing, as the workflows of the policy do."""

    @workflow.run
    async def run(self, queue: str, key: PolicyKey, step: StepInput | None) -> Trained | None:
        options: dict[str, Any] = {
            "task_queue": queue,
            "start_to_close_timeout": timedelta(seconds=90),
            "heartbeat_timeout": timedelta(seconds=2.5),
            "retry_policy": RetryPolicy(initial_interval=timedelta(seconds=0.2)),
        }
        if step is None:
            await workflow.execute_activity("ensure_initial_version", key, **options)
            return None
        return await workflow.execute_activity("train_step", step, result_type=Trained, **options)


@asynccontextmanager
async def trainer(environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "activities.trainer", env={**os.environ, **environment},
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(180)
async def test_a_killed_trainer_is_followed_by_one_that_completes_the_step_once(
    temporal: Client, temporal_address: str, database: Database, tmp_path: Path, queue_prefix: str
) -> None:
    model = write_model(tmp_path / "model")
    await add_policy(database, model=str(model))
    environment = {
        "ARCHON_DATA_DIR": str(tmp_path / "data"),
        "ARCHON_POSTGRES__URL": database.url,
        "ARCHON_TEMPORAL__ADDRESS": temporal_address,
        "ARCHON_TEMPORAL__QUEUE_PREFIX": queue_prefix,
    }
    queue, key = trainer_queue(queue_prefix), PolicyKey(TENANT, POLICY)

    async def ask(step: StepInput | None) -> Trained | None:
        return await temporal.execute_workflow(
            AskTrainer.run,
            args=[queue, key, step],
            id=f"ask-{queue_prefix}-{step is None}",
            task_queue=f"{queue_prefix}-test",
        )

    failing = {**environment, "ARCHON_FAILPOINTS": "trainer.worker_mid_step=kill@2"}
    async with Worker(temporal, task_queue=f"{queue_prefix}-test", workflows=[AskTrainer]):
        async with trainer(failing) as first:
            await ask(None)
            assert await states(database) == {0: "live"}
            base = tmp_path / "data" / "checkpoints" / TENANT / POLICY / "initial"
            initial = read_checkpoint(base)
            assert initial is not None
            await claim(database, base_checkpoint=str(base), base_digest=initial["model_sha256"])
            asking = asyncio.create_task(ask(StepInput(TENANT, POLICY, "man_1", "", 60.0)))
            (engine,) = children(first.pid)
            died = asyncio.create_task(first.wait())
            await asyncio.wait([asking, died], return_when=asyncio.FIRST_COMPLETED)
            assert not asking.done(), asking.exception() or asking.result()
            assert await died == -signal.SIGKILL
        folder = base.parent / "man_1"
        assert read_checkpoint(folder) is None, "it died before the checkpoint"
        async with trainer(environment) as second:
            trained = await asking
            assert not is_alive(engine)
            second.terminate()
            assert await second.wait() == 0
    assert trained is not None and trained.outcome == "trained"
    published = json.loads((folder / "checkpoint.json").read_text())
    assert published["step"] == 1, "one step from the initial weights, not two"
    assert trained.model_sha256 == published["model_sha256"] != initial["model_sha256"]
    assert trained.weights == published["weights"]
    assert set(trained.spans) == {"load", "logprobs", "forward_backward", "optimizer", "save"}
