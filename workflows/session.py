"""The life of one session: it waits for its end and its reward, and has it settled.

Invariant: what is decided here is only *when to look*. What is due is worked out by the activity
``settle_session`` from the rows, and it says when to look again; so a wake-up that comes early,
late, twice or out of order does no harm. Rewards that Temporal's own clients send are rows before
they count, whatever form they have.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from archon.records import parse_reward
    from archon.records.messages import (
        ATTR_STATUS,
        RawReward,
        RewardReceipt,
        SessionCounts,
        SessionInput,
        SessionStatus,
        Settled,
        SettleInput,
        Wake,
    )

STATUS = SearchAttributeKey.for_keyword(ATTR_STATUS)
_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=["UnknownSession", "RewardConflict"],
)
_OVER = ("sealed", "unscored", "empty")


@workflow.defn
class SessionWorkflow:
    """From the first call to ``late_window`` seconds after the sealing."""

    @workflow.init
    def __init__(self, input: SessionInput) -> None:
        self._input = input
        self._counts = input.counts or SessionCounts(
            state="closed" if input.closed else "open", wait=input.times.idle_timeout
        )
        self._woken = input.closed or self._counts.woken
        self._close = self._counts.close

    @workflow.run
    async def run(self, input: SessionInput) -> SessionStatus:
        while await self._woken_in_time() or self._counts.state not in _OVER:
            await self._settle()
            await self._continue_as_new_if_long()
        return self.status()

    @workflow.signal
    def wake(self, wake: Wake) -> None:
        """The relay's: something about the session changed in Postgres."""
        self._woken |= wake.what != "session"

    @workflow.signal(dynamic=True)
    async def unplanned(self, name: str, args: Sequence[RawValue]) -> None:
        """``reward`` with whatever was sent as its value: kept, and shown where it cannot count."""
        if name != "reward":
            workflow.logger.warning("signal %s is not known to a session", name)
            return
        try:
            await self._record(_plain(args))
        except ApplicationError as error:
            workflow.logger.error("%s", error)

    @workflow.signal
    def close(self) -> None:
        """End the episode now."""
        self._woken = self._close = True

    @workflow.update
    async def set_reward(self, reward: Any) -> RewardReceipt:
        """The same for clients that want an answer. What cannot count is refused."""
        return await self._record(reward)

    @set_reward.validator
    def check_reward(self, reward: Any) -> None:
        parsed = parse_reward(reward)
        if parsed.rejected:
            raise ApplicationError(
                f"reward refused for session {self._input.session_id}: {parsed.rejected}",
                type="BadReward",
            )

    @workflow.query
    def status(self) -> SessionStatus:
        """What is known here; the rows are the truth."""
        counts = self._counts
        return SessionStatus(
            self._input.session_id, counts.state, counts.rewards, counts.rejected, counts.seals
        )

    async def _woken_in_time(self) -> bool:
        try:
            await workflow.wait_condition(lambda: self._woken, timeout=self._counts.wait)
        except TimeoutError:
            await workflow.wait_condition(workflow.all_handlers_finished)
        return self._woken

    async def _settle(self) -> None:
        """A local activity: one short transaction, and half the cost of one that is dispatched."""
        close, self._woken, self._close = self._close, False, False
        settled = await workflow.execute_local_activity(
            "settle_session",
            SettleInput(self._input.session_id, close),
            start_to_close_timeout=timedelta(seconds=30),
            retry_policy=_RETRY,
            result_type=Settled,
        )
        before = self._counts
        over = settled.state in _OVER
        self._counts = replace(
            before,
            state=settled.state,
            rewards=settled.rewards,
            rejected=settled.rejected,
            seals=before.seals + (settled.revision > 0),
            wait=self._input.times.late_window if over else settled.wait,
        )
        if settled.late:
            workflow.logger.warning("a reward came after the session's samples went into a step")
        if over and settled.state != before.state:
            workflow.upsert_search_attributes([STATUS.value_set(settled.state)])

    async def _record(self, raw: Any) -> RewardReceipt:
        """Make a row of it; its outbox entry wakes this workflow as any other reward does."""
        number = self._counts.raw_rewards
        self._counts = replace(self._counts, raw_rewards=number + 1)
        key = f"{workflow.info().first_execution_run_id}:{number}"
        try:
            return await workflow.execute_activity(
                "record_reward",
                RawReward(self._input.session_id, json.dumps(raw, default=repr), key),
                start_to_close_timeout=timedelta(seconds=10),
                retry_policy=_RETRY,
                result_type=RewardReceipt,
            )
        except ActivityError as error:
            raise ApplicationError(
                f"reward not recorded for session {self._input.session_id}: {error.cause}",
                type="RewardNotRecorded",
            ) from error

    async def _continue_as_new_if_long(self) -> None:
        info, limit = workflow.info(), self._input.max_history
        if not info.is_continue_as_new_suggested() and not (
            limit and info.get_current_history_length() > limit
        ):
            return
        await workflow.wait_condition(workflow.all_handlers_finished)
        counts = replace(self._counts, woken=self._woken, close=self._close)
        workflow.continue_as_new(replace(self._input, closed=False, counts=counts))


def _plain(args: Sequence[RawValue]) -> Any:
    """What was sent, as far as it can be read; what cannot, as text, to be kept and shown."""
    values = []
    for arg in args:
        try:
            values.append(workflow.payload_converter().from_payload(arg.payload))
        except (RuntimeError, ValueError, KeyError):
            values.append(repr(arg.payload.data))
    return values[0] if len(values) == 1 else values or None
