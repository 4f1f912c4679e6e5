"""The worker: workflows, their activities, the outbox relay and the replica keeper in one process.

Invariant: they live and die together. Whatever ends with an error ends the process with a status
that is not 0, so that the supervisor starts all of it again; none of it holds state.

Run it with ``python -m activities.worker``.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable

from temporalio.client import Client
from temporalio.worker import Worker

from activities.admission import AdmissionActivities
from activities.keeper import run_keeper
from activities.lake import run_compactor
from activities.policies import run_policies
from activities.relay import run_relay
from activities.rollout import RolloutActivities
from activities.sessions import SessionActivities
from activities.steps import StepActivities
from activities.workers import activity_methods, connect, exit_now, make_worker
from archon.settings import Settings
from archon.storage import Database
from workflows.episode import EpisodeWorkflow
from workflows.policy import PolicyWorkflow
from workflows.rollout import WeightRolloutWorkflow
from workflows.session import SessionWorkflow
from workflows.step import TrainingStepWorkflow

log = logging.getLogger(__name__)

WORKFLOWS = [
    SessionWorkflow,
    PolicyWorkflow,
    TrainingStepWorkflow,
    WeightRolloutWorkflow,
    EpisodeWorkflow,
]


async def run(client: Client, db: Database, settings: Settings, stop: asyncio.Event) -> None:
    """Everything, until ``stop`` is set or something ends with an error."""
    prefix = settings.temporal.queue_prefix
    worker = make_worker(
        client,
        prefix,
        WORKFLOWS,
        activity_methods(
            SessionActivities(db),
            StepActivities(db),
            RolloutActivities(db, settings),
            AdmissionActivities(db),
        ),
    )
    async with asyncio.TaskGroup() as group:
        beside = [
            group.create_task(_for_ever(run_relay(client, db, prefix), "the relay")),
            group.create_task(_for_ever(run_policies(client, db, prefix), "the policies' watch")),
            group.create_task(_for_ever(run_keeper(db, settings), "the keeper")),
            group.create_task(_for_ever(run_compactor(db, settings), "the compactor")),
            group.create_task(_stop_worker(worker, stop)),
        ]
        await worker.run()
        for task in beside:
            task.cancel()
    if not stop.is_set():
        raise RuntimeError("the worker ended though nobody asked for it")


async def _for_ever(work: Awaitable[None], name: str) -> None:
    await work
    raise RuntimeError(f"{name} ended though nobody asked for it")


async def _stop_worker(worker: Worker, stop: asyncio.Event) -> None:
    await stop.wait()
    await worker.shutdown()


async def main() -> None:
    settings = Settings()
    assert settings.postgres.url is not None, "ARCHON_POSTGRES__URL is set by the supervisor"
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    db = Database(settings.postgres.url.get_secret_value(), settings.postgres.pool_size)
    client = await connect(settings, stop)
    if client is not None:
        await run(client, db, settings, stop)
    await db.close()


if __name__ == "__main__":
    exit_now(main)
