"""One training step: train, commit, tell the policy; wait for a person when that cannot go on.

Invariant: this workflow never fails because of a step. A worker's death is retried for ever on the
same manifest; an error that no retry mends sets the manifest ``failed`` and the search attribute
``Attention``, and the signal ``retry`` or ``drop`` ends the wait. The manifest's row is the truth.
"""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError

with workflow.unsafe.imports_passed_through():
    from archon.records.messages import (
        ATTR_ATTENTION,
        ATTR_VERSION,
        StepInput,
        StepNote,
        StepResult,
        Trained,
        policy_workflow_id,
        trainer_queue,
    )

ATTENTION = SearchAttributeKey.for_keyword(ATTR_ATTENTION)
VERSION = SearchAttributeKey.for_int(ATTR_VERSION)
FAILED_STEP, EMPTY_SIGNAL = "failed_step", "empty_signal"
_TRAIN_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=["BadManifest", "BadBatch", "StaleBatch", "ManifestNotClaimed"],
)
_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=["UnknownManifest"],
)


@workflow.defn
class TrainingStepWorkflow:
    """One manifest. A reset run, or one started again, finds in the row what is done."""

    @workflow.init
    def __init__(self, input: StepInput) -> None:
        self._input = input
        self._verdict = ""

    @workflow.run
    async def run(self, input: StepInput) -> StepResult:
        while True:
            try:
                result = await self._attempt()
            except ActivityError as error:
                if isinstance(error.cause, CancelledError):
                    raise
                result = await self._wait_for_a_person(error)
            if result.outcome not in ("running", "failed"):
                break
        if result.version >= 0:
            workflow.upsert_search_attributes([VERSION.value_set(result.version)])
        elif result.outcome == EMPTY_SIGNAL:
            workflow.upsert_search_attributes([ATTENTION.value_set(EMPTY_SIGNAL)])
        await self._tell(result)
        return result

    @workflow.signal
    def retry(self) -> None:
        """Train the same manifest again."""
        self._verdict = "retry"

    @workflow.signal
    def drop(self) -> None:
        """Give the step up, and its samples with it."""
        self._verdict = "drop"

    @workflow.query
    def waiting(self) -> bool:
        """Whether a person is asked for ``retry`` or ``drop``."""
        return self._verdict == "?"

    async def _attempt(self) -> StepResult:
        trained = await workflow.execute_activity(
            "train_step",
            self._input,
            task_queue=trainer_queue(self._input.queue_prefix),
            start_to_close_timeout=timedelta(seconds=self._input.step_timeout),
            heartbeat_timeout=timedelta(seconds=5),
            retry_policy=_TRAIN_RETRY,
            result_type=Trained,
        )
        if trained.outcome == "trained":
            return await self._do("commit_step", trained)
        reason = trained.reason
        if trained.outcome == EMPTY_SIGNAL:
            reason = f"{EMPTY_SIGNAL}: {reason}" if reason else EMPTY_SIGNAL
        return await self._do("drop_step", StepNote(trained.manifest_id, reason or trained.outcome))

    async def _wait_for_a_person(self, error: ActivityError) -> StepResult:
        cause = error.cause
        kind = cause.type if isinstance(cause, ApplicationError) and cause.type else "Error"
        note = StepNote(self._input.manifest_id, f"{kind}: {cause}"[:2000])
        if kind == "StaleBatch":
            return await self._do("release_step", note)
        if kind == "ManifestNotClaimed":  # an earlier run failed it, and this one was reset
            return await self._do("retry_step", note)
        result = await self._do("fail_step", note)
        if result.outcome != "failed":
            return result
        self._verdict = "?"
        workflow.upsert_search_attributes([ATTENTION.value_set(FAILED_STEP)])
        await workflow.wait_condition(lambda: self._verdict in ("retry", "drop"))
        workflow.upsert_search_attributes([ATTENTION.value_unset()])
        return await self._do(f"{self._verdict}_step", note)

    async def _do(self, activity: str, arg: StepNote | Trained) -> StepResult:
        return await workflow.execute_activity(
            activity,
            arg,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=5),
            retry_policy=_RETRY,
            result_type=StepResult,
        )

    async def _tell(self, result: StepResult) -> None:
        name = policy_workflow_id(self._input.tenant_id, self._input.policy_id)
        try:
            await workflow.get_external_workflow_handle(name).signal("step_finished", result)
        except ApplicationError as error:
            workflow.logger.warning("%s is not there to be told: it reads the row: %s", name, error)
