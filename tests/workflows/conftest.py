import pytest

from archon.storage import Database
from tests.workflows.scene import Scene


@pytest.fixture
def scene(database: Database) -> Scene:
    return Scene(database)
