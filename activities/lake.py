"""The compactor: sealed sessions go to the lake, a file of many at a time.

Invariant: it can be killed anywhere and started anywhere, any number of times at once; see
``archon/storage/lake.py`` for why nothing is written twice or lost.
"""

import asyncio
import logging

from sqlalchemy.exc import SQLAlchemyError

from archon.failpoints import failpoint
from archon.records import system_clock
from archon.settings import Settings
from archon.storage import Database, lake

log = logging.getLogger(__name__)

SESSIONS_PER_FILE = 1000


async def compact(db: Database, store: lake.Lake, limit: int = SESSIONS_PER_FILE) -> int:
    """Write one file; returns how many sessions it has, 0 where none waits."""
    async with db.begin() as c:
        if not await lake.try_lock(c):
            return 0
        if aside := await asyncio.to_thread(store.aside):
            await asyncio.to_thread(store.mend, await lake.named_among(c, aside))
        batch = await lake.next_batch(c, limit)
        if batch is None:
            return 0
        tables = await lake.read_tables(c, batch)
        await asyncio.to_thread(store.write_aside, batch, tables)
        failpoint("lake.before_commit")
        await lake.record(c, batch, system_clock())
    failpoint("lake.after_commit")
    await asyncio.to_thread(store.publish, batch.file)
    return len(batch.sessions)


async def run_compactor(db: Database, settings: Settings) -> None:
    """Compact every ``lake_interval`` seconds until cancelled; what fails is tried again."""
    store = lake.Lake(settings.lake_url)
    while True:
        await asyncio.sleep(settings.lake_interval)
        try:
            while await compact(db, store) == SESSIONS_PER_FILE:
                pass
        except (SQLAlchemyError, OSError) as error:
            log.warning("compaction is tried again in %s s: %s", settings.lake_interval, error)
