"""The gateway's way to the database: bounded waiting, and one kind of error when it is away.

Invariant: work that was begun is never cut off in its middle by a client that leaves; what could
not be known to be committed is reported as 503 and acknowledged to nobody. Nothing is repeated
that may have been committed, unless its caller says that repeating is harmless.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from archon.storage.direct import Direct, DirectPool
from gateway.errors import ApiError, unavailable

T = TypeVar("T")
Work = Callable[[Direct], Awaitable[T]]

log = logging.getLogger("archon.gateway")
PAUSE = 0.1
PATIENCE_WHEN_AWAY = 0.3


def applied(work: Callable[..., Awaitable[T]], *arguments: object) -> Work[T]:
    """Work that takes more than its connection, with what it takes."""
    return lambda c: work(c, *arguments)


class Rows:
    """Runs work on connections. ``patience`` bounds, in seconds, how long a caller waits.

    ``away``: the last work found no database; the next is told so sooner.
    """

    def __init__(self, url: str, pool_size: int, patience: float = 2.5) -> None:
        self.patience = patience
        self.away = False
        self._pool = DirectPool(url, pool_size)
        self._running: set[asyncio.Task[object]] = set()

    async def statement(self, work: Work[T]) -> T:
        """Work whose every statement commits by itself and may harmlessly be repeated."""

        async def attempt() -> T:
            async with self._pool.connect() as c:
                return await work(c)

        return await self._bounded(attempt, lambda: False)

    async def transaction(self, work: Work[T]) -> T:
        """Work in one transaction; repeated only while COMMIT was not tried."""
        committing = False

        async def attempt() -> T:
            nonlocal committing
            async with self._pool.transaction() as c:
                result = await work(c)
                committing = True
            return result

        return await self._bounded(attempt, lambda: committing)

    async def close(self) -> None:
        await self._pool.forget()

    async def _bounded(self, attempt: Callable[[], Awaitable[T]], final: Callable[[], bool]) -> T:
        task = asyncio.ensure_future(self._insist(attempt, final))
        self._running.add(task)
        task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=self.patience + PAUSE)
        if not done:
            self.away = True
            raise _away("it does not answer")
        return task.result()

    async def _insist(self, attempt: Callable[[], Awaitable[T]], final: Callable[[], bool]) -> T:
        patience = PATIENCE_WHEN_AWAY if self.away else self.patience
        deadline = time.monotonic() + patience
        while True:
            try:
                result = await attempt()
                self.away = False
                return result
            except psycopg.DataError as error:
                raise ApiError(422, f"the database cannot hold this: {error}") from error
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                await self._pool.forget()
                if final() or time.monotonic() + PAUSE > deadline:
                    self.away = True
                    raise _away(str(error).strip().split("\n")[0]) from error
            await asyncio.sleep(PAUSE)

    def _ended(self, task: "asyncio.Task[object]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) and isinstance(error, ApiError):
            log.warning("%s", error.message)


def _away(reason: str) -> ApiError:
    return unavailable(f"the database is away ({reason}): nothing was stored; try again shortly")
