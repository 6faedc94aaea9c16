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
    options = "noatime,nosuid,nodev,mode=755"  # as the mount, which moves no atime when a file is read
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", right], check=True)
    try:
        twins = Twins(right, served.path)
        yield twins
        twins.stop()
    finally:
        subprocess.run(["umount", "-l", right], check=True)


@pytest.fixture
def twins(_twins: Twins, mount: Mount) -> Iterator[Twins]:
    """Both file systems, empty; afterwards the mount's books are right and its pages free."""
    yield _twins
    mount.call("clear")
