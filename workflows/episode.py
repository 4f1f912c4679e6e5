"""One group of one rollout run: it waits for room, runs its agents, and replaces those it loses.

Invariant: the keys that agents play under never come here. A member ends well once; a run of it
that failed or was lost is out of the group before another begins, and no more than
``max_replacements`` failures of a member are replaced: then the group goes on without it.
"""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from archon.records.messages import (
        EpisodeInput,
        EpisodeMember,
        EpisodeResult,
        EpisodeStatus,
        GroupPlan,
        GroupSize,
        LostMember,
        MemberResult,
        agents_queue,
        episode_group_id,
    )

_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=10)
)
_HOST_AWAY = timedelta(days=1)
_WAIT_FOR_TURN = timedelta(hours=1)
_MAX_LOST_HOSTS = 20
_ERRORS_KEPT = 5


@dataclass
class EpisodeState:
    phase: str = "waiting"
    finished: list[MemberResult] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lost: int = 0


@workflow.defn
class EpisodeWorkflow:
    @workflow.init
    def __init__(self, episode: EpisodeInput) -> None:
        self.episode = episode
        self.state = EpisodeState()
        self.group_id = ""

    @workflow.run
    async def run(self, episode: EpisodeInput) -> EpisodeResult:
        if episode.trainable:
            await self._admit()
        self.state.phase = "playing"
        await asyncio.gather(*(self._member(number) for number in range(episode.size)))
        finished = len(self.state.finished)
        if self.group_id and finished < episode.size:
            await self._do("shrink_group", GroupSize(self.group_id, finished))
        self.state.phase = "done"
        return EpisodeResult(
            group_id=self.group_id,
            finished=finished,
            failed=episode.size - finished,
            replaced=self.state.lost - (episode.size - finished),
            rewards=[m.reward for m in self.state.finished if m.reward is not None],
            errors=self.state.errors[:_ERRORS_KEPT],
        )

    @workflow.query
    def status(self) -> EpisodeStatus:
        return EpisodeStatus(self.state.phase, len(self.state.finished), self.state.lost)

    async def _admit(self) -> None:
        e = self.episode
        self.group_id = episode_group_id(e.tenant_id, e.policy_id, e.run_id, e.index)
        await workflow.execute_activity(
            "admit_group",
            GroupPlan(e.tenant_id, e.policy_id, self.group_id, e.task_id, e.size),
            start_to_close_timeout=timedelta(days=7),
            heartbeat_timeout=timedelta(seconds=15),
            retry_policy=_RETRY,
        )

    async def _member(self, number: int) -> None:
        """Run one member until it ends well or must be given up."""
        attempt = failures = hosts = 0
        while failures <= self.episode.max_replacements and hosts <= _MAX_LOST_HOSTS:
            try:
                result = await self._run(number, attempt)
            except ActivityError as error:
                result = MemberResult("", False, error=f"{error.cause or error}"[:300])
                gone = _host_is_gone(error)
                hosts, failures = hosts + gone, failures + (not gone)
            else:
                failures += not result.ok
            if result.ok:
                self.state.finished.append(result)
                return
            self.state.lost += 1
            self.state.errors.append(f"member {number}, attempt {attempt}: {result.error}")
            if self.group_id:
                await self._do("lose_member", LostMember(self.group_id, number, attempt))
            attempt += 1

    async def _run(self, number: int, attempt: int) -> MemberResult:
        e = self.episode
        return await workflow.execute_activity(
            "run_member",
            EpisodeMember(
                run_id=e.run_id,
                index=e.index,
                member=number,
                attempt=attempt,
                group_id=self.group_id,
                task_id=e.task_id,
                task=e.task,
                size=e.size,
                timeout=e.episode_timeout,
                trainable=e.trainable,
            ),
            result_type=MemberResult,
            task_queue=agents_queue(e.queue_prefix, e.run_id),
            # The rollout's process may be away and come back; it also paces its episodes.
            schedule_to_start_timeout=_HOST_AWAY,
            start_to_close_timeout=timedelta(seconds=e.episode_timeout) + _WAIT_FOR_TURN,
            heartbeat_timeout=timedelta(seconds=15),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )

    async def _do(self, name: str, argument: LostMember | GroupSize) -> None:
        await workflow.execute_activity(
            name,
            argument,
            start_to_close_timeout=timedelta(seconds=60),
            retry_policy=_RETRY,
        )


def _host_is_gone(error: ActivityError) -> bool:
    """The agent did not fail: the process that ran it was stopped or killed."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return cause.type == "HostStopped"
    return isinstance(cause, TimeoutError) and cause.type == TimeoutType.HEARTBEAT
