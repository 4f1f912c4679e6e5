"""Fixtures of the gateway's tests: one gateway for all of them, a tenant for each."""

import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.kit import ENGINE_TOKEN, World, running
from tests.kit.scripted_engine import ScriptedEngine
from tests.kit.stack import Databases


@pytest.fixture(scope="session")
async def shared(
    databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """A gateway without any policy."""
    url = databases.create()
    async with running(url, tmp_path_factory.mktemp("gateway")) as made:
        yield made


@pytest.fixture
def world(shared: World) -> World:
    """The same, seen by a tenant of this test's own."""
    return dataclasses.replace(shared, tenant=f"t-{secrets.token_hex(4)}")


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(version=3, token=ENGINE_TOKEN, max_model_len=4096) as made:
        yield made


@pytest.fixture
async def ready(world: World, engine: ScriptedEngine) -> World:
    """A gateway with one policy and one replica of it."""
    await world.policy()
    await world.replica(engine)
    return world
