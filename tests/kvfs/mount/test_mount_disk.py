# ruff: noqa: PTH116 - the system calls themselves are what is tested here
"""Programs on the mount while the disk below plain files hangs or is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kvfs.mounted import Mount, mounted, needs_mount, opened

pytestmark = [needs_mount, pytest.mark.slow]

DEADLINE_S = 2.0


@pytest.fixture(scope="module")
def served_in_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("disk"), disk_deadline_s=DEADLINE_S) as mount:
        yield mount


@pytest.fixture
def mount(served_in_time: Mount) -> Iterator[Mount]:
    yield served_in_time
    served_in_time.call("mend_disk")
    served_in_time.empty()


def hang(mount: Mount, name: str, *calls: str) -> None:
    mount.call("stall_disk", calls, os.stat(mount.path / name).st_ino)


def wait_stalled(mount: Mount) -> None:
    end_s = time.monotonic() + 20
    while not mount.call("has_stalled"):
        assert time.monotonic() < end_s, "no call has come to the disk"


def test_a_hung_write_is_an_error_in_time_and_everything_else_goes_on(mount: Mount) -> None:
    mount.sh("echo old > a; echo other > b")
    hang(mount, "a", "pwritev")
    with opened(mount.path / "a", os.O_RDWR) as fd, ThreadPoolExecutor() as workers:
        began_s = time.monotonic()
        write = workers.submit(os.pwrite, fd, b"new\n", 0)
        wait_stalled(mount)
        # No shell: the child would close its copy of the descriptor, and that waits for the write.
        assert os.stat(mount.path / "a").st_size == 4
        (mount.path / "b").write_text("more\n")
        assert (mount.path / "b").read_text() == "more\n"
        assert not write.done()
        with pytest.raises(OSError, match="timed out") as caught:
            write.result()
        assert caught.value.errno == errno.ETIMEDOUT
        assert time.monotonic() - began_s < 10 * DEADLINE_S
        assert os.pread(fd, 10, 0) == b"old\n"
        mount.call("check")
        mount.call("mend_disk")
        while os.pread(fd, 10, 0) != b"new\n":
            assert time.monotonic() - began_s < 60, "what was written does not show"
    assert mount.sh("cat a") == "new\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_waits_for_a_hung_disk_can_be_ended(mount: Mount, number: int) -> None:
    mount.sh("echo old > a")
    hang(mount, "a", "pwritev")
    with subprocess.Popen(["sh", "-c", "exec cat >> a"], cwd=mount.path, stdin=subprocess.PIPE) as program:
        assert program.stdin is not None
        program.stdin.write(bytes(100))
        program.stdin.close()
        wait_stalled(mount)
        began_s = time.monotonic()
        program.send_signal(number)
        assert program.wait(20) == -number
        assert time.monotonic() - began_s < 2 * DEADLINE_S


def test_a_file_that_the_disk_holds_up_can_be_removed_renamed_and_emptied(mount: Mount) -> None:
    mount.sh("echo old > a; echo old > b")
    hang(mount, "a", "pwritev", "ftruncate")
    with pytest.raises(OSError, match="timed out"):
        os.truncate(mount.path / "a", 2)
    assert mount.sh("mv a c; cat c; : > c; stat -c %s c; rm c; ls") == "ol0\nb\n"


def test_a_full_disk_is_enospc(mount: Mount) -> None:
    mount.sh("echo old > a")
    mount.call("fail_disk", "pwritev", errno.ENOSPC)
    assert "No space left on device" in mount.run("echo more >> a").stderr
    mount.call("mend_disk")
    assert mount.sh("cat a") == "old\n"
    mount.call("check")


def test_a_mount_ends_while_its_disk_hangs(tmp_path: Path) -> None:
    with mounted(tmp_path, disk_deadline_s=DEADLINE_S) as mount:
        mount.sh("echo old > a")
        hang(mount, "a", "pwritev", "unlink")
        assert "Connection timed out" in mount.run("echo new >> a").stderr
    assert "does not answer: backing files stay there" in mount.log()
