"""Weights into replicas, one after the other, and the decision about a version.

Invariant: a replica's row names a version only once this module has proven that it serves it, under
the replica's lock; a version becomes live only by :meth:`RolloutActivities.promote`.
"""

import asyncio
import logging
import time

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beats import heartbeats
from activities.proving import MISMATCH, PROVEN, UNREACHABLE, Engines, Proof, prove
from archon.failpoints import failpoint
from archon.records import PolicyVersion, Replica, system_clock
from archon.records.messages import (
    PolicyKey,
    ProbeResult,
    ReplicaUpdate,
    RolloutResult,
    RolloutVerdict,
)
from archon.settings import Settings
from archon.storage import Database, replicas, rollouts
from archon.storage.policies import read_policy

log = logging.getLogger(__name__)


class RolloutActivities:
    """All are idempotent: a version in a replica, and a decision, are the same the second time."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db, self._engines = db, Engines(settings)

    async def close(self) -> None:
        await self._engines.close()

    @activity.defn
    async def list_replicas(self, key: PolicyKey) -> list[str]:
        """Ids, those that serve first: the first that answers is the canary."""
        async with self._db.connect() as c:
            found = await replicas.list_replicas(c, key.tenant_id, key.policy_id)
        return [r.replica_id for r in found]

    @activity.defn
    async def update_replica(self, update: ReplicaUpdate) -> ProbeResult:
        """Give a replica a version and prove it; its row says so only if that worked."""
        started = time.perf_counter()
        async with heartbeats(), self._db.begin() as c:
            await replicas.lock_replica(c, update.replica_id)
            replica = await replicas.get_replica(c, update.replica_id)
            version = await _version(c, update.tenant_id, update.policy_id, update.version)
            if replica is None:
                proof = Proof(UNREACHABLE, reason=f"there is no replica {update.replica_id}")
            elif superseded := await _superseded(c, version):
                proof = Proof("superseded", reason=superseded)
            else:
                await rollouts.mark_canary(c, version)
                proof = await self._prove(c, replica, version)
        return ProbeResult(
            update.replica_id,
            proof.outcome == PROVEN,
            min(proof.difference, 1e9),
            time.perf_counter() - started,
            proof.reason,
            proof.outcome,
        )

    @activity.defn
    async def promote(self, verdict: RolloutVerdict) -> RolloutResult:
        """Make the version live, unless a newer one is or it was rejected meanwhile."""
        failpoint("rollout.before_promote")
        async with self._db.begin() as c:
            decision = await rollouts.promote(
                c, verdict.tenant_id, verdict.policy_id, verdict.version, verdict.reasons,
                verdict.probes, system_clock(),
            )  # fmt: skip
        return RolloutResult(verdict.version, decision, verdict.reasons)

    @activity.defn
    async def reject(self, verdict: RolloutVerdict) -> RolloutResult:
        """Reject the version and its descendants, and take replicas back to what is live."""
        async with heartbeats():
            async with self._db.begin() as c:
                fallen = await rollouts.reject(
                    c, verdict.tenant_id, verdict.policy_id, verdict.version, verdict.reasons,
                    verdict.probes, system_clock(),
                )  # fmt: skip
            log.warning("rejected versions %s: %s", fallen.versions, "; ".join(verdict.reasons))
            if fallen.restore is not None:
                await self._restore(verdict, fallen.restore)
        reasons = [*verdict.reasons, f"{fallen.samples} samples dropped"]
        return RolloutResult(verdict.version, "rejected", reasons)

    async def _restore(self, verdict: RolloutVerdict, live: int) -> None:
        async with self._db.connect() as c:
            version = await _version(c, verdict.tenant_id, verdict.policy_id, live)
            found = await replicas.list_replicas(c, verdict.tenant_id, verdict.policy_id)
        await asyncio.gather(*(self._take_back(r.replica_id, version) for r in found))

    async def _take_back(self, replica_id: str, version: PolicyVersion) -> None:
        """A replica that cannot be reached now is the keeper's."""
        async with self._db.begin() as c:
            await replicas.lock_replica(c, replica_id)
            replica = await replicas.get_replica(c, replica_id)
            if replica is not None and replica.version != version.version:
                await self._prove(c, replica, version, rollback=True)

    async def _prove(
        self, c: AsyncConnection, replica: Replica, version: PolicyVersion, rollback: bool = False
    ) -> Proof:
        policy = await read_policy(c, version.tenant_id, version.policy_id)
        assert policy is not None, "a version has a policy"
        client = self._engines.at(replica.url)
        proof = await prove(client, version, policy.probe_tolerance, rollback)
        failpoint("rollout.after_update")
        if proof.outcome == PROVEN:
            await replicas.set_proven(
                c, replica.replica_id, version.version, proof.instance, system_clock()
            )
        else:
            log.warning("replica %s, version %d: %s", replica.replica_id, version.version, proof)
            if proof.outcome == MISMATCH:
                await replicas.set_unproven(c, replica)
        return proof


async def _version(
    c: AsyncConnection, tenant_id: str, policy_id: str, version: int
) -> PolicyVersion:
    found = await rollouts.get_version(c, tenant_id, policy_id, version)
    if found is None:
        raise ApplicationError(
            f"policy {tenant_id}/{policy_id} has no version {version}",
            type="NoSuchVersion",
            non_retryable=True,
        )
    return found


async def _superseded(c: AsyncConnection, version: PolicyVersion) -> str:
    """Why this version need not be rolled out any more; empty if it must."""
    if version.state.value in rollouts.REJECTED:
        return f"version {version.version} is {version.state.value}"
    newest = await rollouts.newest_version(c, version.tenant_id, version.policy_id)
    if newest is not None and newest > version.version:
        return f"version {newest} is newer"
    return ""
