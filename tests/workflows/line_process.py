"""The line as a process that may be killed.

``python -m tests.workflows.line_process URL ADDRESS TAG``
"""

import asyncio
import sys

from temporalio.client import Client

from activities.workers import exit_now
from archon.storage import Database
from tests.workflows.line import running_line
from tests.workflows.scene import Scene


async def main() -> None:
    url, address, tag = sys.argv[1:]
    client = await Client.connect(address)
    async with running_line(client, Scene(Database(url), tag), tag):
        await asyncio.Event().wait()


if __name__ == "__main__":
    exit_now(main)
