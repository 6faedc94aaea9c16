from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import Mount


@pytest.fixture(scope="session")
def _twins(served: Mount, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    right = tmp_path_factory.mktemp("right")
    for directory in (right, *right.parents[:2]):
        directory.chmod(0o755)
    options = "noatime,nosuid,nodev,mode=755"  # as the mount, where a read does not change atime
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", right], check=True)
    try:
        twins = Twins(right, served.path)
        yield twins
        twins.stop()
    finally:
        subprocess.run(["umount", "-l", right], check=True)


@pytest.fixture
def twins(_twins: Twins, mount: Mount) -> Iterator[Twins]:
    """Yield both file systems, empty. After the test the mount's accounts must balance and its pages be free."""
    yield _twins
    mount.call("clear")
