"""The trainer's activities with a scripted engine: what they read, refuse, repeat and survive."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import load_file
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.batch_files import BadBatch, batch_arrays, write_batch
from activities.engine_group import EngineGroup
from activities.trainer import TrainerActivities
from archon.records import VersionState
from archon.records.messages import PolicyKey, StepInput, Trained
from archon.storage import Database, steps
from archon.storage import tables as t
from tests.activities.claimed import claim, make_manifest, make_sample, write_manifest
from tests.activities.test_engine_group import ENGINE, pids
from tests.rollout.history import POLICY, TENANT, add_policy, add_version, settings_in, states

pytestmark = pytest.mark.stack
KEY = PolicyKey(TENANT, POLICY)


class Trainer:
    """The activities as Temporal calls them, and the folders around them."""

    def __init__(self, db: Database, folder: Path) -> None:
        self.folder, self.plan = folder, folder / "plan"
        self.plan.write_text("")
        command = [sys.executable, str(ENGINE), str(self.plan)]
        self.group = EngineGroup(command, silence=1.0, patience=3.0)
        self.activities = TrainerActivities(db, settings_in(folder), self.group)
        self.environment = ActivityEnvironment()

    async def train(self, manifest_id: str = "man_1") -> Trained:
        step = StepInput(TENANT, POLICY, manifest_id, "test", 60.0)
        return await self.environment.run(self.activities.train_step, step)

    def operations(self) -> int:
        log = self.folder / "plan.operations"
        return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
async def trainer(database: Database, tmp_path: Path) -> AsyncIterator[Trainer]:
    await add_policy(database)
    await add_version(database, tmp_path, 0, VersionState.LIVE)
    made = Trainer(database, tmp_path)
    yield made
    await made.group.kill()


async def failure(trainer: Trainer, manifest_id: str = "man_1") -> tuple[str | None, bool, str]:
    with pytest.raises(ApplicationError) as caught:
        await trainer.train(manifest_id)
    return caught.value.type, caught.value.non_retryable, str(caught.value)


async def test_a_step_is_trained_once_and_then_only_reported(
    database: Database, trainer: Trainer
) -> None:
    await claim(database)
    trained = await trainer.train()
    folder = trainer.folder / "checkpoints" / TENANT / POLICY / "man_1"
    info = trainer.environment.info
    attempt = f"{info.workflow_run_id[:8]}-{info.attempt}" if info.workflow_run_id else ""
    assert trained == Trained(
        manifest_id="man_1",
        outcome="trained",
        checkpoint=str(folder),
        weights=f"{attempt}/weights",
        model_sha256=trained.model_sha256,
        metrics={"loss": 0.5},
        spans={"save": 0.25},
    )
    assert len(trained.model_sha256) == 64
    again = await trainer.train()
    assert again == replace(trained, spans={})
    assert trainer.operations() == 1
    assert not (trainer.folder / "run" / "steps" / "man_1").exists()


def test_the_batch_is_the_manifests_samples_in_its_order(tmp_path: Path) -> None:
    samples = [make_sample(name, "g", "m", version=v) for name, v in (("y", 1), ("x", 0))]
    manifest = make_manifest(samples, "m", base_version=1, parents=(1, 0))
    arrays = batch_arrays(manifest, {s.sample_id: s for s in samples})
    _, path = write_batch(tmp_path, "a", "{}", arrays)
    found = load_file(path)
    assert {name: str(a.dtype) for name, a in found.items()} == {
        "offsets": "int64", "tokens": "int32", "mask": "uint8", "logprobs": "float32",
        "versions": "int32", "interaction": "int32",
    }  # fmt: skip
    assert found["offsets"].tolist() == [0, 6, 12]
    assert found["versions"].tolist() == [-1, -1, 1, 1, -1, 1, -1, -1, 0, 0, -1, 0]
    assert found["interaction"].tolist() == [-1, -1, 0, 0, -1, 1] * 2
    assert np.array_equal(found["logprobs"][:6], np.array([0, 0, -1.5, -2, 0, -2.5], "f4"))
    swapped = replace(samples[0], interactions=samples[0].interactions[::-1])
    with pytest.raises(BadBatch, match="its returns are of"):
        batch_arrays(manifest, {"y": swapped, "x": samples[1]})


@pytest.mark.parametrize(("version", "refused"), [(3, False), (2, False), (1, True), (4, True)])
async def test_staleness_holds_for_each_token_when_the_batch_is_shipped(
    database: Database, trainer: Trainer, version: int, refused: bool
) -> None:
    """Base 5 on 3 on 2 on 1, 4 rejected: with max_staleness 2 the versions 5, 3 and 2 are fresh."""
    await claim(database, version=version, base_version=5, parents=(5, 3, 2, 1))
    if refused:
        kind, final, message = await failure(trainer)
        assert (kind, final) == ("StaleBatch", True)
        assert f"versions [{version}]" in message
        assert trainer.operations() == 0
    else:
        await trainer.train()


async def test_a_base_that_was_rejected_meanwhile_is_refused(
    database: Database, trainer: Trainer
) -> None:
    await add_version(database, trainer.folder, 1, VersionState.REJECTED)
    await claim(database, base_version=1, parents=(1, 0))
    assert (await failure(trainer))[:2] == ("StaleBatch", True)


async def test_what_the_manifest_does_not_name_is_refused(
    database: Database, trainer: Trainer
) -> None:
    assert (await failure(trainer, "man_none"))[:2] == ("BadManifest", True)
    await claim(database, "man_token")
    flipped = t.sample.c.sample_id == "smp_man_token_2"
    async with database.begin() as c:
        await c.execute(
            sa.update(t.sample)
            .where(flipped)
            .values(tokens=np.array([3, 4, 5, 6, 7, 9], "<i4").tobytes())
        )
    kind, final, message = await failure(trainer, "man_token")
    assert (kind, final) == ("BadBatch", True)
    assert "smp_man_token_2" in message
    samples = [make_sample("smp_lost", "g", "man_lost")]
    await write_manifest(database, make_manifest(samples, "man_lost"))
    assert (await failure(trainer, "man_lost"))[:2] == ("BadBatch", True)
    await write_manifest(database, make_manifest(samples, "man_body"), digest="0" * 64)
    assert (await failure(trainer, "man_body"))[:2] == ("BadManifest", True)
    await claim(database, "man_over")
    async with database.begin() as c:
        await c.execute(
            sa.update(t.manifest)
            .where(t.manifest.c.manifest_id == "man_over")
            .values(state="dropped", reason="given up")
        )
    kind, _, message = await failure(trainer, "man_over")
    assert kind == "ManifestNotClaimed" and "given up" in message
    assert trainer.operations() == 0


@pytest.mark.parametrize(
    ("plan", "kind", "final", "says"),
    [
        ("die", "EngineLost", False, "cannot allocate 7 bytes"),
        ("silent", "EngineLost", False, "silent for"),
        ("nan", "NonFiniteGradientError", True, "nan at 3"),
        ("io", "OSError", False, "no space"),
    ],
)
async def test_a_step_that_went_wrong_is_told_apart_and_the_next_attempt_completes_it(
    database: Database, trainer: Trainer, plan: str, kind: str, final: bool, says: str
) -> None:
    await claim(database)
    trainer.plan.write_text(f"{plan}\nok\n")
    found = await failure(trainer)
    assert found[:2] == (kind, final)
    assert says in found[2]
    trained = await trainer.train()
    assert trained.outcome == "trained"
    assert len(pids(trainer.folder)) == 2, "an engine that went wrong is not used again"


async def test_an_empty_signal_is_an_outcome_with_a_reason(
    database: Database, trainer: Trainer
) -> None:
    await claim(database)
    trainer.plan.write_text("empty\n")
    trained = await trainer.train()
    assert trained.outcome == "empty_signal"
    assert trained.reason == "every advantage is 0"


async def test_a_cancelled_step_takes_its_engine_with_it(
    database: Database, trainer: Trainer
) -> None:
    await claim(database)
    trainer.plan.write_text("busy:30\nok\n")
    task = asyncio.create_task(trainer.train())
    while trainer.operations() == 0:
        await asyncio.sleep(0.02)
    trainer.environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trainer.group.pid is None
    trainer.environment = ActivityEnvironment()
    assert (await trainer.train()).outcome == "trained"


async def test_the_first_version_is_made_once_and_is_live(
    database: Database, tmp_path: Path
) -> None:
    await add_policy(database)
    trainer = Trainer(database, tmp_path)
    ensure = trainer.activities.ensure_initial_version
    for _ in range(2):
        assert await trainer.environment.run(ensure, KEY) == 0
    async with database.begin() as c:
        await c.execute(sa.delete(t.version))
    assert await trainer.environment.run(ensure, KEY) == 0
    assert trainer.operations() == 1, "the checkpoint was there, only its row was not"
    assert await states(database) == {0: "live"}
    async with database.connect() as c:
        assert await steps.has_version(c, TENANT, POLICY, 0)
    with pytest.raises(ApplicationError, match="no policy default/other"):
        await trainer.environment.run(ensure, PolicyKey(TENANT, "other"))
    await trainer.group.kill()
