"""The outbox relay: tells Temporal what the gateway acknowledged.

Invariant: an entry is marked only after its signal was accepted, and a session's entries go out in
order, because there is one relay at a time and it sends one signal per session and round. While
Temporal or PostgreSQL is away it waits, and nothing is lost.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from datetime import datetime, timedelta
from typing import Literal

import psycopg
from temporalio.client import Client
from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from archon.failpoints import failpoint
from archon.records import Clock, system_clock
from archon.records.messages import (
    ATTR_POLICY,
    ATTR_SESSION,
    ATTR_STATUS,
    ATTR_TENANT,
    SessionInput,
    main_queue,
    session_workflow_id,
)
from archon.storage import OUTBOX_CHANNEL, Database, Listener
from archon.storage.direct import DirectPool
from archon.storage.outbox_relay import START_HOLD, News, mark_sent, next_due, relay_lock, unsent

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
MIN_PAUSE_SECONDS = 0.02
# When more sessions begin in a second, their starts are held.
MANY_STARTS = 5
AT_ONCE = 16
MAX_PAUSE_SECONDS = 2.0
# What says nothing about the session: the next round tries again.
_AWAY = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.RESOURCE_EXHAUSTED,
)


class TemporalAway(Exception):
    """Temporal does not take signals at present."""


class Relay:
    def __init__(
        self, client: Client, db: Database, queue_prefix: str, clock: Clock = system_clock
    ) -> None:
        self._client, self._db, self._queue = client, db, main_queue(queue_prefix)
        self._clock = clock
        self._pool = DirectPool(db.url, 1)
        self._began: deque[datetime] = deque(maxlen=MANY_STARTS)
        self._refused: dict[str, tuple[float, int]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Relay until cancelled."""
        failures = 0
        while True:
            try:
                async with (
                    relay_lock(self._db.url, POLL_SECONDS),
                    Listener(self._db.url, OUTBOX_CHANNEL) as listener,
                ):
                    while True:
                        while await self.relay_once():
                            failures = 0
                        await listener.wait(await self._pause())
            except (TemporalAway, psycopg.Error, OSError) as error:
                failures += 1
                await self._pool.forget()
                pause = min(0.1 * 2.0 ** min(failures, 10), MAX_PAUSE_SECONDS)
                log.warning("relay waits %.1f s: %s", pause, str(error).splitlines()[0])
                await asyncio.sleep(pause)

    async def _pause(self) -> float:
        """Until something that is held is due; for news there is a notification."""
        now = self._clock()
        async with self._pool.connect() as c:
            due = await next_due(c, now, self._hold(now))
        if due is None:
            return POLL_SECONDS
        return min(max((due - now).total_seconds(), MIN_PAUSE_SECONDS), POLL_SECONDS)

    async def relay_once(self) -> int:
        """One round; returns how many sessions were told."""
        now = self._clock()
        skip = [name for name, (until, _) in self._refused.items() if until > time.monotonic()]
        async with self._pool.connect() as c:
            news = await unsent(c, now, hold=self._hold(now), skip=skip)
        if not news:
            return 0
        outcomes = await asyncio.gather(*(self._tell(item) for item in news))
        told = [item for item, outcome in zip(news, outcomes, strict=True) if outcome == "told"]
        self._began.extend(item.began for item in told if item.began)
        if told:
            failpoint("relay.after_signal")
            async with self._pool.connect() as c:
                await mark_sent(c, [i for item in told for i in item.outbox_ids], self._clock())
        if away := outcomes.count("away"):
            raise TemporalAway(f"{away} of {len(news)} signals were not taken")
        return len(told)

    def _hold(self, now: datetime) -> timedelta:
        """How long a start waits: not at all while starts are few, so that a person sees them."""
        if len(self._began) < MANY_STARTS or self._began[-1] < now - 2 * START_HOLD:
            return timedelta(0)
        many = self._began[-1] - self._began[0] < timedelta(seconds=1)
        return START_HOLD if many else timedelta(0)

    async def _tell(self, item: News) -> Literal["told", "away", "refused"]:
        try:
            async with self._slots:
                await self._start(item)
        except RPCError as error:
            if error.status in _AWAY:
                return "away"
            self._refuse(item, error)
            return "refused"
        self._refused.pop(item.session_id, None)
        return "told"

    async def _start(self, item: News) -> None:
        """Signal the session's workflow, which is started if it does not run."""
        input = SessionInput(
            item.session_id, item.tenant_id, item.policy_id, item.times, item.closed
        )
        begin = functools.partial(
            self._client.start_workflow,
            "SessionWorkflow",
            input,
            id=session_workflow_id(item.session_id),
            task_queue=self._queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=_attributes(item),
        )
        if item.wake.what != "session":
            await begin(start_signal="wake", start_signal_args=[item.wake])
            return
        try:
            await begin()
        except WorkflowAlreadyStartedError:
            return

    def _refuse(self, item: News, error: RPCError) -> None:
        """This session's signal is not wanted; it must not keep the others waiting."""
        _, times = self._refused.get(item.session_id, (0.0, 0))
        pause = min(2.0**times, 300.0)
        self._refused[item.session_id] = (time.monotonic() + pause, times + 1)
        log.error("session %s: signal refused, again in %.0f s: %s", item.session_id, pause, error)


def _attributes(item: News) -> TypedSearchAttributes:
    state = "closed" if item.closed else "open"
    values = {
        ATTR_TENANT: item.tenant_id,
        ATTR_POLICY: item.policy_id,
        ATTR_SESSION: item.session_id,
        ATTR_STATUS: state,
    }
    return TypedSearchAttributes(
        [
            SearchAttributePair(SearchAttributeKey.for_keyword(name), value)
            for name, value in values.items()
        ]
    )


async def run_relay(client: Client, db: Database, queue_prefix: str) -> None:
    """Relay until cancelled."""
    await Relay(client, db, queue_prefix).run()
