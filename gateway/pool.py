"""The engine replicas of each policy, and which of them a session's next call goes to.

Invariant: a call goes only to a replica of its policy that was proven to serve a version. A
session keeps its replica for as long as that one lives, so its prefix stays in one cache.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa

from archon.inference import EngineClient, EngineError
from archon.storage.direct import Direct
from gateway.errors import ApiError, unavailable
from gateway.rows import Rows

log = logging.getLogger("archon.gateway")
POLL = 0.75
IMPATIENT_POLL = 0.1
PROBE_FIRST, PROBE_LAST = 0.1, 1.0
REMEMBERED_SESSIONS = 20_000

_READ = sa.text(
    "SELECT replica_id, tenant_id, policy_id, url, version, instance FROM replica"
    " WHERE version IS NOT NULL"
)
Policy = tuple[str, str]


@dataclass(eq=False)
class Member:
    """One replica as the table has it. ``alive`` is this process's own view."""

    replica_id: str
    policy: Policy
    url: str
    version: int
    instance: str
    client: EngineClient
    alive: bool = True
    probe: "asyncio.Task[None] | None" = None


@dataclass
class ReplicaPool:
    rows: Rows
    token: Callable[[], str | None]
    members: dict[str, Member] = field(default_factory=dict)
    _home: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Follow the table until cancelled: at leisure, or at once where a call waits."""
        while True:
            try:
                await self.refresh()
            except ApiError as error:
                log.warning("replicas are not read: %s", error.message)
            await asyncio.sleep(IMPATIENT_POLL)
            try:
                await asyncio.wait_for(self._wanted.wait(), POLL - IMPATIENT_POLL)
            except TimeoutError:
                pass
            self._wanted.clear()

    async def refresh(self) -> None:
        async def read(c: Direct) -> list[sa.Row[tuple[str, str, str, str, int, str]]]:
            return list(await c.execute(_READ))

        rows = {row.replica_id: row for row in await self.rows.statement(read)}
        for gone in [m for m in self.members.values() if m.replica_id not in rows]:
            await self._drop(gone)
        for row in rows.values():
            known = self.members.get(row.replica_id)
            if known is not None and (known.url, known.instance) == (row.url, row.instance):
                known.version = row.version
                continue
            if known is not None:
                await self._drop(known)
            self._add(row)

    def _add(self, row: sa.Row[tuple[str, str, str, str, int, str]]) -> None:
        try:
            client = EngineClient(row.url, self.token())
        except ValueError as error:
            log.error("replica %s is not used: its url %r: %s", row.replica_id, row.url, error)
            return
        policy = (row.tenant_id, row.policy_id)
        self.members[row.replica_id] = Member(
            row.replica_id, policy, row.url, row.version, row.instance, client
        )
        self._announce()

    async def acquire(self, policy: Policy, session_id: str, deadline: float) -> Member:
        """The session's replica, waiting until ``deadline`` (monotonic) for one to be there."""
        while True:
            changed = self._changed
            member = self.choose(policy, session_id)
            if member is not None:
                return member
            self._wanted.set()
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise unavailable(
                    f"no replica of policy {policy[1]!r} serves a version yet: try again shortly"
                )
            try:
                await asyncio.wait_for(changed.wait(), rest)
            except TimeoutError:
                pass

    def choose(self, policy: Policy, session_id: str) -> Member | None:
        home = self.members.get(self._home.get(session_id, ""))
        if home is not None and home.alive and home.policy == policy:
            self._home.move_to_end(session_id)
            return home
        alive = [m for m in self.members.values() if m.alive and m.policy == policy]
        if not alive:
            return None
        chosen = max(alive, key=lambda m: _weight(m.replica_id, session_id))
        self._home[session_id] = chosen.replica_id
        if len(self._home) > REMEMBERED_SESSIONS:
            self._home.popitem(last=False)
        return chosen

    def mark_dead(self, member: Member, why: str) -> None:
        """Send it nothing more until it answers again."""
        if member.alive:
            log.warning("replica %s at %s: %s", member.replica_id, member.url, why)
            member.alive = False
            member.probe = asyncio.create_task(self._revive(member))

    async def _revive(self, member: Member) -> None:
        """Only the process that was proven comes back; another waits for its row to say so."""
        pause = PROBE_FIRST
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, PROBE_LAST)
            try:
                async with asyncio.timeout(2):
                    now = await member.client.versions()
            except (EngineError, OSError, TimeoutError, KeyError, ValueError):
                continue
            if now.version is not None and member.instance in ("", now.instance):
                member.alive = True
                self._announce()
                return

    async def close(self) -> None:
        for member in list(self.members.values()):
            await self._drop(member)

    async def _drop(self, member: Member) -> None:
        del self.members[member.replica_id]
        member.alive = False
        if member.probe is not None:
            member.probe.cancel()
        await member.client.aclose()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _weight(replica_id: str, session_id: str) -> bytes:
    return hashlib.sha256(f"{replica_id} {session_id}".encode()).digest()
