from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.fs import FileSystem
from kvfs.images.format import ImageFormat
from kvfs.pages.pool import PagePool
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore
from tests.kvfs.mounted import Mount, mounted


@pytest.fixture
def facts() -> FakeFacts:
    return FakeFacts()


@pytest.fixture
def store(facts: FakeFacts) -> FakeStore:
    return FakeStore(facts, num_pages=16)


@pytest.fixture
def pool(store: FakeStore) -> PagePool:
    return PagePool(store)


@pytest.fixture
def fs(pool: PagePool, facts: FakeFacts, tmp_path: Path) -> Iterator[FileSystem]:
    """A file system whose root all users may write to. Its accounts are checked after the test."""
    fs = FileSystem(pool, facts, tmp_path / "backing", 0, 0)
    fs.volume.tree.root.mode = 0o777
    yield fs
    fs.check()


@pytest.fixture
def image_format(facts: FakeFacts) -> ImageFormat:
    return ImageFormat(facts)


@pytest.fixture
def decoder(store: FakeStore) -> FakeDecoder:
    return FakeDecoder(store)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    base = tmp_path_factory.mktemp("mount")
    for directory in (base, *base.parents[:2]):  # lets other users in: only the mount's modes may stop them
        directory.chmod(0o755)
    with mounted(base) as mount:
        yield mount


@pytest.fixture
def mount(served: Mount) -> Iterator[Mount]:
    """An empty mount. After the test it can be emptied, and every page is free."""
    yield served
    served.empty()
    assert served.all_free(), "the test leaks pages"
