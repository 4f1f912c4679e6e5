"""One Postgres database: its engine, its transactions and its notifications.

Invariant: ``synchronous_commit`` is on in every connection, so what was committed survives a crash.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

READY_CHANNEL = "archon_ready"
"""Notified with ``tenant/policy``: samples are ready, a version was committed or promoted."""

OUTBOX_CHANNEL = "archon_outbox"
"""Notified when an outbox entry was written."""

OPTIONS = "-c synchronous_commit=on -c timezone=UTC"


def async_url(url: str) -> sa.URL:
    """A ``postgresql://`` URL as SQLAlchemy wants it for psycopg 3."""
    return sa.make_url(url).set(drivername="postgresql+psycopg")


def libpq_url(url: str) -> str:
    """The same URL for psycopg itself."""
    return sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


class Database:
    """A pool of connections. ``url`` is ``postgresql://…``, sockets by ``?host=/folder``."""

    def __init__(self, url: str, pool_size: int = 8) -> None:
        self.url = url
        self.engine: AsyncEngine = create_async_engine(
            async_url(url),
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_timeout=5,
            pool_pre_ping=False,
            connect_args={"options": OPTIONS, "connect_timeout": 3},
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: committed at the end of the block, rolled back by an exception."""
        async with self.engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading."""
        async with self.engine.connect() as connection:
            yield connection

    async def close(self) -> None:
        await self.engine.dispose()


async def notify(connection: AsyncConnection, channel: str, payload: str = "") -> None:
    """NOTIFY, delivered when the transaction commits."""
    await connection.execute(
        sa.text("SELECT pg_notify(:channel, :payload)"), {"channel": channel, "payload": payload}
    )


class Listener:
    """A wake-up from LISTEN; a hint only: whoever waits looks at the rows after each return."""

    def __init__(self, url: str, channel: str) -> None:
        self._url, self._channel = libpq_url(url), channel
        self._connection: psycopg.AsyncConnection[tuple[object, ...]] | None = None

    async def __aenter__(self) -> "Listener":
        self._connection = await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=3
        )
        await self._connection.execute(f'LISTEN "{self._channel}"')
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def wait(self, timeout: float) -> list[str]:
        """Payloads that came within ``timeout`` seconds; returns at the first, maybe with more."""
        assert self._connection is not None, "used outside of its async with"
        payloads = [
            note.payload async for note in self._connection.notifies(timeout=timeout, stop_after=1)
        ]
        await asyncio.sleep(0)
        return payloads
