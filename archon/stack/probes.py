"""How a process of the stack shows that it can do its work, not only that it exists."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from temporalio.client import Client

_TIMEOUT_S = 2.0


def postgres_answers(url: str) -> Callable[[float], Awaitable[bool]]:
    """SELECT 1 works: a zombie or a server in recovery does not pass."""

    async def probe(_: float) -> bool:
        try:
            connection = await psycopg.AsyncConnection.connect(url, connect_timeout=2)
            async with connection:
                await connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    return probe


def http_answers(host: str, port: int, path: str = "/health") -> Callable[[float], Awaitable[bool]]:
    """An HTTP answer below 500."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()

    async def probe(_: float) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(request)
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        words = line.split()
        return len(words) >= 2 and words[1].isdigit() and int(words[1]) < 500

    return probe


def port_listens(host: str, port: int) -> Callable[[float], Awaitable[bool]]:
    """Something accepts connections there."""

    async def probe(_: float) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                writer = (await asyncio.open_connection(host, port))[1]
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    return probe


def queue_is_polled(
    client: Callable[[], "Client"], queue: str, *, workflows: bool
) -> Callable[[float], Awaitable[bool]]:
    """A worker that came after the start asks this queue for tasks."""

    async def probe(started_at: float) -> bool:
        from temporalio.api.enums.v1 import TaskQueueType
        from temporalio.api.taskqueue.v1 import TaskQueue
        from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
        from temporalio.service import RPCError

        kind = "WORKFLOW" if workflows else "ACTIVITY"
        request = DescribeTaskQueueRequest(
            namespace=client().namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=TaskQueueType.Value(f"TASK_QUEUE_TYPE_{kind}"),
        )
        try:
            answer = await client().workflow_service.describe_task_queue(
                request, retry=False, timeout=timedelta(seconds=_TIMEOUT_S)
            )
        except RPCError:
            return False
        latest = max((p.last_access_time.ToMicroseconds() for p in answer.pollers), default=0)
        return latest / 1e6 > started_at

    return probe


async def eventually(probe: Callable[[float], Awaitable[bool]], timeout: float) -> bool:
    """Whether the probe passes within ``timeout`` seconds."""
    start, deadline = time.time(), time.monotonic() + timeout
    while not await probe(start):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
