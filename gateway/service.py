"""What the routes of one gateway process share.

Invariant: nothing here is needed after a restart; what matters is in Postgres.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from archon.records import Clock, IdSource, random_id, system_clock
from archon.settings import Settings
from gateway import metrics
from gateway.auth import Keyring
from gateway.catalog import Catalog
from gateway.errors import ApiError
from gateway.history import History
from gateway.pool import ReplicaPool
from gateway.rows import Rows
from gateway.secrets import engine_token, operator_hash
from gateway.slots import Slots


@dataclass
class Service:
    settings: Settings
    rows: Rows
    keyring: Keyring
    slots: Slots
    catalog: Catalog
    pool: ReplicaPool
    history: History
    clock: Clock
    new_id: IdSource
    inflight: int = 0
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A place for one call, or a 429."""
        if self.inflight >= self.settings.gateway.max_inflight:
            raise ApiError(
                429,
                f"{self.inflight} calls are running here already: try again shortly",
                code="too_many_calls",
                retry_after=1,
            )
        self.inflight += 1
        metrics.INFLIGHT.set(self.inflight)
        try:
            yield
        finally:
            self.inflight -= 1
            metrics.INFLIGHT.set(self.inflight)

    async def end_calls(self, grace: float) -> None:
        """Give running calls ``grace`` seconds, then break them off: their rows are kept."""
        deadline = time.monotonic() + grace
        while self.calls and time.monotonic() < deadline:
            await asyncio.wait(self.calls, timeout=deadline - time.monotonic())
        for call in self.calls:
            call.cancel()
        while self.calls:
            await asyncio.wait(self.calls)


def build(settings: Settings, clock: Clock = system_clock, new_id: IdSource = random_id) -> Service:
    """ValueError where the settings cannot be served safely."""
    url = settings.postgres.url
    if url is None:
        raise ValueError(
            "ARCHON_POSTGRES__URL is not set: start the gateway by 'archon up', or name a database"
        )
    rows = Rows(url.get_secret_value(), settings.postgres.pool_size)
    return Service(
        settings=settings,
        rows=rows,
        keyring=Keyring(rows, clock, operator_hash(settings), settings.tenant),
        slots=Slots(rows),
        catalog=Catalog(rows),
        pool=ReplicaPool(rows, lambda: engine_token(settings)),
        history=History(rows),
        clock=clock,
        new_id=new_id,
    )
