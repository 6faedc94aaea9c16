# ruff: noqa: PTH116 - the system calls themselves are what is tested here
"""Calls on the mount that wait: a signal ends them at once, they leave nothing, and nobody else waits for them."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvfs.mounted import CommandFailed, Mount, a_kv_file, check_image, mounted, needs_mount, opened, wait_until

pytestmark = [needs_mount, pytest.mark.slow]

SLOW_PAGE_S = 0.1
NUM_SLOW_PAGES = 100
"""Together ten seconds of work: whatever is seen to end long before was interrupted."""


@pytest.fixture
def busy(mount: Mount) -> Iterator[Mount]:
    """A mount with a file `f`, beside a model that seems to compute."""
    (mount.path / "f").touch()
    mount.call("set_busy", True)
    yield mount
    mount.call("set_busy", False)


def start(mount: Mount, *command: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OUT": str(mount.outside)}
    return subprocess.Popen(command, cwd=mount.path, env=environment, stderr=subprocess.PIPE, stdout=stdout)


def start_sh(mount: Mount, command: str) -> subprocess.Popen[bytes]:
    return start(mount, "bash", "-c", f"exec {command}")


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send the signal, which must end it."""
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number


def is_hashing(mount: Mount) -> bool:
    return mount.call("num_worker_pages") > 1


@pytest.mark.parametrize(
    ("command", "number"),
    [("cat 0<> a.kv", signal.SIGINT), ("cat a.kv", signal.SIGKILL)],
    ids=["past the page cache", "by the page cache"],
)
def test_a_signal_ends_a_reader_whose_file_is_being_hashed(mount: Mount, command: str, number: signal.Signals) -> None:
    """The kernel reads ahead on nobody's behalf, so the hashing goes on; whoever waited for it does not."""
    a_kv_file(mount, count=32 * NUM_SLOW_PAGES)
    mount.call("slow_down", SLOW_PAGE_S)
    try:
        reader = start_sh(mount, command)
        wait_until(lambda: is_hashing(mount))
        end(reader, number)
        assert mount.call("num_worker_pages") < NUM_SLOW_PAGES
    finally:
        mount.call("slow_down", 0)
    check_image((mount.path / "a.kv").read_bytes(), 32 * NUM_SLOW_PAGES)


def test_a_signal_ends_a_wait_for_a_lock(mount: Mount) -> None:
    with opened(mount.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        waiter = start_sh(mount, "flock f true")
        wait_until(lambda: mount.call("num_lock_waiters", "f") == 1)
        end(waiter, signal.SIGINT)
        wait_until(lambda: mount.call("num_lock_waiters", "f") == 0)
        assert mount.call("num_locks") == 1
    wait_until(lambda: mount.call("num_locks") == 0)


def test_a_shell_and_a_program_exclude_each_other(mount: Mount) -> None:
    a_kv_file(mount)
    mount.call("lock", "a.kv", "a LIP")
    assert mount.run("flock -n a.kv true").returncode == 1
    waiter = start_sh(mount, "flock a.kv true")
    wait_until(lambda: mount.call("num_lock_waiters", "a.kv") == 1)
    assert waiter.poll() is None
    mount.call("unlock", "a.kv", "a LIP")
    waiter.communicate(timeout=20)
    assert waiter.returncode == 0
    with opened(mount.path / "a.kv") as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        with pytest.raises(CommandFailed) as refusal:
            mount.call("lock", "a.kv", "a LIP")
        assert refusal.value.errno == errno.EWOULDBLOCK
        fcntl.flock(fd, fcntl.LOCK_UN)
        mount.call("lock", "a.kv", "a LIP")
        mount.call("unlock", "a.kv", "a LIP")
    assert mount.call("num_locks") == 0


def test_a_lock_is_the_open_files_and_goes_with_its_last_descriptor(mount: Mount) -> None:
    path = mount.path / "f"

    def taken(fd: int, operation: int) -> bool:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    with opened(path, os.O_CREAT | os.O_RDWR) as one, opened(path) as two, opened(path) as three:
        assert taken(one, fcntl.LOCK_SH)
        assert taken(two, fcntl.LOCK_SH)
        assert not taken(three, fcntl.LOCK_EX)
        assert not taken(two, fcntl.LOCK_EX)  # and with that, `two` has lost what it had
        assert taken(one, fcntl.LOCK_EX)
        copy = os.dup(one)
        assert taken(copy, fcntl.LOCK_EX)
        os.close(copy)
        assert not taken(two, fcntl.LOCK_SH)
        fcntl.lockf(two, fcntl.LOCK_SH)  # a POSIX lock is another matter
    with opened(path) as again:
        assert taken(again, fcntl.LOCK_EX)
    wait_until(lambda: mount.call("num_locks") == 0)


# Beside a model that computes


def test_while_the_model_computes_a_storm_is_answered_all_the_same(busy: Mount) -> None:
    """More requests than may come at once: they are put off, not lost, and every answer is its own request's."""
    busy.sh("mkdir d; cd d; for i in $(seq 60); do : > n$i; done; ln -s target link")
    names = busy.sh("ls -l d; stat -c %n d/n7 d/link; readlink d/link; mv d/n7 d/m7; test -e d/m7 && ! test -e d/n7")
    assert len(names.splitlines()) == 65
    assert names.endswith("target\n")
    busy.sh("cd d; for i in 1 2 3; do echo $i > n$i; [ $(cat n$i) = $i ]; done; ! cat none 2>/dev/null")


_STORM = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.SIG_DFL)
def ask():
    while True:
        os.stat("f")
for _ in range(400): threading.Thread(target=ask).start()
"""


def test_a_signal_ends_requests_that_were_put_off(busy: Mount) -> None:
    """None of them waits for its turn: between signal and end far fewer are admitted than were waiting."""
    storm = start(busy, sys.executable, "-c", _STORM)
    status = Path(f"/proc/{storm.pid}/status")
    wait_until(lambda: "Threads:\t401\n" in status.read_text())
    first = busy.call("num_paced")
    wait_until(lambda: busy.call("num_paced") > first + 400)
    before = busy.call("num_paced")
    end(storm, signal.SIGKILL)
    assert busy.call("num_paced") - before < 200
    busy.sh("ls -l")


def test_what_moves_bytes_is_not_paced_while_the_model_computes(busy: Mount) -> None:
    """Nor what the kernel asks by the way: an open file's attributes at a read, its capabilities at a write."""
    piece = bytes(4096)
    with opened(busy.path / "f", os.O_RDWR) as fd:
        for _ in range(32):  # the first few may be admitted without a look
            os.stat(busy.path / "f")
        num_paced = busy.call("num_paced")
        assert num_paced > 0
        for i in range(100):
            os.pwrite(fd, piece, i * len(piece))
            assert os.pread(fd, len(piece), i * len(piece)) == piece
        assert busy.call("num_paced") == num_paced


# The kernel's memory of names


def test_the_kernel_forgets_a_file_that_a_program_has_removed(mount: Mount) -> None:
    """The owner pays for the inode until the kernel forgets it."""
    mount.sh("touch x; rm x")  # a removal of the kernel's own comes before
    wait_until(lambda: mount.call("num_inodes") == 1)
    mount.call("close", mount.call("create", "seen.kv"))
    (mount.path / "seen.kv").stat()
    mount.call("remove", "seen.kv")
    wait_until(lambda: mount.call("num_inodes") == 1)


def test_an_unmount_does_not_wait_until_the_kernel_has_forgotten_removed_names(tmp_path: Path) -> None:
    with mounted(tmp_path) as mount:
        mount.sh("mkdir d")
        mount.call("make_many", "d", 500)
        mount.sh("ls -l d")
        mount.call("unmake_many", "d")
    assert "OSError" not in mount.log()
