"""The trainer: a worker that turns a claimed manifest into a checkpoint.

Invariant: a manifest has one checkpoint. Its folder is named by the manifest, an attempt writes in
a folder of its own, and whoever finds ``checkpoint.json`` published returns what it says; so a
repeated, a late or a second trainer changes nothing. The engine never runs in this process.

Run it with ``python -m activities.trainer``.
"""

import asyncio
import logging
import shutil
import signal
import sys
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.batch_files import BadBatch, StaleBatch, batch_arrays, write_batch
from activities.beats import heartbeats
from activities.checkpoints import INITIAL, checkpoint_folder, read_checkpoint
from activities.engine_group import EngineGroup, EngineLost, Event
from activities.workers import DEPLOYMENT, connect, exit_now
from archon.failpoints import failpoint
from archon.records import (
    BatchManifest,
    ManifestState,
    PolicySettings,
    Sample,
    loads,
    system_clock,
)
from archon.records.messages import PolicyKey, StepInput, Trained, trainer_queue
from archon.settings import Settings
from archon.storage import Database
from archon.storage import steps as storage
from archon.storage.policies import read_policy

log = logging.getLogger(__name__)


class TrainerActivities:
    """What the trainer's queue offers. One operation at a time; the model stays in memory."""

    def __init__(self, db: Database, settings: Settings, group: EngineGroup) -> None:
        self._db, self._settings, self._group = db, settings, group

    @activity.defn
    async def ensure_initial_version(self, key: PolicyKey) -> int:
        """Version 0 of a policy: its initial weights, live from the beginning."""
        async with self._db.connect() as c:
            if await storage.has_version(c, key.tenant_id, key.policy_id, 0):
                return 0
            policy = await read_policy(c, key.tenant_id, key.policy_id)
        if policy is None:
            raise _final("NoSuchPolicy", f"there is no policy {key.tenant_id}/{key.policy_id}")
        folder = checkpoint_folder(self._settings, key.tenant_id, key.policy_id, INITIAL)
        checkpoint = read_checkpoint(folder)
        if checkpoint is None:
            checkpoint = await self._initialise(policy, folder)
        async with self._db.begin() as c:
            await storage.insert_initial_version(
                c, key.tenant_id, key.policy_id, str(folder), checkpoint, system_clock()
            )
        return 0

    @activity.defn
    async def train_step(self, step: StepInput) -> Trained:
        """Train one manifest, or say what came of it before."""
        folder = checkpoint_folder(self._settings, step.tenant_id, step.policy_id, step.manifest_id)
        if (checkpoint := read_checkpoint(folder)) is not None:
            return _trained(step.manifest_id, folder, checkpoint, {}, {})
        progress: dict[str, Any] = {}
        async with heartbeats(progress):
            manifest, body, samples = await self._read(step.manifest_id)
            attempt = _attempt()
            scratch = self._settings.run_dir / "steps" / manifest.manifest_id
            try:
                arrays = await asyncio.to_thread(batch_arrays, manifest, samples)
            except (BadBatch, StaleBatch) as error:
                raise _final(type(error).__name__, str(error)) from error
            paths = await asyncio.to_thread(write_batch, scratch, attempt, body, arrays)
            outcome = await self._operate(
                {
                    "op": "step",
                    "manifest": str(paths[0]),
                    "batch": str(paths[1]),
                    "base": manifest.base_checkpoint,
                    "out": str(folder),
                    "attempt": attempt,
                },
                progress,
            )
        shutil.rmtree(scratch, ignore_errors=True)
        if outcome["event"] == "empty_signal":
            return Trained(manifest.manifest_id, "empty_signal", reason=str(outcome["reason"]))
        return _trained(
            manifest.manifest_id,
            folder,
            read_checkpoint(folder) or outcome["checkpoint"],
            outcome.get("metrics") or {},
            outcome.get("spans") or {},
        )

    async def _read(self, manifest_id: str) -> tuple[BatchManifest, str, dict[str, Sample]]:
        """The manifest, its text and its samples, if it is claimed and nothing under it fell."""
        async with self._db.connect() as c:
            row = await storage.manifest_row(c, manifest_id)
            if row is None:
                raise _final("BadManifest", f"there is no manifest {manifest_id}")
            if row.state != ManifestState.CLAIMED:
                raise _final(
                    "ManifestNotClaimed", f"manifest {manifest_id} is {row.state}: {row.reason}"
                )
            manifest = _verified(row)
            if rejected := await storage.rejected_among(c, manifest):
                raise _final(
                    "StaleBatch", f"manifest {manifest_id} rests on rejected versions {rejected}"
                )
            return manifest, row.body, await storage.bound_samples(c, manifest_id)

    async def _initialise(self, policy: PolicySettings, folder: Path) -> dict[str, Any]:
        operation = {
            "op": "init", "model": policy.model, "out": str(folder), "attempt": _attempt(),
        }  # fmt: skip
        progress: dict[str, Any] = {}
        async with heartbeats(progress):
            outcome = await self._operate(operation, progress)
        checkpoint: dict[str, Any] = read_checkpoint(folder) or outcome["checkpoint"]
        return checkpoint

    async def _operate(self, operation: Event, progress: dict[str, Any]) -> Event:
        """One engine operation; ``progress`` follows it. Cancelling it kills the engine."""
        progress["attempt"] = operation["attempt"]
        try:
            async with aclosing(self._group.operate(operation)) as events:
                async for event in events:
                    if event["event"] == "progress":
                        progress |= {k: event.get(k) for k in ("span", "done", "total")}
                        failpoint("trainer.worker_mid_step")
                    outcome = event
        except EngineLost as error:
            raise ApplicationError(str(error), type="EngineLost") from error
        if outcome["event"] == "error":
            await self._group.kill()
            raise ApplicationError(
                f"training engine: {outcome.get('message')}",
                type=str(outcome.get("type") or "EngineError"),
                non_retryable=not outcome.get("retryable", True),
            )
        return outcome


def _attempt() -> str:
    info = activity.info()
    return f"{(info.workflow_run_id or info.activity_id)[:8]}-{info.attempt}"


def _final(kind: str, message: str) -> ApplicationError:
    return ApplicationError(message, type=kind, non_retryable=True)


def _verified(row: storage.ManifestRow) -> BatchManifest:
    if (digest := storage.body_digest(row.body)) != row.digest:
        raise _final(
            "BadManifest", f"manifest {row.manifest_id} has digest {digest}, not {row.digest}"
        )
    try:
        return loads(BatchManifest, row.body)
    except (ValueError, TypeError) as error:
        raise _final("BadManifest", f"manifest {row.manifest_id}: {error}") from error


def _trained(
    manifest_id: str,
    folder: Path,
    checkpoint: dict[str, Any],
    metrics: dict[str, Any],
    spans: dict[str, Any],
) -> Trained:
    return Trained(
        manifest_id,
        "trained",
        checkpoint=str(folder),
        weights=str(checkpoint["weights"]),
        model_sha256=str(checkpoint["model_sha256"]),
        metrics=_numbers(metrics or checkpoint.get("metrics") or {}),
        spans=_numbers(spans or checkpoint.get("spans") or {}),
    )


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in values.items() if isinstance(v, (int, float))}


def engine_group(settings: Settings) -> EngineGroup:
    threads = str(settings.engine.trainer_threads)
    return EngineGroup(
        [sys.executable, "-m", "engine.training", "--threads", threads],
        {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )


async def run_trainer(
    client: Client, db: Database, settings: Settings, group: EngineGroup, stop: asyncio.Event
) -> None:
    """Serve the trainer's queue until ``stop`` is set."""
    activities = TrainerActivities(db, settings, group)
    worker = Worker(
        client,
        task_queue=trainer_queue(settings.temporal.queue_prefix),
        activities=[activities.ensure_initial_version, activities.train_step],
        max_concurrent_activities=1,
        deployment_config=DEPLOYMENT,
        max_heartbeat_throttle_interval=timedelta(seconds=0.5),
        default_heartbeat_throttle_interval=timedelta(seconds=0.5),
    )
    try:
        async with worker:
            warm = asyncio.create_task(_warm(group))
            await stop.wait()
            warm.cancel()
    finally:
        await group.stop()


async def _warm(group: EngineGroup) -> None:
    try:
        await group.warm()
    except (EngineLost, OSError) as error:
        log.warning("the training engine did not start; the next step tries again: %s", error)


async def main() -> None:
    settings = Settings()
    assert settings.postgres.url is not None, "ARCHON_POSTGRES__URL is set by the supervisor"
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    db = Database(settings.postgres.url.get_secret_value(), pool_size=2)
    client = await connect(settings, stop)
    if client is not None:
        await run_trainer(client, db, settings, engine_group(settings), stop)
    await db.close()


if __name__ == "__main__":
    exit_now(main)
