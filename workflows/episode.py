"""One group of one rollout run: it waits for room, runs its agents, and replaces those it loses.

Invariant: the keys that agents play under never come here. A member ends well once; a run of it
that failed or was lost is out of the group before another begins, and no more than
``max_replacements`` failures of a member are replaced: then the group goes on without it.

The members that are still to be played go to the rollout's process in one activity: an activity for
each would cost Temporal more than the episode costs everyone else.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from archon.records import loads
    from archon.records.messages import (
        EpisodeInput,
        EpisodeResult,
        EpisodeStatus,
        EpisodeWave,
        GroupPlan,
        GroupSize,
        LostMembers,
        MemberResult,
        agents_queue,
        episode_group_id,
    )

_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=10)
)
HOST_SILENT = timedelta(seconds=10)
_HOST_AWAY = timedelta(days=1)
_WAIT_FOR_TURN = timedelta(hours=1)
_MAX_WAVES = 50
_ERRORS_KEPT = 5


@dataclass
class EpisodeState:
    phase: str = "waiting"
    finished: dict[int, MemberResult] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
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
        state = self.state
        if episode.trainable:
            await self._admit()
        state.phase = "playing"
        for wave in range(_MAX_WAVES):
            if not (members := self._to_play()):
                break
            await self._play(wave, members)
        finished = len(state.finished)
        if self.group_id and finished < episode.size:
            await self._do("shrink_group", GroupSize(self.group_id, finished))
        state.phase = "done"
        return EpisodeResult(
            group_id=self.group_id,
            finished=finished,
            failed=episode.size - finished,
            replaced=state.lost - (episode.size - finished),
            rewards=[m.reward for m in state.finished.values() if m.reward is not None],
            errors=state.errors[:_ERRORS_KEPT],
        )

    @workflow.query
    def status(self) -> EpisodeStatus:
        return EpisodeStatus(self.state.phase, len(self.state.finished), self.state.lost)

    def _to_play(self) -> list[int]:
        """Members that did not end well and may have another run."""
        state = self.state
        return [
            number
            for number in range(self.episode.size)
            if number not in state.finished
            and state.failures[number] <= self.episode.max_replacements
        ]

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

    async def _play(self, wave: int, members: list[int]) -> None:
        """Run these members, and take those that were lost out of the group."""
        state = self.state
        try:
            results = await self._run(wave, members)
        except ActivityError as error:
            host_is_gone, results = _host_is_gone(error), _finished_before(error)
            why = f"{error.cause or error}"[:300]
        else:
            host_is_gone, why = False, ""
        state.finished |= {r.member: r for r in results if r.ok}
        errors = {r.member: r.error for r in results if not r.ok}
        lost = [number for number in members if number not in state.finished]
        state.lost += len(lost)
        for number in lost:
            state.errors.append(f"member {number}, wave {wave}: {errors.get(number, why)}")
            state.failures[number] += number in errors or not host_is_gone
        if lost and self.group_id:
            await self._do("lose_members", LostMembers(self.group_id, wave, lost))

    async def _run(self, wave: int, members: list[int]) -> list[MemberResult]:
        e = self.episode
        return await workflow.execute_activity(
            "run_members",
            EpisodeWave(
                run_id=e.run_id,
                index=e.index,
                wave=wave,
                members=members,
                group_id=self.group_id,
                task_id=e.task_id,
                task=e.task,
                timeout=e.episode_timeout,
                trainable=e.trainable,
            ),
            result_type=list[MemberResult],
            task_queue=agents_queue(e.queue_prefix, e.run_id),
            # The rollout's process may be away and come back; it also paces its episodes.
            schedule_to_start_timeout=_HOST_AWAY,
            start_to_close_timeout=timedelta(seconds=e.episode_timeout) + _WAIT_FOR_TURN,
            heartbeat_timeout=HOST_SILENT,
            retry_policy=RetryPolicy(maximum_attempts=1),
        )

    async def _do(self, name: str, argument: LostMembers | GroupSize) -> None:
        await workflow.execute_activity(
            name,
            argument,
            start_to_close_timeout=timedelta(seconds=60),
            retry_policy=_RETRY,
        )


def _host_is_gone(error: ActivityError) -> bool:
    """The agents did not fail: the process that ran them was stopped or killed."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return cause.type == "HostStopped"
    return isinstance(cause, TimeoutError) and cause.type == TimeoutType.HEARTBEAT


def _finished_before(error: ActivityError) -> list[MemberResult]:
    """Members that the host said were finished before it went; what it did not say is lost."""
    cause = error.cause
    told: list[object] = []
    if isinstance(cause, ApplicationError):
        told = list(cause.details)
    elif isinstance(cause, TimeoutError):
        told = list(cause.last_heartbeat_details)
    results = told[0] if told and isinstance(told[0], list) else []
    return [loads(MemberResult, result) for result in results]
