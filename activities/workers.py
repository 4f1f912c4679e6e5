"""How a worker process of ours is made, and how it ends.

Invariant: a worker that was killed is noticed in seconds: by its heartbeats, which are sent at most
half a second late, and by the sticky queue's short timeout.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.common import WorkerDeploymentVersion
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkerDeploymentConfig

import archon
from archon.records.messages import main_queue
from archon.settings import Settings

log = logging.getLogger(__name__)

# Without a version of ours the SDK hashes every loaded module to make one up.
DEPLOYMENT = WorkerDeploymentConfig(
    version=WorkerDeploymentVersion("archon", archon.__version__), use_worker_versioning=False
)


async def connect(settings: Settings, stop: asyncio.Event) -> Client | None:
    """A client as soon as Temporal answers; None where ``stop`` comes first."""
    address = settings.temporal.address or f"127.0.0.1:{settings.temporal.port}"
    while not stop.is_set():
        try:
            return await Client.connect(address, namespace=settings.temporal.namespace)
        except (RPCError, RuntimeError) as error:
            log.warning("Temporal at %s: %s", address, error)
        await asyncio.sleep(0.3)
    return None


def activity_methods(*owners: object) -> list[Callable[..., Any]]:
    """The methods of the given objects that are activities."""
    return [
        method
        for owner in owners
        for name in dir(owner)
        if hasattr(method := getattr(owner, name), "__temporal_activity_definition")
    ]


def make_worker(
    client: Client,
    queue_prefix: str,
    workflows: Sequence[type],
    activities: Sequence[Callable[..., Any]],
) -> Worker:
    """The worker of the main queue."""
    return Worker(
        client,
        task_queue=main_queue(queue_prefix),
        workflows=workflows,
        activities=activities,
        # The sandbox imports a workflow's module anew for each run: 5 ms of a session's 25. The
        # replayed histories run in it.
        workflow_runner=UnsandboxedWorkflowRunner(),
        deployment_config=DEPLOYMENT,
        max_cached_workflows=1000,
        # A group that waits for admission holds a slot, and must not keep the next batch from one.
        max_concurrent_activities=2000,
        max_concurrent_local_activities=16,
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=2),
        max_heartbeat_throttle_interval=timedelta(seconds=0.5),
        default_heartbeat_throttle_interval=timedelta(seconds=0.5),
    )


def exit_now(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run and leave without the interpreter's teardown, in which the SDK's threads crash."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    code = 0
    try:
        asyncio.run(work())
    except BaseException:  # the process ends here, whatever it was
        log.exception("the process ends")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
