"""WeightRolloutWorkflow with its activities, on real Temporal and Postgres, engines scripted."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Replayer, Worker

import activities.rollout as rollout_module
from activities.rollout import RolloutActivities
from archon.failpoints import FailpointError
from archon.records import GroupState, SampleState, VersionState
from archon.records.messages import RolloutInput, RolloutResult, RolloutVerdict, main_queue
from archon.storage import Database
from archon.storage import tables as t
from tests.kit.scripted_engine import ScriptedEngine
from tests.rollout.history import (
    POLICY,
    TENANT,
    add_group,
    add_policy,
    add_replica,
    add_sample,
    add_version,
    replica,
    sample,
    settings_in,
    states,
    true_probe,
)
from workflows.rollout import WeightRolloutWorkflow

pytestmark = pytest.mark.stack
LIVE, TRAINED = VersionState.LIVE, VersionState.TRAINED


@asynccontextmanager
async def worker(
    client: Client, db: Database, folder: Path, prefix: str
) -> AsyncIterator[RolloutActivities]:
    activities = RolloutActivities(db, settings_in(folder, prefix))
    async with Worker(
        client,
        task_queue=main_queue(prefix),
        workflows=[WeightRolloutWorkflow],
        activities=[
            activities.list_replicas,
            activities.update_replica,
            activities.promote,
            activities.reject,
        ],
    ):
        yield activities
    await activities.close()


async def start(
    client: Client, prefix: str, version: int
) -> WorkflowHandle[WeightRolloutWorkflow, RolloutResult]:
    return await client.start_workflow(
        WeightRolloutWorkflow.run,
        RolloutInput(TENANT, POLICY, version, prefix),
        id=f"rollout-{prefix}-{secrets.token_hex(3)}",
        task_queue=main_queue(prefix),
    )


async def roll(client: Client, prefix: str, version: int) -> RolloutResult:
    return await (await start(client, prefix, version)).result()


@pytest.fixture
async def first(database: Database, tmp_path: Path) -> Database:
    """Version 0 is live, version 1 is trained."""
    await add_policy(database)
    await add_version(database, tmp_path, 0, LIVE)
    await add_version(database, tmp_path, 1, TRAINED)
    return database


async def decisions(db: Database) -> list[tuple[int, str]]:
    async with db.connect() as c:
        query = sa.select(t.decision.c.version, t.decision.c.decision)
        return [(row.version, row.decision) for row in await c.execute(query)]


async def test_a_version_goes_to_every_replica_and_live(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    with ScriptedEngine(version=0, probe=true_probe) as a, ScriptedEngine(probe=true_probe) as b:
        await add_replica(first, "rep_a", a.url)
        await add_replica(first, "rep_b", b.url)
        async with worker(temporal, first, tmp_path, queue_prefix):
            handle = await start(temporal, queue_prefix, 1)
            result = await handle.result()
            again = await roll(temporal, queue_prefix, 1)
            history = await handle.fetch_history()
            await Replayer(workflows=[WeightRolloutWorkflow]).replay_workflow(history)
    assert (result.decision, result.reasons) == ("promoted", ["proven on 2 of 2 replicas"])
    assert again.decision == "promoted"
    assert await states(first) == {0: "retired", 1: "live"}
    assert await decisions(first) == [(1, "promoted")]
    for name, engine in (("rep_a", a), ("rep_b", b)):
        row = await replica(first, name)
        assert (row.version, row.instance) == (1, engine.instance)
        assert engine.updates[0] == {
            "version": 1, "path": str(tmp_path / "v1/a1/weights"), "sha256": "sha1",
            "rollback": False,
        }  # fmt: skip


async def test_a_canary_that_disagrees_with_the_trainer_rolls_back(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    await add_version(first, tmp_path, 2, TRAINED)  # a child of the one that is rejected
    await set_state(first, 2, VersionState.REJECTED)  # so that 1 is not superseded by it
    await add_group(first, "grp_a", GroupState.READY)
    await add_sample(first, "old", [-1, 0, 0])
    await add_sample(first, "mixed", [-1, 0, 1])
    await add_sample(first, "masked", [-1, 0, 1], mask=[0, 1, 0])
    await add_sample(first, "done", [-1, 1, 1], state=SampleState.TRAINED)

    def wrong(ids: Sequence[int], version: int) -> list[float]:
        exact = true_probe(ids, version)
        return exact if version == 0 else [*exact[:2], exact[2] + 0.002]

    with ScriptedEngine(version=0, probe=wrong) as a, ScriptedEngine(version=0) as b:
        await add_replica(first, "rep_a", a.url)
        await add_replica(first, "rep_b", b.url)
        async with worker(temporal, first, tmp_path, queue_prefix):
            result = await roll(temporal, queue_prefix, 1)
        assert result.decision == "rejected"
        assert "differ by 0.002" in result.reasons[0]
        assert "1 samples dropped" in result.reasons[1]
        assert a.version == 0 and a.updates[-1]["rollback"] is True
        assert all(update["version"] == 0 for update in b.updates)
    assert (await states(first)) == {0: "live", 1: "rejected", 2: "rejected"}
    assert (await replica(first, "rep_a")).version == 0
    dropped = await sample(first, "mixed")
    assert (dropped.state, dropped.drop_reason) == (SampleState.DROPPED, "rejected_version")
    for name, state in (("old", "free"), ("masked", "free"), ("done", "trained")):
        assert (await sample(first, name)).state == state
    assert await decisions(first) == [(1, "rejected")]


async def set_state(db: Database, version: int, state: VersionState) -> None:
    async with db.begin() as c:
        await c.execute(
            sa.update(t.version).where(t.version.c.version == version).values(state=state.value)
        )


async def test_weights_that_the_engine_refuses_are_rejected(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    with ScriptedEngine(version=0, probe=true_probe) as engine:
        engine.update_refusals.append((400, "tensor lm_head.weight is missing"))
        await add_replica(first, "rep_a", engine.url)
        async with worker(temporal, first, tmp_path, queue_prefix):
            result = await roll(temporal, queue_prefix, 1)
    assert result.decision == "rejected"
    assert "lm_head.weight is missing" in result.reasons[0]


async def test_a_dead_replica_is_left_out_and_the_next_one_is_the_canary(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    with ScriptedEngine(probe=true_probe) as dead, ScriptedEngine(probe=true_probe) as engine:
        await add_replica(first, "rep_a", dead.url)
        await add_replica(first, "rep_b", engine.url)
        dead.kill()
        async with worker(temporal, first, tmp_path, queue_prefix):
            result = await roll(temporal, queue_prefix, 1)
    assert result.decision == "promoted"
    assert result.reasons[0] == "proven on 1 of 2 replicas"
    assert "rep_a left out" in result.reasons[1]
    assert (await replica(first, "rep_a")).version is None


async def test_with_no_replica_at_all_it_waits_for_one(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    with ScriptedEngine(probe=true_probe) as gone:
        await add_replica(first, "rep_a", gone.url)
        gone.kill()
        async with worker(temporal, first, tmp_path, queue_prefix):
            handle = await start(temporal, queue_prefix, 1)
            while (await handle.query(WeightRolloutWorkflow.status)).phase != "waiting":
                await asyncio.sleep(0.02)
            assert (await states(first))[0] == "live"
            with ScriptedEngine(probe=true_probe, port=gone.port):
                assert (await handle.result()).decision == "promoted"


async def test_a_newer_version_takes_its_place(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    await add_version(first, tmp_path, 2, TRAINED)
    with ScriptedEngine(version=0, probe=true_probe) as engine:
        await add_replica(first, "rep_a", engine.url)
        async with worker(temporal, first, tmp_path, queue_prefix) as activities:
            assert (await roll(temporal, queue_prefix, 1)).decision == "superseded"
            assert engine.updates == []
            assert (await roll(temporal, queue_prefix, 2)).decision == "promoted"
            late = await activities.promote(RolloutVerdict(TENANT, POLICY, 1))
    assert late.decision == "superseded"
    assert await states(first) == {0: "retired", 1: "trained", 2: "live"}


async def test_a_live_version_that_is_rejected_gives_way_to_the_one_before(
    first: Database, tmp_path: Path
) -> None:
    await set_state(first, 1, VersionState.LIVE)
    await set_state(first, 0, VersionState.RETIRED)
    await add_version(first, tmp_path, 2, TRAINED)
    await add_version(first, tmp_path, 3, TRAINED, parent=0)
    with ScriptedEngine(version=1, probe=true_probe) as engine:
        await add_replica(first, "rep_a", engine.url)
        activities = RolloutActivities(first, settings_in(tmp_path))
        verdict = RolloutVerdict(TENANT, POLICY, 1, ["reward fell"])
        assert (await activities.reject(verdict)).decision == "rejected"
        await activities.reject(verdict)
        await activities.close()
        assert engine.version == 0
    assert await states(first) == {0: "live", 1: "rolled_back", 2: "rejected", 3: "trained"}
    assert await decisions(first) == [(1, "rejected")]


async def test_a_replica_of_another_build_does_not_condemn_a_proven_version(
    temporal: Client, first: Database, tmp_path: Path, queue_prefix: str
) -> None:
    with (
        ScriptedEngine(probe=true_probe) as good,
        ScriptedEngine(probe=lambda ids, version: [-9.0] * 3) as bad,
    ):
        await add_replica(first, "rep_a", good.url)
        await add_replica(first, "rep_b", bad.url)
        async with worker(temporal, first, tmp_path, queue_prefix):
            result = await roll(temporal, queue_prefix, 1)
    assert result.decision == "promoted"
    assert "rep_b left out: log-probs differ" in result.reasons[1]
    assert (await replica(first, "rep_b")).version is None
    assert (await replica(first, "rep_a")).version == 1


@pytest.mark.parametrize("point", ["rollout.after_update", "rollout.before_promote"])
async def test_a_failure_between_two_steps_is_made_good_by_the_next_attempt(
    temporal: Client,
    first: Database,
    tmp_path: Path,
    queue_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    failed, looked = asyncio.Event(), asyncio.Event()

    def fail(name: str) -> None:
        if name == point and not looked.is_set():
            failed.set()
            raise FailpointError(name)

    monkeypatch.setattr(rollout_module, "failpoint", fail)
    with ScriptedEngine(version=0, probe=true_probe) as engine:
        await add_replica(first, "rep_a", engine.url)
        async with worker(temporal, first, tmp_path, queue_prefix):
            handle = await start(temporal, queue_prefix, 1)
            await failed.wait()
            seen = ((await replica(first, "rep_a")).version, (await states(first))[1])
            looked.set()
            assert (await handle.result()).decision == "promoted"
    # The row claims no more than was proven and committed; nothing is live before the promotion.
    assert seen == ((None, "trained") if "update" in point else (1, "canary"))
    assert (await replica(first, "rep_a")).version == 1
    assert await decisions(first) == [(1, "promoted")]
