"""Claims and commits on a real database: whole groups, fresh tokens, one version per step."""

import asyncio
import hashlib
import itertools
import random
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from archon.records import BatchManifest, PolicyVersion, Sample, VersionState, loads
from archon.records.messages import Claimed, StepResult, Trained
from archon.storage import tables as t
from archon.storage.claims import ENGINE_BUILD, claim
from archon.storage.rollouts import promote, reject
from archon.storage.versions import (
    UnknownPolicy,
    commit,
    drop,
    fail,
    moved_baseline,
    release,
    retry,
)
from tests.kit.invariants import check_database
from tests.workflows.scene import NOW, POLICY, TENANT, Scene

pytestmark = pytest.mark.stack
LATER = NOW + timedelta(hours=2)
_SECONDS = itertools.count()


async def claimed(scene: Scene, **options: Any) -> Claimed:
    async with scene.db.begin() as c:
        return await claim(c, TENANT, POLICY, now=LATER, **options)


async def committed(scene: Scene, manifest: str, **changes: Any) -> StepResult:
    trained = Trained(
        manifest, "trained", checkpoint=f"/c/{manifest}", weights="a1/weights",
        model_sha256=f"sha_{manifest}", metrics={"loss": 0.5, "bad": float("nan")},
        spans={"save": 0.25}, **changes,
    )  # fmt: skip
    async with scene.db.begin() as c:
        return await commit(c, trained, LATER + timedelta(seconds=next(_SECONDS)))


async def body(scene: Scene) -> BatchManifest:
    (row,) = await scene.manifests()
    assert row.digest == hashlib.sha256(row.body.encode()).hexdigest()
    return loads(BatchManifest, row.body)


async def promoted(scene: Scene, version: int) -> None:
    async with scene.db.begin() as c:
        assert await promote(c, TENANT, POLICY, version, [], [], LATER) == "promoted"


async def states(scene: Scene) -> dict[str, tuple[str, str]]:
    return {s.session_id: (str(s.state.value), s.drop_reason) for s in await scene.samples()}


async def test_a_claim_binds_whole_groups_in_order_and_copies_what_feeds_the_step(
    scene: Scene,
) -> None:
    await scene.policy(batch_groups=2, max_staleness=3)
    await scene.sealed_group("late", 0, at=30)
    await scene.sealed_group("b", 0, 0, at=20, members=2, value=0.25)
    await scene.sealed_group("a", 0, at=10, value=0.5)
    found = await claimed(scene)
    assert (found.base_version, found.head, found.live, found.reason) == (0, 0, 0, "")
    manifest = await body(scene)
    assert manifest.manifest_id == found.manifest_id
    assert [s.session_id for s in manifest.samples] == ["a_s0", "b_s0", "b_s1"]
    assert [[r.value for r in s.returns] for s in manifest.samples] == [[0.5], [0.25], [0.25]]
    assert manifest.samples[1].returns[0].interaction_id == "int_b_s0"
    assert (manifest.base_checkpoint, manifest.base_digest) == ("/c/0", "sha0")
    assert (manifest.parents, manifest.baseline, manifest.kind) == ((0,), None, "fresh")
    assert (manifest.max_staleness, manifest.engine_build) == (3, ENGINE_BUILD)
    assert manifest.seed == int(hashlib.sha256(found.manifest_id.encode()).hexdigest()[:7], 16)
    assert [await scene.group_state(g) for g in ("a", "b", "late")] == [
        "claimed", "claimed", "ready",
    ]  # fmt: skip
    assert {s.manifest_id for s in await scene.samples(t.sample.c.state == "claimed")} == {
        found.manifest_id
    }
    assert await claimed(scene) == found, "asking again finds the claim that was made"
    assert check_database(scene.db.url) == []


async def test_it_says_why_there_is_no_batch(scene: Scene) -> None:
    await scene.policy(batch_groups=3, max_ahead=1)
    await scene.sealed_group("a", 0)
    assert (await claimed(scene)).reason == "1 of 3 groups ready"
    await scene.version(1, 0)
    assert (await claimed(scene)).reason == "1 of 3 groups ready", "one ahead is allowed"
    await scene.version(2, 1)
    assert (await claimed(scene)).reason == "head 2 is 2 past live 0 (max_ahead 1)"
    with pytest.raises(UnknownPolicy, match="acme/nobody"):
        async with scene.db.begin() as c:
            await claim(c, TENANT, "nobody", now=LATER)


async def test_a_step_may_begin_with_fewer_groups(scene: Scene) -> None:
    await scene.policy(batch_groups=3)
    assert (await claimed(scene, at_least=1)).reason == "0 of 1 groups ready"
    await scene.sealed_group("a", 0)
    await scene.sealed_group("b", 0, at=1)
    found = await claimed(scene, at_least=1)
    assert found.manifest_id and len((await body(scene)).samples) == 2


async def test_a_group_past_its_deadline_goes_with_what_it_has(scene: Scene) -> None:
    await scene.policy()
    await scene.sealed_group("a", 0)
    async with scene.db.begin() as c:
        await c.execute(
            sa.update(t.group).values(size=2, state="open", deadline=LATER + timedelta(seconds=1))
        )
    assert not (await claimed(scene)).manifest_id
    async with scene.db.begin() as c:
        await c.execute(sa.update(t.group).values(deadline=LATER))
    await scene.group("nothing", 2, deadline=LATER)
    assert (await claimed(scene)).manifest_id
    assert await scene.group_state("nothing") == "done"


async def test_what_is_too_stale_is_dropped_and_counted(scene: Scene) -> None:
    await scene.policy(max_staleness=1, max_ahead=1)
    await scene.version(1, 0, VersionState.LIVE)
    await scene.version_state(0, VersionState.RETIRED)
    await scene.version(2, 1)
    await scene.sealed_group("old", 0)
    await scene.sealed_group("mixed", 0, 1, 2)
    await scene.sealed_group("fresh", 1, 2, at=1)
    assert (await claimed(scene)).manifest_id
    assert await states(scene) == {
        "old_s0": ("dropped", "stale"),
        "mixed_s0": ("dropped", "stale"),
        "fresh_s0": ("claimed", ""),
    }
    assert await scene.group_state("old") == "done"
    manifest = await body(scene)
    assert manifest.parents == (2, 1)
    assert manifest.dropped == {"stale": 2}


async def test_a_group_is_trained_with_what_is_left_of_it(scene: Scene) -> None:
    await scene.policy(max_staleness=1)
    await scene.sealed_group("g", 0, members=2)
    async with scene.db.begin() as c:
        old = np.array([-1, -1, 9], "<i4").tobytes()
        await c.execute(
            sa.update(t.sample)
            .where(t.sample.c.session_id == "g_s0")
            .values(versions=old, min_version=9, max_version=9)
        )
    assert (await claimed(scene)).manifest_id
    manifest = await body(scene)
    assert [s.session_id for s in manifest.samples] == ["g_s1"]
    assert manifest.dropped == {"stale": 1}


async def test_tokens_of_rejected_versions_are_dropped_and_those_around_them_are_not(
    scene: Scene,
) -> None:
    await scene.policy(max_staleness=2)
    await scene.version(1, 0, VersionState.REJECTED)
    await scene.version(2, 0)
    await scene.sealed_group("bad", 0, 1)
    await scene.sealed_group("good", 0, 2, at=1)
    assert (await claimed(scene)).manifest_id
    assert await states(scene) == {
        "bad_s0": ("dropped", "rejected_version"),
        "good_s0": ("claimed", ""),
    }
    assert (await body(scene)).parents == (2, 0)


async def test_a_commit_makes_the_next_version_once(scene: Scene) -> None:
    await scene.policy()
    await scene.sealed_group("a", 0, 0, value=0.5)
    found = await claimed(scene)
    first = await committed(scene, found.manifest_id)
    assert first == StepResult(found.manifest_id, "committed", 1, "", 0.5)
    assert await committed(scene, found.manifest_id) == first, "a repeated commit finds the first"
    version = (await scene.versions())[-1]
    assert (version.version, version.parent, version.state) == (1, 0, "trained")
    assert (version.checkpoint, version.weights) == (f"/c/{found.manifest_id}", "a1/weights")
    assert version.model_sha256 == f"sha_{found.manifest_id}"
    assert version.metrics == {
        "loss": 0.5, "seconds_save": 0.25, "reward_mean": 0.5, "sessions": 1.0,
    }  # fmt: skip
    assert await states(scene) == {"a_s0": ("trained", "")}
    assert await scene.group_state("a") == "done"
    (row,) = await scene.manifests()
    assert (row.state, row.ended_at) == ("committed", version.created_at)
    assert check_database(scene.db.url) == []


async def test_the_running_baseline_goes_into_the_next_manifest(scene: Scene) -> None:
    await scene.policy(max_ahead=2)
    await scene.sealed_group("a", 0, value=1.0, members=3)
    await committed(scene, (await claimed(scene)).manifest_id)
    await scene.sealed_group("b", 0, value=0.0)
    found = await claimed(scene)
    manifest = loads(BatchManifest, (await scene.manifests())[-1].body)
    assert manifest.baseline == 1.0
    await committed(scene, found.manifest_id)
    async with scene.db.connect() as c:
        row = (await c.execute(sa.select(t.policy.c.baseline, t.policy.c.baseline_weight))).one()
    assert tuple(row) == pytest.approx((2.7 / 3.7, 3.7))  # three ones that faded to 2.7, one zero
    assert moved_baseline(None, 0.0, [0.25, 0.75]) == (0.5, 2.0)


async def test_a_zombies_commit_is_refused(scene: Scene) -> None:
    await scene.policy()
    await scene.sealed_group("a", 0)
    found = await claimed(scene)
    async with scene.db.begin() as c:
        assert (await drop(c, found.manifest_id, "dropped by hand", LATER)).outcome == "dropped"
    assert await states(scene) == {"a_s0": ("dropped", "dropped by hand")}
    result = await committed(scene, found.manifest_id)
    assert (result.outcome, result.reason) == ("dropped", "dropped by hand")
    assert len(await scene.versions()) == 1
    assert check_database(scene.db.url) == []


async def test_a_commit_on_a_base_that_fell_gives_the_samples_back(scene: Scene) -> None:
    await scene.policy()
    await scene.version(1, 0)
    await scene.sealed_group("a", 0)
    found = await claimed(scene)
    assert found.base_version == 1
    await scene.version_state(1, VersionState.REJECTED)
    result = await committed(scene, found.manifest_id)
    assert (result.outcome, result.reason) == ("dropped", "base_rejected")
    assert await states(scene) == {"a_s0": ("free", "")}
    again = await claimed(scene)
    assert (again.base_version, again.manifest_id != found.manifest_id) == (0, True)
    result = await committed(scene, again.manifest_id)
    assert result.version == 2, "numbers are never used again"
    assert check_database(scene.db.url) == []


async def test_a_claim_whose_base_fell_is_released_by_the_next_one(scene: Scene) -> None:
    await scene.policy()
    await scene.version(1, 0)
    await scene.sealed_group("a", 0)
    found = await claimed(scene)
    await scene.version_state(1, VersionState.REJECTED)
    again = await claimed(scene)
    assert again.manifest_id not in ("", found.manifest_id)
    rows = {row.manifest_id: (row.state, row.reason) for row in await scene.manifests()}
    assert rows[found.manifest_id] == ("dropped", "base_rejected")


async def test_a_failed_step_keeps_its_samples_until_somebody_decides(scene: Scene) -> None:
    await scene.policy()
    await scene.sealed_group("a", 0)
    found = await claimed(scene)
    async with scene.db.begin() as c:
        assert (await fail(c, found.manifest_id, "it hurts")).outcome == "failed"
    waiting = await claimed(scene)
    assert waiting.reason == f"failed step {found.manifest_id} waits for retry or drop: it hurts"
    assert (await committed(scene, found.manifest_id)).outcome == "failed"
    async with scene.db.begin() as c:
        assert (await retry(c, found.manifest_id)).outcome == "running"
    assert await claimed(scene) == found
    assert (await committed(scene, found.manifest_id)).outcome == "committed"
    async with scene.db.begin() as c:
        assert (await fail(c, found.manifest_id, "too late")).outcome == "committed"


async def test_released_samples_are_claimed_again(scene: Scene) -> None:
    await scene.policy()
    await scene.sealed_group("a", 0)
    found = await claimed(scene)
    async with scene.db.begin() as c:
        await release(c, found.manifest_id, "StaleBatch", LATER)
    assert (await claimed(scene)).manifest_id not in ("", found.manifest_id)
    assert check_database(scene.db.url) == []


async def test_claims_and_commits_at_the_same_time_bind_and_commit_once(scene: Scene) -> None:
    await scene.policy()
    await scene.sealed_group("a", 0)
    found = await asyncio.gather(*(claimed(scene) for _ in range(4)))
    assert len({f.manifest_id for f in found}) == 1
    results = await asyncio.gather(*(committed(scene, found[0].manifest_id) for _ in range(4)))
    assert {r.version for r in results} == {1}
    assert len(await scene.versions()) == 2


@pytest.mark.parametrize("seed", range(4))
async def test_no_interleaving_trains_a_stale_token_or_a_token_twice(
    scene: Scene, seed: int
) -> None:
    """Random sealing, claims, commits, promotions and rejections against a model in this test."""
    choice = random.Random(seed)
    bound = choice.choice([0, 1, 2, 3])
    await scene.policy(batch_groups=2, max_staleness=bound, max_ahead=min(bound, 1))
    parents: dict[int, int | None] = {0: None}
    rejected: set[int] = set()
    bases: dict[str, int] = {}
    running = ""
    for turn in range(60):
        good = [v for v in parents if v not in rejected]
        action = choice.choice(["seal", "seal", "seal", "claim", "commit", "promote", "reject"])
        if action == "seal":
            served = choice.choices(sorted(parents)[-4:], k=choice.choice([1, 2]))
            await scene.sealed_group(f"g{turn}", *sorted(served), at=turn)
        elif action == "claim":
            found = await claimed(scene, at_least=choice.choice([0, 1]))
            if found.manifest_id:
                assert found.base_version == max(good)
                bases[found.manifest_id] = found.base_version
                running = found.manifest_id
        elif action == "commit" and running:
            result = await committed(scene, running)
            if result.outcome == "committed":
                parents.setdefault(result.version, bases[running])
        elif action == "promote":
            async with scene.db.begin() as c:
                await promote(c, TENANT, POLICY, max(good), [], [], LATER)
        elif action == "reject" and turn % 3 == 0:
            live = [v.version for v in await scene.versions() if v.state == VersionState.LIVE][0]
            if max(good) > live:
                async with scene.db.begin() as c:
                    await reject(c, TENANT, POLICY, max(good), ["test"], [], LATER)
                rejected.add(max(good))
    await _check(scene, bound, parents, rejected, bases)


async def _check(
    scene: Scene,
    bound: int,
    parents: dict[int, int | None],
    rejected: set[int],
    bases: dict[str, int],
) -> None:
    samples: list[Sample] = await scene.samples()
    trained = [s for s in samples if s.state == "trained"]
    assert trained, "the walk trained something"
    for sample in trained:
        chain: list[int] = []
        at: int | None = bases[sample.manifest_id or ""]
        while at is not None and len(chain) <= bound:
            chain.append(at)
            at = parents[at]
        used = np.frombuffer(sample.versions, "<i4")[np.frombuffer(sample.mask, "u1") == 1]
        assert set(used.tolist()) <= set(chain), f"{sample.sample_id} of {used} on {chain}"
    assert all(
        s.drop_reason in ("stale", "rejected_version") for s in samples if s.state == "dropped"
    )
    versions: list[PolicyVersion] = await scene.versions()
    assert [v.version for v in versions] == list(range(len(versions)))
    assert {v.version: v.parent for v in versions} == parents
    assert check_database(scene.db.url) == []
