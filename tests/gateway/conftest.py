"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.gateway.kit import ENGINE_TOKEN, World, running
from tests.kit.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.stack


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A gateway without any policy."""
    async with running(database_url, tmp_path) as made:
        yield made


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
