"""The relay: nothing lost, nothing out of order, whoever is away."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.relay import Relay, TemporalAway
from archon.records import Outbox
from archon.records.messages import SessionTimes, Wake, session_workflow_id
from archon.storage import Database
from archon.storage import tables as t
from archon.storage.outbox_relay import START_HOLD, next_due, unsent
from tests.workflows.scene import NOW, POLICY, TENANT, Scene

pytestmark = pytest.mark.stack


class FakeTemporal:
    """Takes signals, or refuses them as ``errors`` says for a workflow id."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Wake | None]] = []
        self.errors: dict[str, RPCStatusCode] = {}
        self.closed: list[bool] = []

    async def start_workflow(self, name: str, input: Any, *, id: str, **options: Any) -> None:
        await asyncio.sleep(0)
        if status := self.errors.get(id):
            raise RPCError("not now", status, b"")
        args = options.get("start_signal_args") or [None]
        self.sent.append((input.session_id, args[0]))
        self.closed.append(input.closed)


@pytest.fixture
def fake() -> FakeTemporal:
    return FakeTemporal()


def relay(fake: FakeTemporal, db: Database) -> Relay:
    return Relay(fake, db, "q", clock=lambda: NOW + timedelta(hours=1))  # type: ignore[arg-type]


async def tell(scene: Scene, session: str, kind: str, ref: str = "") -> None:
    async with scene.db.begin() as c:
        await c.execute(
            t.outbox.insert().values(
                tenant_id=TENANT, policy_id=POLICY, session_id=session, kind=kind, ref=ref,
                created_at=NOW,
            )
        )  # fmt: skip


async def left(scene: Scene) -> list[tuple[str, str]]:
    found = await scene.all(t.outbox, Outbox, t.outbox.c.sent_at.is_(None))
    return [(o.session_id, o.kind) for o in found]


async def test_a_sessions_news_are_one_signal_of_the_most_telling_kind(
    scene: Scene, fake: FakeTemporal
) -> None:
    await scene.policy(close_grace=1.5, idle_timeout=5.0)
    await scene.session("a")
    await scene.session("b", state="closed")
    for session, kind, ref in (
        ("a", "session", "a"), ("b", "reward", "r1"), ("a", "reward", "r2"), ("b", "close", "b"),
        ("b", "reward", "r3"),
    ):  # fmt: skip
        await tell(scene, session, kind, ref)
    assert await relay(fake, scene.db).relay_once() == 2
    assert fake.sent == [("a", Wake("reward", "r2")), ("b", Wake("close", "b"))]
    assert fake.closed == [False, True]
    assert await left(scene) == []
    assert await relay(fake, scene.db).relay_once() == 0
    async with scene.db.connect() as c:
        await tell(scene, "a", "session")
        (news,) = await unsent(c, NOW + START_HOLD)
    assert news.times == SessionTimes("reward", 1.5, 5.0, 3600.0, 3600.0)


async def test_a_reward_that_closes_is_held_until_it_may(scene: Scene, fake: FakeTemporal) -> None:
    await scene.policy()
    due = NOW + timedelta(hours=1, seconds=2)
    await scene.session("a", close_after=due)
    await tell(scene, "a", "session")
    await tell(scene, "a", "reward", "r1")
    assert await relay(fake, scene.db).relay_once() == 1
    assert fake.sent == [("a", None)], "the start does not wait for it"
    assert await left(scene) == [("a", "reward")]
    async with scene.db.connect() as c:
        assert await next_due(c, NOW) == due
        assert [n.wake for n in await unsent(c, due)] == [Wake("reward", "r1")]
    async with scene.db.begin() as c:
        await c.execute(sa.update(t.session).values(state="closed"))
    await tell(scene, "a", "close", "a")
    assert await relay(fake, scene.db).relay_once() == 1
    assert fake.sent[1:] == [("a", Wake("close", "a"))]
    assert await left(scene) == []


async def test_a_start_is_held_so_that_a_short_episode_is_told_at_once(scene: Scene) -> None:
    await scene.policy()
    await scene.session("long")
    await scene.session("short")
    await tell(scene, "long", "session")
    await tell(scene, "short", "session")
    async with scene.db.connect() as c:
        assert await unsent(c, NOW) == []
        assert await next_due(c, NOW) == NOW + START_HOLD
        assert [n.session_id for n in await unsent(c, NOW + START_HOLD)] == ["long", "short"]
    await tell(scene, "short", "reward", "r1")
    async with scene.db.begin() as c:
        await c.execute(
            sa.update(t.session).values(close_after=NOW).where(t.session.c.session_id == "short")
        )
    async with scene.db.connect() as c:
        (news,) = await unsent(c, NOW)
    assert news.wake == Wake("reward", "r1")
    assert len(news.outbox_ids) == 2, "the start is part of it: no second workflow may follow"


async def test_starts_are_held_only_while_many_sessions_begin(
    scene: Scene, fake: FakeTemporal
) -> None:
    await scene.policy()
    now = [NOW]
    sender = Relay(fake, scene.db, "q", clock=lambda: now[0])  # type: ignore[arg-type]
    for n in range(5):
        await scene.session(f"first_{n}", told=True)
    assert await sender.relay_once() == 5, "five were few"
    await scene.session("held", told=True)
    assert await sender.relay_once() == 0
    now[0] += START_HOLD
    assert await sender.relay_once() == 1
    now[0] += 10 * START_HOLD
    await scene.session("later", told=True, created_at=now[0])
    assert await sender.relay_once() == 1, "it is quiet again"


async def test_what_temporal_did_not_take_is_sent_later_and_only_that(
    scene: Scene, fake: FakeTemporal
) -> None:
    await scene.policy()
    for session in ("a", "b"):
        await scene.session(session, told=True)
    fake.errors[session_workflow_id("a")] = RPCStatusCode.UNAVAILABLE
    sender = relay(fake, scene.db)
    with pytest.raises(TemporalAway, match="1 of 2"):
        await sender.relay_once()
    assert await left(scene) == [("a", "session")]
    await tell(scene, "a", "reward", "r1")
    fake.errors.clear()
    await sender.relay_once()
    assert fake.sent == [("b", None), ("a", Wake("reward", "r1"))]
    assert await left(scene) == []


async def test_a_session_that_temporal_refuses_does_not_stop_the_others(
    scene: Scene, fake: FakeTemporal
) -> None:
    await scene.policy()
    await scene.session("poison", told=True)
    fake.errors[session_workflow_id("poison")] = RPCStatusCode.INVALID_ARGUMENT
    sender = relay(fake, scene.db)
    assert await sender.relay_once() == 0
    await scene.session("good", told=True)
    assert await sender.relay_once() == 1
    assert fake.sent == [("good", None)]
    assert await left(scene) == [("poison", "session")], "kept, and tried again later"


async def test_there_is_one_relay_at_a_time_and_the_next_one_takes_over(
    scene: Scene, fake: FakeTemporal
) -> None:
    await scene.policy()
    first = asyncio.create_task(relay(fake, scene.db).run())
    await scene.session("a", told=True)
    await _told(fake, 1)
    other = FakeTemporal()
    second = asyncio.create_task(relay(other, scene.db).run())
    await scene.session("b", told=True)
    await _told(fake, 2)
    assert other.sent == []
    first.cancel()
    await scene.session("c", told=True)
    await _told(other, 1)
    second.cancel()


async def test_it_runs_through_an_absence_of_postgres_and_temporal(
    scene: Scene, temporal: Client, fake: FakeTemporal
) -> None:
    await scene.policy()
    sender = relay(fake, scene.db)
    task = asyncio.create_task(sender.run())
    try:
        await scene.session("a", told=True)
        await _told(fake, 1)
        async with scene.db.begin() as c:  # every connection of the relay is cut
            await c.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        await scene.db.engine.dispose()
        fake.errors[session_workflow_id("b")] = RPCStatusCode.UNAVAILABLE
        await scene.session("b", told=True)
        await asyncio.sleep(1.0)
        assert not task.done()
        fake.errors.clear()
        async with asyncio.timeout(15):
            while "b" not in [session for session, _ in fake.sent]:
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
    # What was sent and not yet marked when the connection went is sent again.
    assert list(dict.fromkeys(session for session, _ in fake.sent)) == ["a", "b"]


async def _told(fake: FakeTemporal, count: int) -> None:
    async with asyncio.timeout(15):
        while len(fake.sent) < count:
            await asyncio.sleep(0.02)
