"""Fixtures for all rooms. Servers start at their first use and are shared by the session."""

import atexit
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from temporalio.client import Client

    from archon.storage import Database
    from tests.kit.stack import Databases


def _let_temporal_threads_end() -> None:
    if "temporalio" in sys.modules:  # else about half of all exits abort in the SDK's threads
        time.sleep(0.1)


atexit.register(_let_temporal_threads_end)


_SERVERS = {"databases", "temporal_address"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses a server belongs to the group ``stack``, said or not."""
    for item in items:
        if _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("stack")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test is a failed one: what it wanted should have been there."""
    report = yield
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be: {reason}"
    return report


@pytest.fixture(scope="session")
def databases() -> "Iterator[Databases]":
    """A running PostgreSQL with a migrated template."""
    from tests.kit.stack import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture
def database_url(databases: "Databases") -> Iterator[str]:
    """The URL of a database of this test's own, migrated and empty."""
    url = databases.create()
    yield url
    databases.drop(url)


@pytest.fixture
async def database(database_url: str) -> "AsyncIterator[Database]":
    """The same as a :class:`archon.storage.Database`."""
    from archon.storage import Database

    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def temporal_address() -> Iterator[str]:
    """host:port of a Temporal dev server."""
    from tests.kit.stack import temporal_server

    with temporal_server() as address:
        yield address


@pytest.fixture(scope="session")
async def temporal(temporal_address: str) -> "Client":
    """A client of it, with the search attributes registered."""
    from archon.stack.temporal import connect, register_search_attributes

    client = await connect(temporal_address, "default", timeout=20)
    await register_search_attributes(client)
    return client


@pytest.fixture
def queue_prefix() -> str:
    """A task-queue prefix of this test's own."""
    return f"t{secrets.token_hex(4)}"
