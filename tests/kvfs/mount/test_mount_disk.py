# ruff: noqa: PTH116 - the system calls themselves are what is tested here
"""Programs on the mount while the disk below plain files hangs: test_disk_work.py has each request, and signals."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kvfs.mounted import Mount, mounted, needs_mount, opened, wait_until

pytestmark = [needs_mount, pytest.mark.slow]

DEADLINE_S = 0.7


@pytest.fixture
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """A mount of its own, which ends while its disk hangs."""
    with mounted(tmp_path_factory.mktemp("disk"), disk_deadline_s=DEADLINE_S) as mount:
        yield mount
        mount.sh("echo old > last")
        hang(mount, "last", "pwritev", "unlink")
        assert "Connection timed out" in mount.run("echo new >> last").stderr
    assert "does not answer: backing files stay there" in mount.log()


def hang(mount: Mount, name: str, *calls: str) -> None:
    mount.call("stall_disk", calls, os.stat(mount.path / name).st_ino)


def test_a_hung_disk_is_an_error_in_time_and_everything_else_goes_on(mount: Mount) -> None:
    mount.sh("echo old > a; echo other > b")
    hang(mount, "a", "pwritev", "ftruncate")
    with opened(mount.path / "a", os.O_RDWR) as fd, ThreadPoolExecutor() as workers:
        write = workers.submit(os.pwrite, fd, b"new\n", 0)
        wait_until(lambda: mount.call("has_stalled"))
        # No shell: the child would close its copy of the descriptor, and that waits for the write.
        assert os.stat(mount.path / "a").st_size == 4
        (mount.path / "b").write_text("more\n")
        assert (mount.path / "b").read_text() == "more\n"
        assert not write.done()
        with pytest.raises(OSError, match="timed out") as caught:
            write.result()
        assert caught.value.errno == errno.ETIMEDOUT
        assert os.pread(fd, 10, 0) == b"old\n"
        mount.call("check")
        mount.call("mend_disk")
        wait_until(lambda: os.pread(fd, 10, 0) == b"new\n")
    assert mount.sh("cat a; mv a c; cat c; : > c; stat -c %s c; rm c; ls") == "new\nnew\n0\nb\n"
