"""The replica keeper: a replica that is not what its row proves is given the live version.

Invariant: a gateway routes only to what was proven. A process that restarted is empty, or is not
the one that was proven; its row loses its version at once and gets it back only after the live
weights are in and their log-probs agree. A rollout that holds the replica's lock is left alone, and
so is a canary that it has proven.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from sqlalchemy.exc import SQLAlchemyError

from activities.proving import PROVEN, Engines, prove
from archon.inference import EngineError, EngineVersions
from archon.records import system_clock
from archon.settings import Settings
from archon.storage import Database, replicas, rollouts
from archon.storage.policies import read_policy
from archon.storage.replicas import Standing

log = logging.getLogger(__name__)

INTERVAL_S = 0.3
_PATIENCE = 2
_BACKOFF_S = 5.0
_SEEN_EVERY_S = 5.0


class Keeper:
    """One pass is :meth:`tend`; any number of keepers may run."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db = db
        self._checks = Engines(settings, silence=2.0, connect=1.0)
        self._loads = Engines(settings)
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._seen_at = 0.0
        self._repairs: dict[str, asyncio.Task[None]] = {}

    async def tend(self) -> None:
        """Look at every replica once. Repairs go on in the background, one per replica."""
        async with self._db.connect() as c:
            found = await replicas.standings(c)
        answers = dict(zip(
            (s.replica.replica_id for s in found),
            await asyncio.gather(*(self._look(s) for s in found)),
            strict=True,
        ))  # fmt: skip
        await self._note_seen(answers)

    async def settle(self) -> None:
        """Wait for the repairs that are under way."""
        await asyncio.gather(*self._repairs.values())

    async def close(self) -> None:
        for task in self._repairs.values():
            task.cancel()
        await self._checks.close()
        await self._loads.close()

    async def _look(self, standing: Standing) -> bool:
        replica = standing.replica
        if (task := self._repairs.get(replica.replica_id)) is not None:
            if not task.done():
                return True
            del self._repairs[replica.replica_id]
            task.result()
        try:
            engine = await self._checks.at(replica.url).versions()
        except EngineError as error:
            await self._failed(standing, error)
            return False
        self._failures.pop(replica.replica_id, None)
        if _is_proven(standing, engine):
            return True
        if engine.instance != replica.instance:
            await self._take_back(standing, f"it is another process, {engine.instance}")
        if time.monotonic() >= self._not_before.get(replica.replica_id, 0.0):
            self._repairs[replica.replica_id] = asyncio.create_task(
                self._repair(replica.replica_id)
            )
        return True

    async def _failed(self, standing: Standing, error: EngineError) -> None:
        """A refused connection is a dead process; silence may be a busy one, once."""
        name = standing.replica.replica_id
        self._failures[name] = self._failures.get(name, 0) + 1
        if isinstance(error.__cause__, ConnectionRefusedError) or self._failures[name] >= _PATIENCE:
            await self._take_back(standing, str(error))

    async def _take_back(self, standing: Standing, why: str) -> None:
        if standing.replica.version is None:
            return
        async with self._db.begin() as c:
            if await replicas.set_unproven(c, standing.replica):
                log.warning("replica %s is out of service: %s", standing.replica.replica_id, why)

    async def _repair(self, replica_id: str) -> None:
        """Under the lock, with everything read again: give the replica what is live."""
        async with self._db.begin() as c:
            if not await replicas.try_lock_replica(c, replica_id):
                return
            for standing in await replicas.standings(c, replica_id):
                replica, live = standing.replica, standing.live
                try:
                    engine = await self._checks.at(replica.url).versions()
                except EngineError:
                    return
                if live is None or _is_proven(standing, engine):
                    return
                version = await rollouts.get_version(c, replica.tenant_id, replica.policy_id, live)
                policy = await read_policy(c, replica.tenant_id, replica.policy_id)
                assert version is not None and policy is not None
                proof = await prove(
                    self._loads.at(replica.url), version, policy.probe_tolerance, rollback=True
                )
                if proof.outcome == PROVEN:
                    await replicas.set_proven(c, replica_id, live, proof.instance, system_clock())
                    log.info("replica %s serves version %d", replica_id, live)
                    return
                log.error("replica %s, version %d: %s", replica_id, live, proof.reason)
                await replicas.set_unproven(c, replica)
                self._not_before[replica_id] = time.monotonic() + _BACKOFF_S

    async def _note_seen(self, answers: Mapping[str, bool]) -> None:
        if time.monotonic() - self._seen_at < _SEEN_EVERY_S:
            return
        self._seen_at = time.monotonic()
        if seen := [name for name, answered in answers.items() if answered]:
            async with self._db.begin() as c:
                await replicas.set_seen(c, seen, system_clock())


def _is_proven(standing: Standing, engine: EngineVersions) -> bool:
    replica = standing.replica
    served = (engine.instance, engine.version)
    return standing.current and served == (replica.instance, replica.version)


async def run_keeper(db: Database, settings: Settings, interval: float = INTERVAL_S) -> None:
    """Tend the replicas until cancelled. A database that is away is waited for."""
    keeper = Keeper(db, settings)
    try:
        while True:
            try:
                await keeper.tend()
            except (SQLAlchemyError, OSError) as error:
                log.warning("the keeper waits for the database: %s", error)
                await asyncio.sleep(1.0)
            await asyncio.sleep(interval)
    finally:
        await keeper.close()
