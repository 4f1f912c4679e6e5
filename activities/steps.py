"""What a policy and its steps ask for: a batch, a commit, and the end of what failed.

Invariant: each is one transaction that names the state that it expects, so that a repeated or a
late attempt changes nothing and returns what is true.
"""

import asyncio
from collections.abc import Awaitable, Callable

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.beats import heartbeats
from archon.failpoints import failpoint
from archon.records import Clock, IdSource, random_id, system_clock
from archon.records.messages import AwaitInput, Claimed, StepNote, StepResult, Trained
from archon.storage import READY_CHANNEL, Database, Listener
from archon.storage.claims import claim
from archon.storage.versions import (
    UnknownManifest,
    UnknownPolicy,
    commit,
    drop,
    fail,
    read_manifest,
    release,
    retry,
    step_result,
)

POLL_SECONDS = 2.0
BEAT_SECONDS = 1.0


class StepActivities:
    def __init__(
        self, db: Database, clock: Clock = system_clock, new_id: IdSource = random_id
    ) -> None:
        self._db, self._clock, self._new_id = db, clock, new_id

    @activity.defn
    async def await_batch(self, ask: AwaitInput) -> Claimed:
        """Wait until a batch can be claimed, saying in the heartbeats why it cannot yet."""
        loop = asyncio.get_running_loop()
        until = loop.time() + ask.patience
        mine = f"{ask.tenant_id}/{ask.policy_id}"
        async with Listener(self._db.url, READY_CHANNEL) as listener:
            while True:
                claimed = await self._claim(ask)
                if claimed.manifest_id or loop.time() >= until:
                    return claimed
                look = min(loop.time() + POLL_SECONDS, until)
                while (left := look - loop.time()) > 0:
                    activity.heartbeat(claimed.reason)
                    if mine in await listener.wait(min(left, BEAT_SECONDS)):
                        break

    async def _claim(self, ask: AwaitInput) -> Claimed:
        try:
            async with self._db.begin() as c:
                claimed = await claim(
                    c,
                    ask.tenant_id,
                    ask.policy_id,
                    at_least=ask.at_least,
                    now=self._clock(),
                    new_id=self._new_id,
                )
                if claimed.manifest_id:
                    failpoint("claim.before_commit")
        except UnknownPolicy as error:
            raise _final(error) from error
        if claimed.manifest_id:
            failpoint("claim.after_commit")
        return claimed

    @activity.defn
    async def commit_step(self, trained: Trained) -> StepResult:
        """Make the checkpoint the policy's next version."""

        async def work(c: AsyncConnection) -> StepResult:
            result = await commit(c, trained, self._clock())
            failpoint("commit.before_commit")
            return result

        result = await self._change(work)
        failpoint("commit.after_commit")
        return result

    @activity.defn
    async def fail_step(self, note: StepNote) -> StepResult:
        """Keep the step's samples bound until a person says what to do."""
        return await self._change(lambda c: fail(c, note.manifest_id, note.reason))

    @activity.defn
    async def retry_step(self, note: StepNote) -> StepResult:
        """Take the same manifest up again."""
        return await self._change(lambda c: retry(c, note.manifest_id))

    @activity.defn
    async def drop_step(self, note: StepNote) -> StepResult:
        """End the step without a version; its samples are dropped and counted."""
        return await self._change(lambda c: drop(c, note.manifest_id, note.reason, self._clock()))

    @activity.defn
    async def release_step(self, note: StepNote) -> StepResult:
        """End the step without a version; its samples are free again."""
        return await self._change(
            lambda c: release(c, note.manifest_id, note.reason, self._clock())
        )

    @activity.defn
    async def read_step(self, note: StepNote) -> StepResult:
        """What the manifest's row says."""

        async def work(c: AsyncConnection) -> StepResult:
            row = await read_manifest(c, note.manifest_id)
            if row is None:
                raise UnknownManifest(f"there is no manifest {note.manifest_id}")
            return await step_result(c, row)

        return await self._change(work)

    async def _change(self, work: Callable[[AsyncConnection], Awaitable[StepResult]]) -> StepResult:
        try:
            async with heartbeats(every=BEAT_SECONDS), self._db.begin() as c:
                return await work(c)
        except UnknownManifest as error:
            raise _final(error) from error


def _final(error: ValueError) -> ApplicationError:
    return ApplicationError(str(error), type=type(error).__name__, non_retryable=True)
