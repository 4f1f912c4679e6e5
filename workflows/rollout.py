"""One version into the replicas: a canary, the gate, the rest one at a time, the promotion.

Invariant: a version is promoted only when at least one replica was proven to serve it and every
other one was proven, is left out of service, or is down; the keeper brings those to what is live.
"""

from dataclasses import dataclass, field
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from archon.records.messages import (
        PolicyKey,
        ProbeResult,
        ReplicaUpdate,
        RolloutInput,
        RolloutResult,
        RolloutStatus,
        RolloutVerdict,
        main_queue,
    )

_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=0.2),
    maximum_interval=timedelta(seconds=5),
    non_retryable_error_types=["NoSuchVersion"],
)
_LOAD_TIMEOUT = timedelta(hours=1)
_PAUSE = (1.0, 2.0, 5.0)


@dataclass
class RolloutState:
    phase: str = "canary"
    attempts: int = 0
    probes: list[ProbeResult] = field(default_factory=list)


@workflow.defn
class WeightRolloutWorkflow:
    @workflow.init
    def __init__(self, rollout: RolloutInput) -> None:
        self.rollout = rollout
        self.state = RolloutState()

    @workflow.run
    async def run(self, rollout: RolloutInput) -> RolloutResult:
        while True:
            self.state.attempts += 1
            if (result := await self._round()) is not None:
                self.state.phase = "decided"
                return result
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(rollout)
            self.state.phase = "waiting"
            await workflow.sleep(_PAUSE[min(self.state.attempts, len(_PAUSE)) - 1])

    @workflow.query
    def status(self) -> RolloutStatus:
        return RolloutStatus(
            self.rollout.version, self.state.phase, self.state.probes, self.state.attempts
        )

    async def _round(self) -> RolloutResult | None:
        """Offer the version to each replica; None when none of them answered."""
        self.state.phase, self.state.probes = "canary", []
        proven = False
        for replica_id in await self._replicas():
            probe = await self._update(replica_id)
            self.state.probes.append(probe)
            if probe.outcome == "superseded":
                return RolloutResult(self.rollout.version, "superseded", [probe.reason])
            if probe.outcome == "mismatch" and not proven:
                return await self._decide("reject", [f"canary {replica_id}: {probe.reason}"])
            if probe.ok:
                proven, self.state.phase = True, "rest"
        return await self._decide("promote", self._reasons()) if proven else None

    def _reasons(self) -> list[str]:
        proven = sum(p.ok for p in self.state.probes)
        left_out = [f"{p.replica_id} left out: {p.reason}" for p in self.state.probes if not p.ok]
        return [f"proven on {proven} of {len(self.state.probes)} replicas", *left_out]

    async def _replicas(self) -> list[str]:
        key = PolicyKey(self.rollout.tenant_id, self.rollout.policy_id)
        return await workflow.execute_local_activity(
            "list_replicas",
            key,
            result_type=list[str],
            start_to_close_timeout=timedelta(seconds=10),
            retry_policy=_RETRY,
        )

    async def _update(self, replica_id: str) -> ProbeResult:
        r = self.rollout
        return await workflow.execute_activity(
            "update_replica",
            ReplicaUpdate(r.tenant_id, r.policy_id, replica_id, r.version),
            result_type=ProbeResult,
            task_queue=main_queue(r.queue_prefix),
            start_to_close_timeout=_LOAD_TIMEOUT,
            heartbeat_timeout=timedelta(seconds=5),
            retry_policy=_RETRY,
        )

    async def _decide(self, activity: str, reasons: list[str]) -> RolloutResult:
        r = self.rollout
        return await workflow.execute_activity(
            activity,
            RolloutVerdict(r.tenant_id, r.policy_id, r.version, reasons, self.state.probes),
            result_type=RolloutResult,
            task_queue=main_queue(r.queue_prefix),
            start_to_close_timeout=_LOAD_TIMEOUT,
            heartbeat_timeout=timedelta(seconds=5),
            retry_policy=_RETRY,
        )
