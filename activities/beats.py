"""Heartbeats of an activity while it waits for something that has no beat of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity


@asynccontextmanager
async def heartbeats(details: object = None, every: float = 1.0) -> AsyncIterator[None]:
    """Heartbeat with what ``details`` holds then, first after ``every`` seconds."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(every)
            activity.heartbeat(details)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
