"""The entity of one policy: assemble a batch, train on it, roll the new version out, for ever.

Invariant: it holds no truth. Which batch is claimed, how its step ended, which version is head or
live is asked of Postgres by activities; so it may be started again at any time, and a step's
failure, reset or repetition never ends it. At most one step runs; one rollout, of the newest
version, runs beside it.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributePair, TypedSearchAttributes
from temporalio.common import SearchAttributeKey as Key
from temporalio.exceptions import ActivityError, ChildWorkflowError, WorkflowAlreadyStartedError
from temporalio.workflow import ActivityCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from archon.records.messages import (
        ATTR_POLICY,
        ATTR_TENANT,
        ATTR_VERSION,
        AwaitInput,
        Claimed,
        PolicyInput,
        PolicyKey,
        PolicyStatus,
        RolloutInput,
        RolloutResult,
        StepInput,
        StepNote,
        StepResult,
        rollout_workflow_id,
        step_workflow_id,
        trainer_queue,
    )

CHECK_STEP_SECONDS = 60.0
PATIENCE_SECONDS = 60.0
_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=["UnknownPolicy", "NoSuchPolicy", "UnknownManifest"],
)


@workflow.defn
class PolicyWorkflow:
    """Signals ``pause``, ``resume``, ``step_now``, ``step_finished``; query ``status``."""

    @workflow.init
    def __init__(self, input: PolicyInput) -> None:
        self._state = input
        self._phase, self._reason, self._rollout = "starting", "", ""
        self._head = self._live = -1
        self._step_now = False
        self._told: set[str] = set()

    @workflow.run
    async def run(self, input: PolicyInput) -> PolicyStatus:
        await self._initial_version()
        rollouts = asyncio.create_task(self._roll_out_newest())
        while not 0 < self._state.max_steps <= self._state.steps:
            if rollouts.done():
                rollouts.result()
            if self._state.waiting_manifest:
                await self._train()
            elif self._may_claim():
                await self._claim()
            else:
                self._phase, self._reason = "paused", "paused by signal"
                await workflow.wait_condition(self._may_claim)
            await self._continue_as_new_if_long()
        self._phase, self._reason = "finished", f"{self._state.steps} steps were asked for"
        await workflow.wait_condition(lambda: self._state.rolled >= self._state.to_roll)
        rollouts.cancel()
        return self.status()

    @workflow.signal
    def pause(self) -> None:
        """Start no further step."""
        self._state = replace(self._state, paused=True)

    @workflow.signal
    def resume(self) -> None:
        self._state = replace(self._state, paused=False)

    @workflow.signal
    def step_now(self) -> None:
        """Let one step begin, paused or not, with the groups that are ready, if it is only one."""
        self._step_now = True

    @workflow.signal
    def step_finished(self, result: StepResult) -> None:
        """From whichever run of the step finished. It is a hint: the manifest's row is read.

        The rollout of a new version begins at once, beside that: it looks at the version's row.
        """
        self._told.add(result.manifest_id)
        awaited = result.manifest_id == self._state.waiting_manifest
        if awaited and result.outcome == "committed" and result.version > self._state.to_roll:
            self._state = replace(self._state, to_roll=result.version)

    @workflow.query
    def status(self) -> PolicyStatus:
        return PolicyStatus(
            phase=self._phase,
            reason=self._reason,
            head=self._head,
            live=self._live,
            steps=self._state.steps,
            manifest=self._state.waiting_manifest,
            last_rewards=self._state.last_rewards,
            rollout=self._rollout,
        )

    def _may_claim(self) -> bool:
        return self._step_now or not self._state.paused

    async def _initial_version(self) -> None:
        await workflow.execute_activity(
            "ensure_initial_version",
            self._key(),
            task_queue=trainer_queue(self._state.queue_prefix),
            start_to_close_timeout=timedelta(minutes=30),
            heartbeat_timeout=timedelta(seconds=10),
            retry_policy=_RETRY,
        )

    async def _claim(self) -> None:
        """One turn of waiting for a batch. An interrupted claim is found again by the next one.

        The first turn of a run is short, to learn which version is head and which is live.
        """
        self._phase = "waiting"
        ask = AwaitInput(
            self._state.tenant_id,
            self._state.policy_id,
            at_least=1 if self._step_now else 0,
            patience=PATIENCE_SECONDS if self._head >= 0 else 0.0,
        )
        waiting = workflow.start_activity(
            "await_batch",
            ask,
            start_to_close_timeout=timedelta(hours=1),
            heartbeat_timeout=timedelta(seconds=5),
            retry_policy=_RETRY,
            cancellation_type=ActivityCancellationType.TRY_CANCEL,
            result_type=Claimed,
        )
        hurry = self._step_now
        await workflow.wait_condition(
            lambda: waiting.done() or not self._may_claim() or self._step_now != hurry
        )
        if waiting.done():
            self._learn(await waiting)
            return
        waiting.cancel()
        try:
            self._learn(await waiting)
        except (ActivityError, asyncio.CancelledError):
            workflow.logger.info("stopped waiting for a batch")

    def _learn(self, claimed: Claimed) -> None:
        self._reason, self._head, self._live = claimed.reason, claimed.head, claimed.live
        if claimed.head > claimed.live and claimed.head > self._state.to_roll:
            self._state = replace(self._state, to_roll=claimed.head)
        if claimed.manifest_id:
            self._step_now = False
            self._state = replace(
                self._state,
                waiting_manifest=claimed.manifest_id,
                step_timeout=claimed.step_timeout,
            )

    async def _train(self) -> None:
        """Start the step where it does not run yet, and wait until its row says how it ended."""
        manifest = self._state.waiting_manifest
        self._phase, self._reason = "training", f"step {manifest}"
        await self._start_step(manifest)
        try:
            await workflow.wait_condition(
                lambda: manifest in self._told, timeout=CHECK_STEP_SECONDS
            )
        except TimeoutError:
            pass
        result: StepResult = await workflow.execute_activity(
            "read_step",
            StepNote(manifest),
            start_to_close_timeout=timedelta(seconds=30),
            heartbeat_timeout=timedelta(seconds=5),
            retry_policy=_RETRY,
            result_type=StepResult,
        )
        self._told.clear()
        if result.outcome in ("running", "failed"):
            self._reason = f"step {manifest} is {result.outcome} {result.reason}".strip()
            return
        state = replace(self._state, waiting_manifest="")
        if result.outcome == "committed":
            rewards = [*state.last_rewards, result.reward_mean or 0.0][-20:]
            self._head = result.version
            state = replace(
                state,
                steps=state.steps + 1,
                to_roll=max(state.to_roll, result.version),
                last_rewards=tuple(rewards),
            )
        self._state = state

    async def _start_step(self, manifest: str) -> None:
        state = self._state
        step = StepInput(
            state.tenant_id, state.policy_id, manifest, state.queue_prefix, state.step_timeout
        )
        try:
            child = await workflow.start_child_workflow(
                "TrainingStepWorkflow",
                step,
                id=step_workflow_id(manifest),
                parent_close_policy=ParentClosePolicy.ABANDON,
                search_attributes=self._attributes(),
            )
        except WorkflowAlreadyStartedError:
            return
        # Its end is learned from the row, of whichever run: this handle's result is not asked for.
        child.add_done_callback(_forget)

    async def _roll_out_newest(self) -> None:
        while True:
            await workflow.wait_condition(lambda: self._state.to_roll > self._state.rolled)
            version = self._state.to_roll
            self._rollout = f"version {version} is being rolled out"
            try:
                await self._roll_out(version)
            except ChildWorkflowError as error:
                self._rollout = f"rollout of version {version} failed: {error.cause}"
                await workflow.sleep(5)
                continue
            self._state = replace(self._state, rolled=max(self._state.rolled, version))

    async def _roll_out(self, version: int) -> None:
        state = self._state
        try:
            result: RolloutResult = await workflow.execute_child_workflow(
                "WeightRolloutWorkflow",
                RolloutInput(state.tenant_id, state.policy_id, version, state.queue_prefix),
                id=rollout_workflow_id(state.tenant_id, state.policy_id, version),
                parent_close_policy=ParentClosePolicy.ABANDON,
                search_attributes=self._attributes(version),
                result_type=RolloutResult,
            )
        except WorkflowAlreadyStartedError:
            self._rollout = f"version {version} is being rolled out by an earlier run"
            return
        self._rollout = f"version {version} {result.decision} {'; '.join(result.reasons)}".strip()
        if result.decision == "promoted":
            self._live = version

    async def _continue_as_new_if_long(self) -> None:
        info, limit = workflow.info(), self._state.max_history
        length = info.get_current_history_length()
        if not info.is_continue_as_new_suggested() and not (limit and length > limit):
            return
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(self._state)

    def _key(self) -> PolicyKey:
        return PolicyKey(self._state.tenant_id, self._state.policy_id)

    def _attributes(self, version: int | None = None) -> TypedSearchAttributes:
        pairs: list[SearchAttributePair[Any]] = [
            SearchAttributePair(Key.for_keyword(ATTR_TENANT), self._state.tenant_id),
            SearchAttributePair(Key.for_keyword(ATTR_POLICY), self._state.policy_id),
        ]
        if version is not None:
            pairs.append(SearchAttributePair(Key.for_int(ATTR_VERSION), version))
        return TypedSearchAttributes(pairs)


def _forget(child: "asyncio.Task[Any]") -> None:
    """Take the outcome of a child, so that nobody is warned that it was never looked at."""
    if not child.cancelled():
        child.exception()
