"""The keeper against scripted engines that die, restart empty and lie."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities import keeper as module
from activities.keeper import Keeper
from archon.records import VersionState, system_clock
from archon.storage import Database, replicas
from tests.kit.scripted_engine import ScriptedEngine
from tests.rollout.history import (
    add_policy,
    add_replica,
    add_version,
    replica,
    settings_in,
    true_probe,
)

pytestmark = pytest.mark.stack


@pytest.fixture
async def served(database: Database, tmp_path: Path) -> Database:
    """Version 1 is live, 2 a canary, 3 rejected."""
    await add_policy(database)
    await add_version(database, tmp_path, 0, VersionState.RETIRED)
    await add_version(database, tmp_path, 1, VersionState.LIVE)
    await add_version(database, tmp_path, 2, VersionState.CANARY)
    await add_version(database, tmp_path, 3, VersionState.REJECTED)
    return database


@pytest.fixture
async def keeper(served: Database, tmp_path: Path) -> AsyncIterator[Keeper]:
    made = Keeper(served, settings_in(tmp_path))
    yield made
    await made.close()


async def pass_over(keeper: Keeper) -> None:
    await keeper.tend()
    await keeper.settle()


async def prove(db: Database, name: str, version: int, instance: str) -> None:
    async with db.begin() as c:
        await replicas.set_proven(c, name, version, instance, system_clock())


async def test_an_empty_replica_is_given_what_is_live_and_proven(
    served: Database, keeper: Keeper
) -> None:
    with ScriptedEngine(probe=true_probe) as engine:
        await add_replica(served, "rep_a", engine.url)
        await pass_over(keeper)
        assert [u["version"] for u in engine.updates] == [1]
        row = await replica(served, "rep_a")
        assert (row.version, row.instance) == (1, engine.instance)
        await pass_over(keeper)
        assert len(engine.updates) == 1


async def test_a_killed_replica_leaves_service_and_returns_with_live_weights(
    served: Database, keeper: Keeper
) -> None:
    with ScriptedEngine(version=1, probe=true_probe) as old:
        await add_replica(served, "rep_a", old.url)
        await prove(served, "rep_a", 1, old.instance)
        await pass_over(keeper)
        assert (await replica(served, "rep_a")).version == 1
    await pass_over(keeper)
    assert (await replica(served, "rep_a")).version is None
    seen: list[int | None] = []
    with ScriptedEngine(port=old.port) as new:

        def probe(ids: list[int], version: int) -> list[float]:
            seen.append(version)
            return true_probe(ids, version)

        new.probe = probe
        await pass_over(keeper)
        row = await replica(served, "rep_a")
        assert seen == [1]
        assert (row.version, row.instance) == (1, new.instance)
        assert new.instance != old.instance


async def test_a_restart_between_two_looks_is_seen_by_its_instance(
    served: Database, keeper: Keeper
) -> None:
    with ScriptedEngine(version=1, probe=true_probe) as engine:
        await add_replica(served, "rep_a", engine.url)
        await prove(served, "rep_a", 1, "the-process-before")
        engine.version = None
        await pass_over(keeper)
        row = await replica(served, "rep_a")
        assert (row.version, row.instance) == (1, engine.instance)


async def test_weights_that_do_not_agree_are_not_served(served: Database, keeper: Keeper) -> None:
    with ScriptedEngine(probe=lambda ids, version: [-7.0] * 3) as engine:
        await add_replica(served, "rep_a", engine.url)
        await pass_over(keeper)
        assert (await replica(served, "rep_a")).version is None
        await pass_over(keeper)
        assert len(engine.updates) == 1, "it is tried again only after a while"


async def test_a_proven_canary_is_left_alone_and_a_rejected_version_taken_back(
    served: Database, keeper: Keeper
) -> None:
    with (
        ScriptedEngine(version=2, probe=true_probe) as canary,
        ScriptedEngine(version=3, probe=true_probe) as rejected,
        ScriptedEngine(version=0, probe=true_probe) as behind,
    ):
        for name, engine in (("rep_a", canary), ("rep_b", rejected), ("rep_c", behind)):
            await add_replica(served, name, engine.url)
            assert engine.version is not None
            await prove(served, name, engine.version, engine.instance)
        await pass_over(keeper)
        assert canary.updates == []
        assert rejected.updates[0]["rollback"] is True
        versions = [(await replica(served, n)).version for n in ("rep_a", "rep_b", "rep_c")]
        assert versions == [2, 1, 1]


async def test_a_replica_that_a_rollout_holds_is_left_alone(
    served: Database, keeper: Keeper
) -> None:
    with ScriptedEngine(version=2, probe=true_probe) as engine:
        await add_replica(served, "rep_a", engine.url)
        await prove(served, "rep_a", 1, engine.instance)
        async with served.begin() as rollout:
            await replicas.lock_replica(rollout, "rep_a")
            await pass_over(keeper)
            assert engine.updates == []
            await replicas.set_proven(rollout, "rep_a", 2, engine.instance, system_clock())
        await pass_over(keeper)
        assert engine.updates == []


async def test_one_silence_is_forgiven_and_a_second_is_not(
    served: Database, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedEngine(version=1, probe=true_probe) as engine:
        await add_replica(served, "rep_a", engine.url)
        await prove(served, "rep_a", 1, engine.instance)

        async def silent() -> None:
            raise module.EngineError(engine.url, "nothing came for 2 s")

        monkeypatch.setattr(keeper._checks.at(engine.url), "versions", silent)
        await pass_over(keeper)
        assert (await replica(served, "rep_a")).version == 1
        await pass_over(keeper)
        assert (await replica(served, "rep_a")).version is None
