from pathlib import Path

import pytest

from tests.kvfs.durable.damage import copy_of, make_state


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drained state that contains an object of every kind. Tests must not change it."""
    directory = tmp_path_factory.mktemp("state")
    make_state(directory)
    return directory


@pytest.fixture
def state(sound: Path, tmp_path: Path) -> Path:
    """A copy of `sound` that the test may change."""
    return copy_of(sound, tmp_path / "state")
