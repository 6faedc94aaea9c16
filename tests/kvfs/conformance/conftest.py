import subprocess
from collections.abc import Iterator

import pytest

from kvfs.fs import FileSystem
from tests.kvfs.conformance.sides import Gate, Kernel
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import Mount


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    path = tmp_path_factory.mktemp("right")
    for directory in (path, *path.parents[:2]):
        directory.chmod(0o755)
    options = "noatime,nosuid,nodev,mode=755"  # as the mount, where a read does not change atime
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield Kernel(path)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="session")
def ours(served: Mount) -> Kernel:
    return Kernel(served.path)


@pytest.fixture
def twins(right: Kernel, ours: Kernel, mount: Mount) -> Iterator[Twins]:
    """Yield tmpfs and the mount, empty. After the test the mount's accounts must balance and its pages be free."""
    yield Twins(right, ours)
    mount.call("clear")


@pytest.fixture
def gate_twins(right: Kernel, fs: FileSystem) -> Twins:
    """The same with the file system that programs reach by calls."""
    fs.volume.tree.root.mode = 0o755
    return Twins(right, Gate(fs), is_brief=True)
