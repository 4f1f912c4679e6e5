"""The same statements without SQLAlchemy's machinery, for a process whose every call pays for it.

A :class:`Direct` stands in for an ``AsyncConnection`` where only ``text`` statements are executed
and rows are read by name: a third of the CPU. Invariant: outside of :meth:`DirectPool.transaction`
every statement commits by itself; a connection whose state is not known is never used again.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.rows import namedtuple_row
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.storage.database import OPTIONS, libpq_url

_PARAMETER = re.compile(r"(?<!:):([a-z_0-9]+)")


@lru_cache(maxsize=256)
def _native(statement: str) -> bytes:
    """``:name`` as psycopg writes it."""
    return _PARAMETER.sub(r"%(\1)s", statement).encode()


class Rows:
    """The rows of one statement."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def one(self) -> Any:
        assert len(self._rows) == 1, f"{len(self._rows)} rows where one was expected"
        return self._rows[0]

    def one_or_none(self) -> Any:
        return self.one() if self._rows else None


class Direct:
    """One connection."""

    def __init__(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        self.raw = connection

    async def execute(self, statement: sa.TextClause, values: dict[str, Any] | None = None) -> Rows:
        cursor = self.raw.cursor()
        await cursor.execute(_native(statement.text), values)
        return Rows(await cursor.fetchall() if cursor.description else [])


Connection = AsyncConnection | Direct
"""What the storage functions of a gateway take."""


class DirectPool:
    """At most ``size`` connections, opened when they are needed."""

    def __init__(self, url: str, size: int) -> None:
        self._url = libpq_url(url)
        self._places = asyncio.Semaphore(size)
        self._idle: list[Direct] = []

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Direct]:
        async with self._places:
            connection = self._idle.pop() if self._idle else await self._open()
            try:
                yield connection
            finally:
                await self._release(connection)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Direct]:
        """Committed at the end of the block, rolled back by an exception."""
        async with self.connect() as connection, connection.raw.transaction():
            yield connection

    async def forget(self) -> None:
        """Close what is idle: after one connection was lost, the others most likely are."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.raw.close()

    async def _open(self) -> Direct:
        return Direct(
            await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                row_factory=namedtuple_row,
                options=OPTIONS,
                connect_timeout=3,
            )
        )

    async def _release(self, connection: Direct) -> None:
        status = connection.raw.info.transaction_status
        if status == psycopg.pq.TransactionStatus.IDLE and not connection.raw.closed:
            self._idle.append(connection)
        else:
            await connection.raw.close()
