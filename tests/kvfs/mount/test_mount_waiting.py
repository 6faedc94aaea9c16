# ruff: noqa: PTH116, PTH123 - the system calls themselves are what is tested here
"""Calls on the mount that wait: a signal ends them at once, they leave nothing, and nobody else waits for them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kvfs.mounted import (
    NUM_PAGES,
    CommandFailed,
    Mount,
    a_kv_file,
    check_image,
    mounted,
    needs_mount,
    opened,
)

pytestmark = [needs_mount, pytest.mark.slow]

NUM_WAITERS = 500
SLOW_PAGE_S = 0.1
NUM_SLOW_PAGES = 100
"""Together ten seconds of work: whatever is seen to end long before was interrupted."""


@pytest.fixture
def slow(mount: Mount) -> Iterator[Mount]:
    """A mount with a KV file `a.kv` of many pages, where workers take long for each."""
    a_kv_file(mount, count=32 * NUM_SLOW_PAGES)
    yield mount
    mount.call("slow_down", 0)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for a condition in another process, which sends no event."""
    deadline = time.monotonic() + 8
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def start(mount: Mount, command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=mount.path,
        env={**os.environ, "OUT": str(mount.outside)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    """Send the signal; how it ended."""
    process.send_signal(number)
    _, _errors = process.communicate(timeout=5)
    return process.returncode


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)


@SIGNALS
def test_a_signal_ends_a_reader_whose_file_is_being_hashed(slow: Mount, number: signal.Signals) -> None:
    slow.call("slow_down", SLOW_PAGE_S)
    reader = start(slow, "cat 0<> a.kv")  # past the page cache
    wait_until(lambda: slow.call("num_worker_pages") > 1)
    assert end(reader, number) == -number
    slow.settle()
    num_pages = slow.call("num_worker_pages")
    assert num_pages < NUM_SLOW_PAGES
    slow.call("slow_down", 0)
    check_image((slow.path / "a.kv").read_bytes(), 32 * NUM_SLOW_PAGES)


@SIGNALS
def test_a_signal_ends_a_reader_that_waits_for_the_page_cache(slow: Mount, number: signal.Signals) -> None:
    """The kernel reads ahead on nobody's behalf, so the hashing goes on; whoever waited for it does not."""
    slow.call("slow_down", SLOW_PAGE_S)
    reader = start(slow, "cat a.kv")
    wait_until(lambda: slow.call("num_worker_pages") > 1)
    assert end(reader, number) == -number
    assert slow.call("num_worker_pages") < NUM_SLOW_PAGES
    slow.call("slow_down", 0)
    check_image((slow.path / "a.kv").read_bytes(), 32 * NUM_SLOW_PAGES)


@SIGNALS
def test_a_signal_ends_an_import_and_the_bytes_stay_a_plain_file(slow: Mount, number: signal.Signals) -> None:
    slow.sh("cat a.kv > $OUT/a.kv; rm a.kv")
    slow.call("reset")
    assert slow.all_free()
    whole = (slow.outside / "a.kv").read_bytes()
    slow.call("slow_down", SLOW_PAGE_S)
    writer = start(slow, "cp $OUT/a.kv b.kv")
    wait_until(lambda: slow.call("num_worker_pages") > 1)
    assert end(writer, number) == -number
    wait_until(slow.all_free)
    assert slow.call("num_worker_pages") < NUM_SLOW_PAGES, "it went on to import"
    slow.call("check")
    slow.call("slow_down", 0)
    assert slow.call("stat", "b.kv")["kind"] == "file"
    assert (slow.path / "b.kv").read_bytes() == whole
    slow.sh("cp b.kv c.kv")
    assert slow.call("stat", "c.kv")["kind"] == "kv"


@SIGNALS
@pytest.mark.parametrize("command", ["cat b.kv", "truncate -s 0 b.kv", "bash -c 'echo x >> b.kv'"])
def test_a_signal_ends_whoever_waits_behind_an_import(slow: Mount, number: signal.Signals, command: str) -> None:
    slow.sh("cat a.kv > $OUT/a.kv")
    slow.call("slow_down", SLOW_PAGE_S)
    writer = start(slow, "cp $OUT/a.kv b.kv")
    wait_until(lambda: slow.call("num_worker_pages") > 1)
    waiter = start(slow, command)
    assert end(waiter, number) == -number
    slow.call("slow_down", 0)
    assert writer.wait(timeout=20) == 0
    assert writer.stderr is not None
    writer.stderr.close()
    assert slow.call("tokens_of", "b.kv") == slow.call("tokens_of", "a.kv")


@SIGNALS
def test_a_signal_ends_a_wait_for_a_lock(mount: Mount, number: signal.Signals) -> None:
    with opened(mount.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        waiter = start(mount, "flock f true")
        wait_until(lambda: mount.call("num_lock_waiters", "f") == 1)
        assert end(waiter, number) == -number
        wait_until(lambda: mount.call("num_lock_waiters", "f") == 0)
        assert mount.call("num_locks") == 1
    wait_until(lambda: mount.call("num_locks") == 0)


def test_a_shell_and_a_program_exclude_each_other(mount: Mount) -> None:
    a_kv_file(mount)
    mount.call("lock", "a.kv", "a LIP")
    assert mount.run("flock -n a.kv true").returncode == 1
    waiter = start(mount, "flock a.kv true")
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
    with opened(path, os.O_CREAT | os.O_RDWR) as one, opened(path) as two, opened(path) as three:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(two, fcntl.LOCK_SH)
        with pytest.raises(BlockingIOError):
            fcntl.flock(three, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and with that, `two` has lost what it had
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy = os.dup(one)
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(copy)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(two, fcntl.LOCK_SH)  # a POSIX lock is another matter
    with opened(path) as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    wait_until(lambda: mount.call("num_locks") == 0)


_WAITERS = """
import fcntl, os, sys, threading
def wait():
    fd = os.open("held", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)
threads = [threading.Thread(target=wait) for _ in range(int(sys.argv[1]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("all had it")
"""


def test_hundreds_of_blocked_calls_stop_nobody_else(mount: Mount) -> None:
    (mount.path / "held").touch()
    a_kv_file(mount)
    with opened(mount.path / "held", os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        waiters = subprocess.Popen(
            [sys.executable, "-c", _WAITERS, str(NUM_WAITERS)], cwd=mount.path, stdout=subprocess.PIPE
        )
        wait_until(lambda: mount.call("num_lock_waiters", "held") == NUM_WAITERS)
        mount.sh("ls -la; cp a.kv b.kv; cmp a.kv b.kv; echo plain > p; cat p; rm p b.kv; flock -n a.kv true")
    out, _ = waiters.communicate(timeout=60)
    assert out == b"all had it\n"
    wait_until(lambda: mount.call("num_locks") == 0)


def test_hundreds_of_opens_behind_an_import_stop_nobody_else(slow: Mount) -> None:
    slow.sh("cat a.kv > $OUT/a.kv")
    slow.call("slow_down", SLOW_PAGE_S)
    writer = start(slow, "cp $OUT/a.kv held")
    wait_until(lambda: slow.call("num_worker_pages") > 1)
    source = _WAITERS.replace("fcntl.flock(fd, fcntl.LOCK_EX)", "os.read(fd, 10)")
    waiters = subprocess.Popen([sys.executable, "-c", source, str(NUM_WAITERS)], cwd=slow.path, stdout=subprocess.PIPE)
    slow.sh("ls -la; echo plain > p; cat p; rm p; mkdir d; rmdir d")
    slow.call("slow_down", 0)
    writer.communicate(timeout=20)
    assert writer.returncode == 0
    out, _ = waiters.communicate(timeout=60)
    assert out == b"all had it\n"


def test_while_the_model_computes_a_storm_is_answered_all_the_same(mount: Mount) -> None:
    """More requests than may come at once: they are put off, not lost, and every answer is its own request's."""
    mount.sh("mkdir d; cd d; for i in $(seq 300); do : > n$i; done; ln -s target link")
    mount.call("set_busy", True)
    try:
        names = mount.sh(
            "ls -l d; stat -c %n d/n7 d/link; readlink d/link; mv d/n7 d/m7; test -e d/m7 && ! test -e d/n7"
        )
        assert len(names.splitlines()) == 305
        assert names.endswith("target\n")
        mount.sh("cd d; for i in 1 2 3; do echo $i > n$i; [ $(cat n$i) = $i ]; done; ! cat none 2>/dev/null")
    finally:
        mount.call("set_busy", False)


_STORM = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.SIG_DFL)
def ask():
    while True:
        os.stat("f")
for _ in range(400): threading.Thread(target=ask).start()
"""


@SIGNALS
def test_a_signal_ends_requests_that_were_put_off(mount: Mount, number: signal.Signals) -> None:
    """None of them waits for its turn: between signal and end far fewer are admitted than were waiting."""
    (mount.path / "f").touch()
    mount.call("set_busy", True)
    try:
        storm = subprocess.Popen([sys.executable, "-c", _STORM], cwd=mount.path)
        status = Path(f"/proc/{storm.pid}/status")
        wait_until(lambda: "Threads:\t401\n" in status.read_text())
        first = mount.call("num_paced")
        wait_until(lambda: mount.call("num_paced") > first + 400)
        before = mount.call("num_paced")
        assert end(storm, number) == -number
        assert mount.call("num_paced") - before < 200
        mount.sh("ls -l")
    finally:
        mount.call("set_busy", False)


def test_the_requests_of_one_user_do_not_wait_behind_those_of_another(mount: Mount) -> None:
    """A single queue would put each of these requests behind the 400 that are waiting."""
    (mount.path / "f").touch()
    mount.call("set_busy", True)
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    try:
        storm = subprocess.Popen([*as_nobody, sys.executable, "-c", _STORM], cwd=mount.path)
        first = mount.call("num_paced")
        wait_until(lambda: mount.call("num_paced") > first + 800)
        before = mount.call("num_paced")
        for _ in range(10):
            os.stat(mount.path / "f")
        assert mount.call("num_paced") - before < 200
        assert end(storm, signal.SIGKILL) == -signal.SIGKILL
    finally:
        mount.call("set_busy", False)


def test_what_moves_bytes_is_not_paced_while_the_model_computes(mount: Mount) -> None:
    """Nor what the kernel asks by the way: an open file's attributes at a read, its capabilities at a write."""
    piece = bytes(4096)
    with opened(mount.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        mount.call("set_busy", True)
        try:
            for _ in range(32):  # the first few may be admitted without a look
                os.stat(mount.path / "f")
            num_paced = mount.call("num_paced")
            assert num_paced > 0
            for i in range(100):
                os.pwrite(fd, piece, i * len(piece))
                assert os.pread(fd, len(piece), i * len(piece)) == piece
            assert mount.call("num_paced") == num_paced
        finally:
            mount.call("set_busy", False)


def test_device_nodes_keep_their_numbers(mount: Mount) -> None:
    for name, kind in (("zero", "c 1 5"), ("disk", "b 259 1048575")):
        mount.sh(f"mknod {name} {kind} && chmod 666 {name}")
    found = os.stat(mount.path / "disk")
    assert (os.major(found.st_rdev), os.minor(found.st_rdev)) == (259, 1048575)
    assert mount.sh("stat -c '%F' zero disk") == "character special file\nblock special file\n"
    assert mount.call("free") == NUM_PAGES
    with pytest.raises(PermissionError):
        open(mount.path / "zero").close()  # the mount is nodev
    assert mount.sh("find . -printf '%y '").split() == ["d", "c", "b"]
    assert mount.run("setpriv --reuid 65534 --regid 65534 --clear-groups mknod z2 c 1 5").returncode == 1


def test_the_kernel_forgets_a_file_that_a_program_has_removed(mount: Mount) -> None:
    """The owner pays for the inode until the kernel forgets it."""
    before = mount.call("num_inodes")
    mount.call("close", mount.call("create", "seen.kv"))
    (mount.path / "seen.kv").stat()
    mount.call("remove", "seen.kv")
    wait_until(lambda: mount.call("num_inodes") == before)


def test_an_unmount_does_not_wait_until_the_kernel_has_forgotten_removed_names(tmp_path: Path) -> None:
    with mounted(tmp_path) as mount:
        mount.sh("mkdir d")
        mount.call("make_many", "d", 2000)
        mount.sh("ls -l d")
        mount.call("unmake_many", "d")
    assert "OSError" not in mount.log()
