"""Record the histories under tests/histories/ again: ``python scripts/record_histories.py``.

Run it after a deliberate change of a workflow, and look at the difference: a history that no longer
replays is a workflow in somebody's installation that would be stuck. Every activity is played here,
so that a history has what a branch needs and nothing of a real installation.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from temporalio import activity
from temporalio.client import Client, WorkflowContinuedAsNewError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from archon.records.messages import (
    AwaitInput,
    Claimed,
    EpisodeInput,
    EpisodeWave,
    GroupPlan,
    LostMembers,
    MemberResult,
    PolicyInput,
    PolicyKey,
    ProbeResult,
    RawReward,
    ReplicaUpdate,
    RewardReceipt,
    RolloutInput,
    RolloutResult,
    RolloutVerdict,
    SessionInput,
    SessionTimes,
    Settled,
    SettleInput,
    StepInput,
    StepNote,
    StepResult,
    Trained,
    Wake,
    agents_queue,
    episode_workflow_id,
    main_queue,
    policy_workflow_id,
    rollout_workflow_id,
    session_workflow_id,
    step_workflow_id,
    trainer_queue,
)
from archon.stack.temporal import connect, register_search_attributes
from tests.kit.stack import temporal_server
from workflows.episode import EpisodeWorkflow
from workflows.policy import PolicyWorkflow
from workflows.rollout import WeightRolloutWorkflow
from workflows.session import SessionWorkflow
from workflows.step import TrainingStepWorkflow

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "histories"
PREFIX, RUN = "recorded", "run1"
QUEUE = main_queue(PREFIX)
TIMES = SessionTimes("reward", 0.1, 600.0, 600.0, 0.5)


class Played:
    """Activities that answer from what a recording says, else with success."""

    def __init__(self) -> None:
        self.settled: list[Settled] = []
        self.claims = 0
        self.batches = asyncio.Semaphore(0)
        self.trained: list[Trained | ApplicationError] = []
        self.probes: list[ProbeResult] = []
        self.waves: list[list[MemberResult]] = []

    @activity.defn
    async def settle_session(self, ask: SettleInput) -> Settled:
        return self.settled.pop(0)

    @activity.defn
    async def record_reward(self, raw: RawReward) -> RewardReceipt:
        return RewardReceipt("rew_1", 1.0)

    @activity.defn
    async def ensure_initial_version(self, key: PolicyKey) -> int:
        return 0

    @activity.defn
    async def await_batch(self, ask: AwaitInput) -> Claimed:
        if not ask.patience:
            return Claimed(reason="0 of 1 groups ready", head=0, live=0)
        beat = asyncio.create_task(_beat())
        try:
            await self.batches.acquire()
        finally:
            beat.cancel()
        self.claims += 1
        head = self.claims - 1
        return Claimed(f"man_{self.claims}", head, head=head, live=head)

    @activity.defn
    async def train_step(self, step: StepInput) -> Trained:
        planned = self.trained.pop(0) if self.trained else Trained(step.manifest_id, "trained")
        if isinstance(planned, ApplicationError):
            raise planned
        return planned

    @activity.defn
    async def commit_step(self, trained: Trained) -> StepResult:
        return self._committed(trained.manifest_id)

    @activity.defn
    async def read_step(self, note: StepNote) -> StepResult:
        return self._committed(note.manifest_id)

    @activity.defn
    async def fail_step(self, note: StepNote) -> StepResult:
        return StepResult(note.manifest_id, "failed", reason=note.reason)

    @activity.defn
    async def retry_step(self, note: StepNote) -> StepResult:
        return StepResult(note.manifest_id, "running")

    @activity.defn
    async def drop_step(self, note: StepNote) -> StepResult:
        return StepResult(note.manifest_id, "dropped", reason=note.reason)

    @activity.defn
    async def release_step(self, note: StepNote) -> StepResult:
        return StepResult(note.manifest_id, "dropped", reason=note.reason)

    @activity.defn
    async def list_replicas(self, key: PolicyKey) -> list[str]:
        return ["rep_1", "rep_2"]

    @activity.defn
    async def update_replica(self, update: ReplicaUpdate) -> ProbeResult:
        if self.probes:
            return self.probes.pop(0)
        return ProbeResult(update.replica_id, True, 0.0, 0.01)

    @activity.defn
    async def promote(self, verdict: RolloutVerdict) -> RolloutResult:
        return RolloutResult(verdict.version, "promoted", verdict.reasons)

    @activity.defn
    async def reject(self, verdict: RolloutVerdict) -> RolloutResult:
        return RolloutResult(verdict.version, "rejected", verdict.reasons)

    @activity.defn
    async def admit_group(self, plan: GroupPlan) -> None:
        return None

    @activity.defn
    async def run_members(self, wave: EpisodeWave) -> list[MemberResult]:
        return self.waves.pop(0)

    @activity.defn
    async def lose_members(self, lost: LostMembers) -> None:
        return None

    def _committed(self, manifest: str) -> StepResult:
        number = int(manifest.removeprefix("man_"))
        return StepResult(manifest, "committed", number, "", 0.5)


async def _beat() -> None:
    while True:
        activity.heartbeat("0 of 1 groups ready")
        await asyncio.sleep(0.3)


class Recorder:
    def __init__(self, client: Client, played: Played) -> None:
        self.client, self.played = client, played

    async def start(self, name: str, input: Any, id: str) -> WorkflowHandle[Any, Any]:
        return await self.client.start_workflow(name, input, id=id, task_queue=QUEUE)

    async def keep(self, handle: WorkflowHandle[Any, Any], name: str) -> None:
        """Wait for the end of this run and write its history."""
        first = self.client.get_workflow_handle(handle.id, run_id=handle.first_execution_run_id)
        with contextlib.suppress(WorkflowContinuedAsNewError):
            await first.result(follow_runs=False)
        history = await first.fetch_history()
        # A failure's stack trace names the folders of this machine.
        text = re.sub(r'"stackTrace": "(\\.|[^"\\])*"', '"stackTrace": ""', history.to_json())
        (FOLDER / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {len(history.events)} events")


Recording = Callable[[Recorder], Awaitable[None]]


async def session_ordinary(r: Recorder) -> None:
    r.played.settled = [Settled("open", wait=0.1), Settled("sealed", rewards=1, revision=1)]
    input = SessionInput("ses_1", "acme", "game", TIMES)
    handle = await r.start("SessionWorkflow", input, session_workflow_id("ses_1"))
    await asyncio.sleep(0.2)
    await handle.signal("wake", Wake("reward", "rew_1"))
    await r.keep(handle, "SessionWorkflow-ordinary")


async def session_by_hand(r: Recorder) -> None:
    """Closed by signal, rewarded by signal and update, sealed twice within the late window."""
    r.played.settled = [
        Settled("closed", wait=600.0),
        Settled("sealed", rewards=1, revision=1),
        Settled("sealed", rewards=2, rejected=1, revision=2, late=True),
    ]
    input = SessionInput("ses_2", "acme", "game", TIMES)
    handle = await r.start("SessionWorkflow", input, session_workflow_id("ses_2"))
    await handle.signal("close")
    await asyncio.sleep(0.2)
    await handle.signal("reward", "good")
    await handle.execute_update("set_reward", 1.0)
    await handle.signal("wake", Wake("reward", "rew_1"))
    await asyncio.sleep(0.2)
    await handle.signal("wake", Wake("reward", "rew_2"))
    await r.keep(handle, "SessionWorkflow-by-hand")


async def session_continues(r: Recorder) -> None:
    r.played.settled = [Settled("open", wait=600.0), Settled("empty"), Settled("empty")]
    input = SessionInput("ses_3", "acme", "game", TIMES, max_history=5)
    handle = await r.start("SessionWorkflow", input, session_workflow_id("ses_3"))
    await handle.signal("wake", Wake("reward", "rew_1"))
    await asyncio.sleep(0.2)
    await handle.signal("close")
    await r.keep(handle, "SessionWorkflow-continues")


async def step_ordinary(r: Recorder) -> None:
    input = StepInput("acme", "nobody", "man_7", PREFIX, 600.0)
    handle = await r.start("TrainingStepWorkflow", input, step_workflow_id("man_7"))
    await r.keep(handle, "TrainingStepWorkflow-ordinary")


async def step_failed(r: Recorder) -> None:
    """Fails, is tried again by a person, fails again and is dropped."""
    r.played.trained = [ApplicationError("NaN", type="NaNLoss", non_retryable=True)] * 2
    input = StepInput("acme", "nobody", "man_8", PREFIX, 600.0)
    handle = await r.start("TrainingStepWorkflow", input, step_workflow_id("man_8"))
    for verdict in ("retry", "drop"):
        while not await handle.query("waiting"):
            await asyncio.sleep(0.05)
        await handle.signal(verdict)
        await asyncio.sleep(0.3)
    await r.keep(handle, "TrainingStepWorkflow-failed")


async def step_empty(r: Recorder) -> None:
    r.played.trained = [Trained("man_9", "empty_signal", reason="all advantages are 0")]
    input = StepInput("acme", "nobody", "man_9", PREFIX, 600.0)
    handle = await r.start("TrainingStepWorkflow", input, step_workflow_id("man_9"))
    await r.keep(handle, "TrainingStepWorkflow-empty-signal")


async def step_released(r: Recorder) -> None:
    r.played.trained = [ApplicationError("rests on", type="StaleBatch", non_retryable=True)]
    input = StepInput("acme", "nobody", "man_10", PREFIX, 600.0)
    handle = await r.start("TrainingStepWorkflow", input, step_workflow_id("man_10"))
    await r.keep(handle, "TrainingStepWorkflow-released")


async def policy_ordinary(r: Recorder) -> None:
    """Paused, one step by hand, resumed, one more step; each version rolled out."""
    r.played.claims = 0
    input = PolicyInput("acme", "game", PREFIX, max_steps=2)
    handle = await r.start("PolicyWorkflow", input, policy_workflow_id("acme", "game"))
    await asyncio.sleep(0.3)
    await handle.signal("pause")
    await asyncio.sleep(0.3)
    await handle.signal("step_now")
    r.played.batches.release()
    while (await handle.query("status"))["steps"] < 1:
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    await handle.signal("resume")
    r.played.batches.release()
    await r.keep(handle, "PolicyWorkflow-ordinary")


async def policy_continues(r: Recorder) -> None:
    r.played.claims = 10
    r.played.batches.release()
    input = PolicyInput("acme", "other", PREFIX, max_steps=1, max_history=10)
    handle = await r.start("PolicyWorkflow", input, policy_workflow_id("acme", "other"))
    await r.keep(handle, "PolicyWorkflow-continues")


async def rollout_promoted(r: Recorder) -> None:
    """The canary was away in the first round."""
    away = ProbeResult("rep_1", False, 0.0, 0.0, "connection refused", "unreachable")
    r.played.probes = [away, ProbeResult("rep_2", False, 0.0, 0.0, "too", "unreachable")]
    name = rollout_workflow_id("acme", "game", 21)
    input = RolloutInput("acme", "game", 21, PREFIX)
    handle = await r.start("WeightRolloutWorkflow", input, name)
    await r.keep(handle, "WeightRolloutWorkflow-promoted")


async def rollout_rejected(r: Recorder) -> None:
    r.played.probes = [ProbeResult("rep_1", False, 0.5, 0.01, "off by 0.5", "mismatch")]
    name = rollout_workflow_id("acme", "game", 22)
    input = RolloutInput("acme", "game", 22, PREFIX)
    handle = await r.start("WeightRolloutWorkflow", input, name)
    await r.keep(handle, "WeightRolloutWorkflow-rejected")


async def episode_replaced(r: Recorder) -> None:
    """One of two members fails and is played again."""
    good = [MemberResult(n, f"ses_{n}", True, reward=0.5) for n in (0, 1)]
    r.played.waves = [[good[0], MemberResult(1, "ses_9", False, error="exit 1")], [good[1]]]
    input = EpisodeInput(RUN, 0, "acme", "game", "task_1", {"n": 3}, 2, PREFIX)
    handle = await r.start("EpisodeWorkflow", input, episode_workflow_id(RUN, 0))
    await r.keep(handle, "EpisodeWorkflow-replaced")


RECORDINGS: list[Recording] = [
    session_ordinary, session_by_hand, session_continues, step_ordinary, step_failed, step_empty,
    step_released, policy_ordinary, policy_continues, rollout_promoted, rollout_rejected,
    episode_replaced,
]  # fmt: skip


@asynccontextmanager
async def workers(client: Client, played: Played) -> AsyncIterator[None]:
    methods = [
        method
        for name in dir(played)
        if hasattr(method := getattr(played, name), "__temporal_activity_definition")
    ]
    main = Worker(
        client,
        task_queue=QUEUE,
        workflows=[
            SessionWorkflow,
            PolicyWorkflow,
            TrainingStepWorkflow,
            WeightRolloutWorkflow,
            EpisodeWorkflow,
        ],
        activities=methods,
        max_heartbeat_throttle_interval=timedelta(seconds=0.2),
    )
    trainer = Worker(client, task_queue=trainer_queue(PREFIX), activities=methods)
    agents = Worker(client, task_queue=agents_queue(PREFIX, RUN), activities=methods)
    async with main, trainer, agents:
        yield


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with temporal_server() as address:
        await register_search_attributes(await connect(address, "default", timeout=30))
        client = await Client.connect(address, identity="recorder")
        played = Played()
        async with workers(client, played):
            for recording in RECORDINGS:
                await recording(Recorder(client, played))


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)
