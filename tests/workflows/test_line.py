"""Session → reward → seal → claim → train → commit → rollout, on real servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from archon.records import Reward, system_clock
from archon.records.messages import (
    PolicyInput,
    PolicyStatus,
    RewardReceipt,
    SessionInput,
    SessionStatus,
    SessionTimes,
    StepResult,
    Trained,
    Wake,
    main_queue,
    step_workflow_id,
)
from archon.storage import Database
from archon.storage import tables as t
from tests.kit.invariants import check_database
from tests.workflows.line import Line, running_line, until
from tests.workflows.scene import TENANT, Scene

pytestmark = pytest.mark.stack


@pytest.fixture
def scene(database: Database, queue_prefix: str) -> Scene:
    return Scene(database, queue_prefix)


@pytest.fixture
async def line(temporal: Client, scene: Scene, queue_prefix: str) -> AsyncIterator[Line]:
    async with running_line(temporal, scene, queue_prefix) as made:
        yield made


async def is_state(scene: Scene, state: str, session: str = "") -> bool:
    return (await scene.one_session(session)).state == state


async def sealed(scene: Scene, session: str = "") -> None:
    await until(lambda: is_state(scene, "sealed", session), "sealed")


async def status(line: Line, session: str = "") -> SessionStatus:
    return await line.session(session).query("status", result_type=SessionStatus)


async def policy_status(line: Line) -> PolicyStatus:
    return await line.policy().query("status", result_type=PolicyStatus)


async def is_version(scene: Scene, version: int, state: str) -> bool:
    return any(v.version == version and v.state == state for v in await scene.versions())


async def rewards(scene: Scene) -> list[tuple[float | None, str]]:
    return [(r.value, r.rejected) for r in await scene.all(t.reward, Reward)]


async def test_a_reward_becomes_a_version_that_is_live(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=0.0)
    await line.start_policy()
    await scene.session(calls=scene.chain([7], [8]), told=True)
    await scene.reward(1.0, close_after=system_clock())
    await until(lambda: is_version(scene, 1, "live"), "version 1 live")
    assert check_database(scene.db.url) == []
    assert (await line.session().result())["state"] == "sealed"
    await until(lambda: _steps(line, 1), "one step counted")
    found = await policy_status(line)
    assert (found.steps, found.head, found.last_rewards) == (1, 1, (1.0,))


async def test_rewards_from_temporals_own_clients_in_every_form(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=600.0)
    await scene.session(calls=scene.chain([7]), told=True)
    await until(lambda: _running(line), "the workflow")
    handle = line.session()
    for value in (0.25, {"value": 1, "component": "style"}, "0.5", {"reward": True}, "good", None):
        await handle.signal("reward", value)
        await asyncio.sleep(0.05)
    await handle.signal("reward", args=[1, 2])
    await handle.signal("reward", args=[])
    await handle.signal("no_such_signal", 1)
    await until(lambda: _count(scene, 8), "eight rewards")
    await sealed(scene)
    found = sorted(await rewards(scene), key=str)
    assert [value for value, why in found if not why] == [0.25, 0.5, 1.0, 1.0]
    assert sorted(why for _, why in found if why) == [
        "no value given", "no value given", "not a number: 'good'", "not a number: list",
    ]  # fmt: skip
    await until(lambda: _settled_with(line, 2, 4), "all of them settled")
    assert (await scene.returns())[(f"int_{scene.ses}_1", 1)] >= 0.25
    newest = max(revision for _, revision in await scene.returns())
    assert (await scene.returns())[f"int_{scene.ses}_1", newest] == 2.0, (
        "True in its slot, and style"
    )


async def _running(line: Line, session: str = "") -> bool:
    listed = [
        w async for w in line.client.list_workflows(f"WorkflowId='{line.session(session).id}'")
    ]
    return bool(listed)


async def _count(scene: Scene, count: int) -> bool:
    return len(await rewards(scene)) == count


async def _settled_with(line: Line, counted: int, rejected: int) -> bool:
    found = await status(line)
    return (found.rewards, found.rejected) == (counted, rejected)


async def test_an_update_answers_and_refuses(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=600.0)
    await scene.session(calls=scene.chain([7]), told=True)
    await until(lambda: _running(line), "the workflow")
    handle = line.session()
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await handle.execute_update("set_reward", "nan")
    assert isinstance(refused.value.cause, ApplicationError)
    assert f"{scene.ses}: not finite" in str(refused.value.cause)
    assert await rewards(scene) == []
    receipt = await handle.execute_update("set_reward", 0.5, result_type=RewardReceipt)
    assert (receipt.value, receipt.rejected) == (0.5, "")
    await sealed(scene)
    assert (await scene.one_session()).close_reason == "reward"


async def test_a_reward_that_is_later_than_the_workflow_starts_it_again(
    scene: Scene, line: Line
) -> None:
    await scene.policy(late_window=0.0)
    await scene.session(calls=scene.chain([7]), told=True)
    await scene.reward(1.0, close_after=system_clock())
    await sealed(scene)
    await line.session().result()
    await scene.reward(0.5)
    await until(lambda: _revision(scene, 2), "a second revision")
    assert (await scene.returns())[f"int_{scene.ses}_1", 2] == 0.5
    runs = [w async for w in line.client.list_workflows(f"WorkflowId='{line.session().id}'")]
    assert len(runs) == 2


async def _revision(scene: Scene, revision: int) -> bool:
    return any(r == revision for _, r in await scene.returns())


async def test_a_late_reward_within_the_window_needs_no_new_run(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=600.0)
    await scene.session(calls=scene.chain([7]), told=True)
    await scene.reward(1.0, close_after=system_clock())
    await sealed(scene)
    await scene.reward(0.5)
    await until(lambda: _revision(scene, 2), "a second revision")
    await until(lambda: _seals(line, 2), "two seals told")
    assert (await line.session().describe()).status == WorkflowExecutionStatus.RUNNING


async def _seals(line: Line, seals: int) -> bool:
    return (await status(line)).seals == seals


async def test_a_close_and_then_a_reward(scene: Scene, line: Line) -> None:
    await scene.policy(close_on="end", late_window=0.0)
    await scene.session(calls=scene.chain([7]), told=True)
    await until(lambda: _running(line), "the workflow")
    await line.session().signal("close")
    await until(lambda: is_state(scene, "closed"), "closed")
    await scene.reward(0.0)
    await sealed(scene)
    assert await scene.returns() == {(f"int_{scene.ses}_1", 1): 0.0}
    assert (await scene.one_session()).close_reason == "end"


async def test_sessions_are_listed_by_policy_and_status(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=600.0, reward_timeout=0.0)
    await scene.session(calls=scene.chain([7]), told=True)
    other = f"{scene.ses}_b"
    await scene.session(other, told=True)
    await scene.reward(1.0, close_after=system_clock())
    await sealed(scene)
    query = (
        f"TenantId='{TENANT}' AND PolicyId='{scene.policy_id}' AND WorkflowType='SessionWorkflow'"
        f" AND TaskQueue='{main_queue(line.prefix)}' AND ArchonStatus='%s'"
    )
    await until(lambda: _listed(line, query % "sealed", [line.session().id]), "one sealed")
    await until(lambda: _listed(line, query % "open", [line.session(other).id]), "one open")
    await line.session(other).signal("close")
    await until(lambda: _listed(line, query % "empty", [line.session(other).id]), "one empty")


async def _listed(line: Line, query: str, expected: list[str]) -> bool:
    return [w.id async for w in line.client.list_workflows(query)] == expected


async def test_a_long_session_continues_as_new_with_what_it_knows(scene: Scene, line: Line) -> None:
    await scene.policy(late_window=600.0)
    await scene.session(calls=scene.chain([7]), state="closed", closed_at=system_clock())
    times = SessionTimes("reward", 0.0, 600.0, 600.0, 600.0)
    handle = await line.client.start_workflow(
        "SessionWorkflow",
        SessionInput(scene.ses, TENANT, scene.policy_id, times, max_history=12),
        id=line.session().id,
        task_queue=main_queue(line.prefix),
    )
    for _ in range(6):
        await handle.signal("wake", Wake("reward"))
        await asyncio.sleep(0.1)
    await scene.reward(1.0)
    await sealed(scene)
    await until(lambda: _seals(line, 1), "the seal told")
    assert (await line.session().describe()).run_id != handle.first_execution_run_id
    assert (await status(line)).state == "sealed"


async def ready_group(scene: Scene, name: str) -> None:
    await scene.sealed_group(f"{scene.ses}_{name}", 0)


async def phase(line: Line, wanted: str, reason: str = "") -> bool:
    found = await policy_status(line)
    return found.phase == wanted and reason in found.reason


async def test_a_failed_step_waits_for_a_person_and_the_policy_goes_on(
    scene: Scene, line: Line
) -> None:
    await scene.policy(max_ahead=2)
    line.trainer.script = [
        ApplicationError("a worker died", type="EngineLost"),
        ApplicationError("NaN in the loss", type="NaNLoss", non_retryable=True),
        ApplicationError("NaN again", type="NaNLoss", non_retryable=True),
    ]
    await ready_group(scene, "a")
    await line.start_policy()
    manifest = await until(lambda: _manifest(scene, "failed"), "a failed manifest")
    assert manifest.reason == "NaNLoss: NaNLoss: NaN in the loss"
    query = f"Attention='failed_step' AND WorkflowId='{step_workflow_id(manifest.manifest_id)}'"
    step = line.client.get_workflow_handle(step_workflow_id(manifest.manifest_id))
    await until(lambda: _listed(line, query, [step.id]), "attention")
    assert await step.query("waiting") is True
    await step.signal("retry")
    await until(lambda: _tried(line, 3), "a third try")
    await until(lambda: _manifest(scene, "failed"), "failed again")
    await until(lambda: _listed(line, query, [step.id]), "attention again")
    await step.signal("drop")
    dropped = await until(lambda: _manifest(scene, "dropped"), "dropped")
    assert dropped.reason.startswith("NaNLoss")
    assert (await scene.samples())[0].state == "dropped"
    await until(lambda: _listed(line, query, []), "no attention")
    await ready_group(scene, "b")
    await until(lambda: is_version(scene, 1, "live"), "the next step's version")
    await until(lambda: _steps(line, 1), "one step counted")
    assert check_database(scene.db.url) == []


async def test_a_failed_step_goes_on_after_temporals_reset(scene: Scene, line: Line) -> None:
    await scene.policy()
    line.trainer.script = [ApplicationError("NaN", type="NaNLoss", non_retryable=True)]
    await ready_group(scene, "a")
    await line.start_policy()
    manifest = await until(lambda: _manifest(scene, "failed"), "a failed manifest")
    name = step_workflow_id(manifest.manifest_id)
    description = await line.client.get_workflow_handle(name).describe()
    await line.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=line.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=name, run_id=description.run_id),
            reason="by the test",
            workflow_task_finish_event_id=4,  # before the activity that failed was scheduled
            request_id="once",
        )
    )
    await until(lambda: is_version(scene, 1, "live"), "trained by the new run")
    # The policy was told by whichever run finished.
    await until(lambda: _steps(line, 1), "one step counted")
    assert check_database(scene.db.url) == []


async def _steps(line: Line, steps: int) -> bool:
    return (await policy_status(line)).steps == steps


async def _manifest(scene: Scene, state: str) -> Any:
    return next((m for m in await scene.manifests() if m.state == state), None)


async def _tried(line: Line, times: int) -> bool:
    return len(line.trainer.trained) >= times


async def test_an_empty_signal_makes_no_version_and_is_seen(scene: Scene, line: Line) -> None:
    await scene.policy()
    line.trainer.script = [Trained("", "empty_signal", reason="all advantages are 0")]
    await ready_group(scene, "a")
    await line.start_policy()
    manifest = await until(lambda: _manifest(scene, "dropped"), "dropped")
    assert manifest.reason == "empty_signal: all advantages are 0"
    (sample,) = await scene.samples()
    assert (sample.state, sample.drop_reason) == ("dropped", manifest.reason)
    result = await line.client.get_workflow_handle(
        step_workflow_id(manifest.manifest_id), result_type=StepResult
    ).result()
    assert result.outcome == "empty_signal"
    name = step_workflow_id(manifest.manifest_id)
    query = f"Attention='empty_signal' AND WorkflowId='{name}'"
    await until(lambda: _listed(line, query, [name]), "attention")
    await until(lambda: phase(line, "waiting"), "waiting for the next batch")
    assert len(await scene.versions()) == 1


async def test_a_batch_on_rejected_versions_gives_its_samples_back(
    scene: Scene, line: Line
) -> None:
    await scene.policy()
    line.trainer.script = [ApplicationError("rests on", type="StaleBatch", non_retryable=True)]
    await ready_group(scene, "a")
    await line.start_policy()
    await until(lambda: is_version(scene, 1, "live"), "trained by another manifest")
    assert [m.state for m in await scene.manifests()] == ["dropped", "committed"]


async def test_pause_resume_and_one_step_by_hand(scene: Scene, line: Line) -> None:
    await scene.policy(batch_groups=2, max_ahead=1)
    await line.start_policy()
    await until(lambda: phase(line, "waiting"), "waiting")
    await line.policy().signal("pause")
    await until(lambda: phase(line, "paused"), "paused")
    await ready_group(scene, "a")
    await ready_group(scene, "b")
    await asyncio.sleep(0.3)
    assert line.trainer.trained == []
    await line.policy().signal("resume")
    await until(lambda: is_version(scene, 1, "live"), "resumed")
    await ready_group(scene, "c")
    await line.policy().signal("pause")
    await until(lambda: phase(line, "paused"), "paused again")
    await line.policy().signal("step_now")
    await until(lambda: is_version(scene, 2, "live"), "one step with what is there")
    await until(lambda: phase(line, "paused"), "and no more")


async def test_training_waits_where_the_rollout_does_not_follow(scene: Scene, line: Line) -> None:
    await scene.policy(max_ahead=1, max_staleness=3)
    line.trainer.promote = False
    for name in ("a", "b", "c"):
        await ready_group(scene, name)
    await line.start_policy()
    await until(lambda: is_version(scene, 2, "trained"), "two steps past live")
    handle = line.policy()
    await until(lambda: _beat(line, "head 2 is 2 past live 0 (max_ahead 1)"), "the reason")
    await asyncio.sleep(0.3)
    assert len(line.trainer.trained) == 2
    await handle.terminate()


async def _beat(line: Line, reason: str) -> bool:
    """Whether the heartbeat of ``await_batch`` says so."""
    description = await line.policy().describe()
    for pending in description.raw_description.pending_activities:
        details = [json.loads(p.data) for p in pending.heartbeat_details.payloads]
        if details == [reason]:
            return True
    return False


async def test_the_policy_takes_up_what_an_earlier_run_began(scene: Scene, line: Line) -> None:
    """Terminated in the middle of a step, started again: the claim is found and finished once."""
    await scene.policy(max_ahead=2)
    line.trainer.script = [ApplicationError("no", type="NaNLoss", non_retryable=True)]
    await ready_group(scene, "a")
    await line.start_policy()
    manifest = await until(lambda: _manifest(scene, "failed"), "a failed manifest")
    await line.policy().terminate("by the test")
    step = line.client.get_workflow_handle(step_workflow_id(manifest.manifest_id))
    await step.signal("retry")
    await until(lambda: is_version(scene, 1, "trained"), "the step went on without its parent")
    await line.start_policy()
    await until(lambda: is_version(scene, 1, "live"), "rolled out by the new run")
    await ready_group(scene, "b")
    await until(lambda: is_version(scene, 2, "live"), "the next step")
    assert check_database(scene.db.url) == []


async def test_the_policy_continues_as_new_and_stops_after_its_steps(
    scene: Scene, line: Line
) -> None:
    await scene.policy(max_ahead=1, max_staleness=4)
    for name in ("a", "b", "c"):
        await ready_group(scene, name)
    handle = await line.client.start_workflow(
        "PolicyWorkflow",
        PolicyInput(TENANT, scene.policy_id, line.prefix, max_steps=3, max_history=30),
        id=line.policy().id,
        task_queue=main_queue(line.prefix),
        execution_timeout=timedelta(seconds=60),
        result_type=PolicyStatus,
    )
    result = await handle.result()
    assert (result.phase, result.steps, len(result.last_rewards)) == ("finished", 3, 3)
    assert (await line.policy().describe()).run_id != handle.first_execution_run_id
    assert await is_version(scene, 3, "live"), "the last version was rolled out before the end"
    await line.start_policy()
    assert (await line.policy().describe()).status == WorkflowExecutionStatus.COMPLETED
    assert check_database(scene.db.url) == []
