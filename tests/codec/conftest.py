from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from archon.codec import Codec
from tests.codec.models import write_model

Loader = Callable[[str], Codec]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(family: str) -> Path:
        return write_model(tmp_path_factory.mktemp(family), family)

    return folder


@pytest.fixture(scope="session")
def codec(model_folder: Callable[[str], Path]) -> Loader:
    """The codec of a family, loaded once."""

    @cache
    def load(family: str) -> Codec:
        return Codec.load(model_folder(family))

    return load
