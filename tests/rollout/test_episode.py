"""EpisodeWorkflow and the rollout's own activity: members fail, hosts go, runs are resumed."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
import temporalio.activity
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

import archon.cli.members as members_module
import workflows.episode
from activities.admission import AdmissionActivities
from archon.cli.agents import Order, Report
from archon.cli.members import GatewayCalls, Members, Pace
from archon.cli.rollout import Driver, Run, Task, read_tasks, summary
from archon.records import VersionState
from archon.records.messages import (
    EpisodeWave,
    MemberResult,
    agents_queue,
    episode_group_id,
    episode_workflow_id,
    main_queue,
)
from archon.stack.errors import StackError
from archon.storage import Database, groups
from archon.storage import tables as t
from tests.rollout.history import POLICY, TENANT, add_policy, add_version
from tests.rollout.small_gateway import SmallGateway
from workflows.episode import EpisodeWorkflow

pytestmark = pytest.mark.stack
Behaviour = Callable[[int, int, int], Awaitable[Report]]


class FakeAgents:
    """Plays by a function of group, member and attempt."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.played: list[tuple[int, int, int]] = []

    async def play(self, order: Order) -> Report:
        index, member, attempt = (int(n) for n in order.episode.split("-")[-3:])
        self.played.append((index, member, attempt))
        return await self.behaviour(index, member, attempt)

    async def close(self) -> None: ...


class World:
    """A policy, a gateway, the worker of the main queue, and rollouts that come and go."""

    def __init__(
        self, client: Client, db: Database, gateway: SmallGateway, folder: Path, prefix: str
    ) -> None:
        self.client, self.db, self.gateway, self.folder = client, db, gateway, folder
        self.run = Run(
            run_id=f"r{prefix}",
            tenant_id=TENANT,
            policy_id=POLICY,
            queue_prefix=prefix,
            tasks=[Task(f"task-{n}", {"target": n, "nested": [{"a": None}]}) for n in range(2)],
            group_size=3,
            concurrency=2,
            timeout=20.0,
            max_replacements=1,
            trainable=True,
        )

    @asynccontextmanager
    async def host(self, behaviour: Behaviour) -> AsyncIterator[FakeAgents]:
        """The process of ``archon rollout``, its agents replaced."""
        agents = FakeAgents(behaviour)
        calls = GatewayCalls(self.gateway.url, "sk-admin-test", POLICY)
        members = Members(calls, agents, Pace(0), self.folder / "record.jsonl")
        async with Worker(
            self.client,
            task_queue=agents_queue(self.run.queue_prefix, self.run.run_id),
            activities=[members.run_members],
            max_heartbeat_throttle_interval=timedelta(seconds=0.2),
        ):
            yield agents
        calls.close()

    async def play(self, behaviour: Behaviour) -> tuple[Driver, FakeAgents]:
        driver = Driver(self.client, self.run)
        async with self.host(behaviour) as agents:
            await driver.drive()
        return driver, agents

    async def sessions(self) -> list[tuple[str, str, str, bool]]:
        s = t.session.c
        query = sa.select(s.labels, s.state, s.close_reason, s.trainable)
        async with self.db.connect() as c:
            return sorted(
                ("-".join(row.labels[k] for k in ("episode", "member", "wave")),
                 row.state, row.close_reason, row.trainable)
                for row in await c.execute(query)
            )  # fmt: skip

    async def group(self, index: int) -> tuple[str, int] | None:
        run = self.run
        name = episode_group_id(run.tenant_id, run.policy_id, run.run_id, index)
        async with self.db.connect() as c:
            found = await groups.get_group(c, name)
        return None if found is None else (found.state.value, found.size)

    def record(self) -> list[dict[str, object]]:
        file = self.folder / "record.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
async def world(
    temporal: Client, database: Database, tmp_path: Path, queue_prefix: str
) -> AsyncIterator[World]:
    await add_policy(database, batch_groups=8)
    await add_version(database, tmp_path, 0, VersionState.LIVE)
    admission = AdmissionActivities(database)
    async with (
        SmallGateway(database) as gateway,
        Worker(
            temporal,
            task_queue=main_queue(queue_prefix),
            workflows=[EpisodeWorkflow],
            workflow_runner=UnsandboxedWorkflowRunner(),
            activities=[admission.admit_group, admission.lose_members, admission.shrink_group],
        ),
    ):
        yield World(temporal, database, gateway, tmp_path, queue_prefix)


async def win(index: int, member: int, attempt: int) -> Report:
    return Report(reward=index + member / 10, turns=2)


async def test_every_member_of_every_group_plays_once(world: World) -> None:
    driver, agents = await world.play(win)
    assert sorted(agents.played) == [(i, m, 0) for i in range(2) for m in range(3)]
    tally = driver.tally
    assert (tally.groups, tally.finished, tally.failed, tally.replaced) == (2, 6, 0, 0)
    assert sorted(tally.rewards) == [0.0, 0.1, 0.2, 1.0, 1.1, 1.2]
    assert await world.sessions() == [
        (f"{i}-{m}-0", "closed", "end", True) for i in range(2) for m in range(3)
    ]
    assert await world.group(0) == ("open", 3)
    history = await world.client.get_workflow_handle(
        episode_workflow_id(world.run.run_id, 0)
    ).fetch_history()
    assert "sk-sess-" not in history.to_json(), "a session's key never enters a history"
    await Replayer(workflows=[EpisodeWorkflow]).replay_workflow(history)
    assert len(world.gateway.keys) == 6


async def test_a_run_that_is_started_again_plays_nothing_twice(world: World) -> None:
    await world.play(win)
    driver, agents = await world.play(win)
    assert agents.played == []
    assert (driver.resumed, driver.tally.finished) == (2, 6)


async def test_a_member_that_fails_is_replaced_and_its_session_leaves_the_group(
    world: World,
) -> None:
    async def behave(index: int, member: int, attempt: int) -> Report:
        if (index, member, attempt) == (0, 1, 0):
            return Report(errors=["APIError: the stream broke"])
        return await win(index, member, attempt)

    driver, _ = await world.play(behave)
    assert (driver.tally.finished, driver.tally.failed, driver.tally.replaced) == (6, 0, 1)
    assert driver.tally.errors == ["member 1, wave 0: APIError: the stream broke"]
    handle = world.client.get_workflow_handle(episode_workflow_id(world.run.run_id, 0))
    await Replayer(workflows=[EpisodeWorkflow]).replay_workflow(await handle.fetch_history())
    sessions = {name: rest for name, *rest in await world.sessions()}
    assert sessions["0-1-0"] == ["closed", "lost", False]
    assert sessions["0-1-1"] == ["closed", "end", True]
    assert [line["errors"] for line in world.record() if line["errors"]] == [
        ["APIError: the stream broke"]
    ]


async def test_a_member_that_cannot_be_replaced_is_given_up_and_the_group_goes_on(
    world: World,
) -> None:
    async def behave(index: int, member: int, attempt: int) -> Report:
        if (index, member) == (1, 2):
            return Report(errors=["no luck"])
        return await win(index, member, attempt)

    driver, agents = await world.play(behave)
    assert (driver.tally.finished, driver.tally.failed, driver.tally.replaced) == (5, 1, 1)
    assert [p for p in agents.played if p[:2] == (1, 2)] == [(1, 2, 0), (1, 2, 1)]
    assert await world.group(0) == ("open", 3)
    assert await world.group(1) == ("open", 2)
    assert ("replaced", "1 agent runs") in summary(world.run, driver.tally, 1.0)


async def test_a_stopped_rollout_goes_on_without_counting_it_as_failures(world: World) -> None:
    world.run = replace(world.run, max_replacements=0, tasks=world.run.tasks[:1])
    playing = asyncio.Event()

    async def hang(index: int, member: int, attempt: int) -> Report:
        if member == 0:
            return await win(index, member, attempt)
        playing.set()
        await asyncio.sleep(60)
        raise AssertionError

    driver = Driver(world.client, world.run)
    async with world.host(hang):
        driving = asyncio.create_task(driver.drive())
        await playing.wait()
        await asyncio.sleep(0.3)
        driving.cancel()
    driver, agents = await world.play(win)
    assert (driver.tally.finished, driver.tally.failed) == (3, 0)
    assert sorted(agents.played) == [(0, 1, 1), (0, 2, 1)]
    sessions = {name: rest for name, *rest in await world.sessions()}
    assert sessions["0-1-0"] == ["closed", "lost", False]


async def test_what_a_killed_rollout_had_said_is_finished_is_not_played_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows.episode, "HOST_SILENT", timedelta(seconds=1.5))
    world.run = replace(world.run, max_replacements=0, tasks=world.run.tasks[:1])
    told = asyncio.Event()
    beat = temporalio.activity.heartbeat

    def last_words(*details: list[MemberResult]) -> None:
        """Heartbeats reach Temporal until it knows of one member; then the process is gone."""
        if not told.is_set():
            beat(*details)
        if details[0]:
            told.set()

    async def behave(index: int, member: int, attempt: int) -> Report:
        if (member, attempt) == (2, 0):
            await asyncio.sleep(60)
        if (member, attempt) == (1, 0):
            await told.wait()  # finished, but nobody was told
        return await win(index, member, attempt)

    monkeypatch.setattr(temporalio.activity, "heartbeat", last_words)
    monkeypatch.setattr(members_module, "_BEAT_S", 0.2)
    driver, agents = await world.play(behave)
    assert (driver.tally.finished, driver.tally.failed) == (3, 0)
    assert sorted(agents.played) == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]
    sessions = {name: rest for name, *rest in await world.sessions()}
    assert sessions["0-0-0"] == ["closed", "end", True]
    assert sessions["0-1-0"] == sessions["0-2-0"] == ["closed", "lost", False]


async def test_an_episode_without_end_is_a_failure(world: World) -> None:
    world.run = replace(world.run, timeout=0.2, max_replacements=0, tasks=world.run.tasks[:1])

    async def behave(index: int, member: int, attempt: int) -> Report:
        await asyncio.sleep(10 if member == 0 else 0)
        return await win(index, member, attempt)

    driver, _ = await world.play(behave)
    assert (driver.tally.finished, driver.tally.failed) == (2, 1)
    assert driver.tally.errors == ["member 0, wave 0: no end within 0.2 s"]


async def test_an_evaluation_trains_on_nothing_and_needs_no_room(world: World) -> None:
    world.run = replace(world.run, trainable=False)
    driver, _ = await world.play(win)
    assert driver.tally.finished == 6
    assert {row[3] for row in await world.sessions()} == {False}
    assert await world.group(0) is None
    rows = dict(summary(world.run, driver.tally, 2.0))
    # Of 0, .1, .2, 1, 1.1, 1.2: squares 1.54, over 5 is .308, root .554977, over √6 .226568.
    assert rows["reward"] == "0.600 ± 0.227"


async def test_groups_wait_for_room(world: World) -> None:
    """Eight groups a batch, none may be stale: the ninth waits until a batch is done."""
    async with world.db.begin() as c:
        settings = sa.func.jsonb_set(t.policy.c.settings, ["max_staleness"], sa.text("'0'::jsonb"))
        settings = sa.func.jsonb_set(settings, ["max_ahead"], sa.text("'0'::jsonb"))
        settings = sa.func.jsonb_set(settings, ["batch_groups"], sa.text("'1'::jsonb"))
        await c.execute(sa.update(t.policy).values(settings=settings))
    driver = Driver(world.client, world.run)
    async with world.host(win) as agents:
        driving = asyncio.create_task(driver.drive())
        while len(agents.played) < 3:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        (first,) = {index for index, _, _ in agents.played}
        assert await world.group(1 - first) is None
        async with world.db.begin() as c:
            await c.execute(sa.update(t.group).values(state="done"))
            await c.execute(sa.text("SELECT pg_notify('archon_ready', '')"))
        async with asyncio.timeout(5):
            await driving
    assert len(agents.played) == 6


async def test_a_gateway_that_is_away_is_waited_for_and_a_refusal_is_not(world: World) -> None:
    agents = FakeAgents(win)
    calls = GatewayCalls(world.gateway.url, "sk-admin-test", POLICY)
    members = Members(calls, agents, Pace(0), world.folder / "record.jsonl")
    wave = EpisodeWave("run", 0, 0, [0], "", "task", {}, 5.0, True)
    world.gateway.refusals.extend([(503, "retry-after: 0\r\n"), (429, "")])
    (result,) = await ActivityEnvironment().run(members.run_members, wave)
    assert (result.ok, result.reward) == (True, 0.0)
    world.gateway.refusals.append((404, ""))
    (refused,) = await ActivityEnvironment().run(members.run_members, wave)
    assert not refused.ok and "404" in refused.error
    assert agents.played == [(0, 0, 0)]
    calls.close()


async def test_an_agent_that_reports_no_reward_is_asked_about_at_the_gateway(
    world: World,
) -> None:
    async def quiet(index: int, member: int, attempt: int) -> Report:
        return Report()

    calls = GatewayCalls(world.gateway.url, "sk-admin-test", POLICY)
    members = Members(calls, FakeAgents(quiet), Pace(0), world.folder / "record.jsonl")
    wave = EpisodeWave("run", 0, 0, [0], "", "task", {}, 5.0, True)
    (result,) = await ActivityEnvironment().run(members.run_members, wave)
    assert result.reward == 1.5, "0.5 replaced 9, component b adds 1, a call's own is not counted"
    calls.close()


def test_tasks_are_read_in_order_and_shuffled_by_a_seed(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"target": 1}\n\n{"task_id": "b", "target": 2}\n{"id": 3}\n')
    names = [task.task_id for task in read_tasks(file, 2, None)]
    assert names == ["task-1", "b", "3"] * 2
    shuffled = [task.task_id for task in read_tasks(file, 50, 7)]
    assert shuffled == [task.task_id for task in read_tasks(file, 50, 7)]
    assert all(sorted(shuffled[n : n + 3]) == ["3", "b", "task-1"] for n in range(0, 150, 3))
    assert len({tuple(shuffled[n : n + 3]) for n in range(0, 150, 3)}) == 6
    file.write_text("[1]\n")
    with pytest.raises(StackError, match="line 1: a task is a JSON object"):
        read_tasks(file, 1, None)
