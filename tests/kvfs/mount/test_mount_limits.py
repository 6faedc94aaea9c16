# ruff: noqa: PTH208 - system calls
"""Limits of the mount: other file systems, operations that it lacks, and very many names."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kvfs.mounted import Mount, a_kv_file, needs_mount, opened, refused

pytestmark = needs_mount


def test_nothing_moves_or_links_to_another_file_system(mount: Mount) -> None:
    a_kv_file(mount)
    (mount.path / "f").write_text("x")
    (mount.path / "d").mkdir()
    for name in ("f", "d", "a.kv"):
        refused(errno.EXDEV, os.rename, mount.path / name, mount.outside / name)
    mount.sh("echo y > $OUT/g; mv f d a.kv $OUT; mv $OUT/g $OUT/a.kv .")
    assert sorted(os.listdir(mount.path)) == ["a.kv", "g"]
    assert mount.call("tokens_of", "a.kv") == list(range(1, 101)), "mv copies what it cannot rename"
    assert sorted(os.listdir(mount.outside)) == ["d", "f"]


def test_what_is_not_done_says_so(mount: Mount) -> None:
    a_kv_file(mount)
    libc = ctypes.CDLL(None, use_errno=True)

    def fallocate(fd: int, mode: int) -> None:
        if libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")

    for name in ("a.kv", "f"):
        with opened(mount.path / name, os.O_RDWR | os.O_CREAT) as fd:
            refused(errno.EOPNOTSUPP, fallocate, fd, 3)  # punch a hole, keep the size
            refused(errno.ENOTTY, fcntl.ioctl, fd, 0x80086601, bytearray(8))  # FS_IOC_GETFLAGS
            refused(errno.ENOTTY, fcntl.ioctl, fd, 0x5401, bytes(64))  # TCGETS
            refused(errno.EOPNOTSUPP, fcntl.ioctl, fd, 0x40049409, fd)  # FICLONE
    refused(errno.EOPNOTSUPP, os.open, mount.path, os.O_TMPFILE | os.O_RDWR)
    assert "not supported" in mount.run("cp --reflink=always a.kv b.kv").stderr
    assert os.pathconf(mount.path, "PC_NAME_MAX") == 255
    assert os.pathconf(mount.path, "PC_PATH_MAX") == 4096
    with opened(mount.path / "a.kv") as fd:
        size = os.fstat(fd).st_size
        assert [os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 0, os.SEEK_HOLE)] == [0, size]


_BEYOND = """
import os, resource, signal
received = []
signal.signal(signal.SIGXFSZ, lambda *_: received.append("SIGXFSZ"))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, -1))
fd = os.open("f", os.O_RDWR | os.O_CREAT)
for at, size in (8192, 1), (0, 100_000), (0, 8192), (4096, 4097), (0, 100):
    try:
        os.posix_fallocate(fd, at, size)
    except OSError as error:
        received.append(error.errno)
    print(sorted(map(str, received)), os.fstat(fd).st_size)
    received.clear()
"""


def test_fallocate_grows_a_file_as_far_as_its_caller_may(mount: Mount) -> None:
    """The limit is the caller's, as on any file system, not the daemon's."""
    outputs = [
        subprocess.run([sys.executable, "-c", _BEYOND], cwd=where, capture_output=True, text=True, check=True).stdout
        for where in (mount.path, mount.outside)
    ]
    too_big = f"['{errno.EFBIG}', 'SIGXFSZ']"
    assert outputs[0].splitlines() == [f"{too_big} 0", f"{too_big} 0", "[] 8192", f"{too_big} 8192", "[] 8192"]
    assert outputs[0] == outputs[1]
    assert (mount.path / "f").read_bytes() == bytes(8192)


def test_what_a_caller_asked_too_much_of_is_told_to_the_caller_and_not_to_the_log(mount: Mount) -> None:
    before = mount.log()
    with opened(mount.path / "f", os.O_RDWR | os.O_CREAT) as fd:
        refused(errno.EFBIG, os.pwrite, fd, b"x", 1 << 60)
        refused(errno.EFBIG, os.ftruncate, fd, 1 << 60)
        refused(errno.EFBIG, os.posix_fallocate, fd, 1 << 60, 1)
    assert mount.log() == before
    assert (mount.path / "f").stat().st_size == 0


def test_fallocate_makes_no_hole_out_of_what_is_there_and_leaves_kv_files_alone(mount: Mount) -> None:
    a_kv_file(mount)
    image = (mount.path / "a.kv").read_bytes()
    mount.sh("printf 0123456789 > f; fallocate -o 5 -l 10 f")
    assert (mount.path / "f").read_bytes() == b"0123456789" + bytes(5)
    assert "not supported" in mount.run("fallocate -l 100M a.kv").stderr
    assert (mount.path / "a.kv").read_bytes() == image


# Record locks

_HOLD = """
import fcntl, sys
f = open(sys.argv[1], "r+b")
fcntl.lockf(f, int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_holder(path: Path, length: int, start: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes a record lock, waiting for it, and holds it until it is ended."""
    command = ["python3", "-c", _HOLD, str(path), str(fcntl.LOCK_EX), str(length), str(start)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.communicate()


def wait_held(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"


@pytest.fixture
def path(mount: Mount) -> Path:
    path = mount.path / "f"
    path.write_bytes(bytes(100))
    return path


def test_record_locks_exclude_other_processes_range_by_range(path: Path) -> None:
    nowait = fcntl.LOCK_NB
    with opened(path, os.O_RDWR) as fd:
        with a_holder(path, 10, 20) as holder:
            wait_held(holder)
            for start, length in ((0, 20), (30, 0)):
                fcntl.lockf(fd, fcntl.LOCK_EX | nowait, length, start)
            for start, length in ((20, 1), (15, 10), (29, 100)):
                refused(errno.EAGAIN, fcntl.lockf, fd, fcntl.LOCK_SH | nowait, length, start)
            wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 25, 1, 0)
            kind, _whence, start, length, pid = struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, wanted)[:28])
            assert (kind, start, length, pid) == (fcntl.F_WRLCK, 20, 10, holder.pid)
            path.rename(path.with_name("g"))
            refused(errno.EAGAIN, fcntl.lockf, fd, fcntl.LOCK_SH | nowait, 1, 20)
        fcntl.lockf(fd, fcntl.LOCK_EX | nowait, 1, 20)


def test_a_record_lock_is_waited_for_and_goes_with_any_close(path: Path) -> None:
    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        with a_holder(path, 0, 0) as waiter:
            os.close(os.open(path, os.O_RDONLY))  # POSIX: with any close of the file, all of the process's locks go
            wait_held(waiter)
            refused(errno.EAGAIN, fcntl.lockf, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_of_an_open_file_goes_with_its_last_descriptor(path: Path) -> None:
    get, put = 36, 37  # F_OFD_GETLK, F_OFD_SETLK
    everything = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with opened(path, os.O_RDWR) as other:
        with opened(path, os.O_RDWR) as fd:
            fcntl.fcntl(fd, put, everything)
            duplicate = os.dup(fd)
        refused(errno.EAGAIN, fcntl.fcntl, other, put, everything)
        assert struct.unpack_from("h", fcntl.fcntl(other, get, everything))[0] == fcntl.F_WRLCK
        os.close(duplicate)
        fcntl.fcntl(other, put, everything)


# Very many names


def test_places_in_a_directory_can_be_gone_back_to(mount: Mount) -> None:
    """telldir, seekdir, rewinddir: also when names before the place are gone."""
    mount.sh("mkdir d; cd d; touch $(seq 500)")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    directory = ctypes.c_void_p(libc.opendir(os.fsencode(mount.path / "d")))

    def next_name() -> bytes | None:
        entry = libc.readdir(directory)
        return ctypes.string_at(entry + 19) if entry else None  # after d_ino, d_off, d_reclen, d_type

    places: dict[bytes, int] = {}
    place = libc.telldir(directory)
    while name := next_name():
        places[name] = place
        place = libc.telldir(directory)
    assert len(places) == 502
    for name in random.Random(5).sample(sorted(places), 100):
        libc.seekdir(directory, ctypes.c_long(places[name]))
        assert next_name() == name
    libc.seekdir(directory, ctypes.c_long(places[b"400"]))
    mount.sh("cd d; rm $(seq 99)")
    assert next_name() == b"400"
    mount.sh("touch d/new")
    libc.rewinddir(directory)
    found = set()
    while name := next_name():
        found.add(name)
    assert len(found) == 404, "rewinddir looks again"
    assert b"new" in found
    libc.closedir(directory)


@pytest.mark.slow
def test_a_tree_of_twenty_thousand_files(mount: Mount) -> None:
    for i in range(20):
        mount.call("populate", [(f"d{i}", "dir", 0o755, 0, 0, "")])
        mount.call("make_many", f"d{i}", 1000)
    assert mount.sh("find . -type f | wc -l").strip() == "20000"
    mount.sh("mv d7 d8/; cp -a d8 copy; diff -rq d8 copy; rm -r copy d9; find d1* -delete")
    assert mount.sh("ls -R . | grep -c ^n").strip() == str(20_000 - 1000 - 11 * 1000)
    mount.call("check")
    mount.call("clear")
