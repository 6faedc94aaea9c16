# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH208, PTH211 - system calls
"""Limits of the mount: other file systems, read-only views, operations that it lacks, and very many names."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.kvfs.mounted import Mount, a_kv_file, needs_mount, opened

pytestmark = needs_mount


def refused(code: int, action: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="Errno") as caught:
        action()
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[code]


def test_nothing_moves_or_links_to_another_file_system(mount: Mount) -> None:
    a_kv_file(mount)
    (mount.path / "f").write_text("x")
    (mount.path / "d").mkdir()
    for name in ("f", "d", "a.kv"):
        refused(errno.EXDEV, lambda name=name: os.rename(mount.path / name, mount.outside / name))
    refused(errno.EXDEV, lambda: os.link(mount.path / "f", mount.outside / "f"))
    (mount.outside / "g").write_text("y")
    refused(errno.EXDEV, lambda: os.rename(mount.outside / "g", mount.path / "g"))
    refused(errno.EXDEV, lambda: os.link(mount.outside / "g", mount.path / "g"))
    mount.sh("mv f d a.kv $OUT; mv $OUT/g $OUT/a.kv .; ls $OUT")
    assert sorted(os.listdir(mount.path)) == ["a.kv", "g"]
    assert mount.call("tokens_of", "a.kv") == list(range(1, 101)), "mv copies what it cannot rename"
    assert sorted(os.listdir(mount.outside)) == ["d", "f"]


@pytest.fixture
def read_only(mount: Mount, tmp_path: Path) -> Iterator[Path]:
    """The mount again, somewhere else, for reading only."""
    subprocess.run(["mount", "--bind", mount.path, tmp_path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_read_only_view_changes_nothing(mount: Mount, read_only: Path) -> None:
    a_kv_file(mount)
    (mount.path / "f").write_text("x")
    (mount.path / "d").mkdir()
    (mount.path / "l").symlink_to("f")
    image = (mount.path / "a.kv").read_bytes()
    f, d, new = read_only / "f", read_only / "d", read_only / "new"
    for action in (
        *(lambda: os.chmod(f, 0o600), lambda: os.chown(f, 1, 1), lambda: os.chown(read_only / "l", 1, 1)),
        *(lambda: os.truncate(f, 0), lambda: os.utime(f, (1, 1)), lambda: os.unlink(f), lambda: os.rmdir(d)),
        *(lambda: os.rename(f, new), lambda: os.link(f, new), lambda: os.symlink("x", new), lambda: os.mkdir(new)),
        *(lambda: os.mkfifo(new), lambda: os.open(f, os.O_RDWR), lambda: os.open(f, os.O_RDONLY | os.O_TRUNC)),
        *(lambda: os.open(new, os.O_WRONLY | os.O_CREAT), lambda: os.setxattr(f, "user.x", b"y")),
        *(lambda: os.truncate(read_only / "a.kv", 0), lambda: os.removexattr(f, "user.x")),
    ):
        refused(errno.EROFS, action)
    assert f.read_text() == "x"
    assert (read_only / "a.kv").read_bytes() == image
    refused(errno.EEXIST, lambda: os.mkdir(d))
    refused(errno.EBUSY, lambda: os.rmdir(read_only))


def test_what_is_not_done_says_so(mount: Mount) -> None:
    a_kv_file(mount)
    libc = ctypes.CDLL(None, use_errno=True)

    def fallocate(fd: int, mode: int) -> None:
        if libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")

    for name in ("a.kv", "f"):
        with opened(mount.path / name, os.O_RDWR | os.O_CREAT) as fd:
            refused(errno.EOPNOTSUPP, lambda fd=fd: fallocate(fd, 3))  # punch a hole, keep the size
            refused(errno.ENOTTY, lambda fd=fd: fcntl.ioctl(fd, 0x80086601, bytearray(8)))  # FS_IOC_GETFLAGS
            refused(errno.EOPNOTSUPP, lambda fd=fd: fcntl.ioctl(fd, 0x40049409, fd))  # FICLONE
    refused(errno.EOPNOTSUPP, lambda: os.open(mount.path, os.O_TMPFILE | os.O_RDWR))
    assert "not supported" in mount.run("cp --reflink=always a.kv b.kv").stderr
    assert os.pathconf(mount.path, "PC_NAME_MAX") == 255
    assert os.pathconf(mount.path, "PC_PATH_MAX") == 4096


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
    refused = f"['{errno.EFBIG}', 'SIGXFSZ']"
    assert outputs[0].splitlines() == [f"{refused} 0", f"{refused} 0", "[] 8192", f"{refused} 8192", "[] 8192"]
    assert outputs[0] == outputs[1]
    assert (mount.path / "f").read_bytes() == bytes(8192)


def test_what_a_caller_asked_too_much_of_is_told_to_the_caller_and_not_to_the_log(mount: Mount) -> None:
    before = mount.log()
    with opened(mount.path / "f", os.O_RDWR | os.O_CREAT) as fd:
        for action in (
            lambda: os.pwrite(fd, b"x", 1 << 60),
            lambda: os.ftruncate(fd, 1 << 60),
            lambda: os.posix_fallocate(fd, 1 << 60, 1),
        ):
            refused(errno.EFBIG, action)
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


class Holder:
    """A process that takes a record lock, waiting for it, and holds it until it is ended."""

    def __init__(self, path: Path, kind: int, length: int, start: int) -> None:
        self.process = subprocess.Popen(
            ["python3", "-c", _HOLD, str(path), str(kind), str(length), str(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait_held(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"held\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def test_record_locks_exclude_other_processes_range_by_range(mount: Mount) -> None:
    path = mount.path / "f"
    path.write_bytes(bytes(100))
    with opened(path, os.O_RDWR) as fd:
        with Holder(path, fcntl.LOCK_EX, 10, 20) as holder:
            holder.wait_held()
            for start, length, free in (
                (0, 20, True),
                (30, 0, True),
                (20, 1, False),
                (15, 10, False),
                (29, 100, False),
            ):
                if free:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
                else:
                    refused(
                        errno.EAGAIN, lambda s=start, n=length: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, n, s)
                    )
            wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 25, 1, 0)
            kind, _whence, start, length, pid = struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, wanted)[:28])
            assert (kind, start, length, pid) == (fcntl.F_WRLCK, 20, 10, holder.process.pid)
            os.rename(path, mount.path / "g")
            refused(errno.EAGAIN, lambda: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 20))
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 20)


def test_a_record_lock_is_waited_for_and_goes_with_any_close(mount: Mount) -> None:
    path = mount.path / "f"
    path.write_bytes(bytes(100))
    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        with Holder(path, fcntl.LOCK_EX, 0, 0) as waiter:
            os.close(os.open(path, os.O_RDONLY))  # POSIX: with any close of the file, all of the process's locks go
            waiter.wait_held()
            refused(errno.EAGAIN, lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def test_a_lock_of_an_open_file_goes_with_its_last_descriptor(mount: Mount) -> None:
    get, put = 36, 37  # F_OFD_GETLK, F_OFD_SETLK
    path = mount.path / "f"
    path.write_bytes(bytes(100))
    everything = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with opened(path, os.O_RDWR) as other:
        with opened(path, os.O_RDWR) as fd:
            fcntl.fcntl(fd, put, everything)
            duplicate = os.dup(fd)
        refused(errno.EAGAIN, lambda: fcntl.fcntl(other, put, everything))
        assert struct.unpack_from("h", fcntl.fcntl(other, get, everything))[0] == fcntl.F_WRLCK
        os.close(duplicate)
        fcntl.fcntl(other, put, everything)


# Very many names


def test_names_of_any_bytes_are_kept_as_they_are(mount: Mount) -> None:
    dice = random.Random(3)
    letters = bytes(set(range(1, 256)) - set(b"/"))
    names = {bytes(dice.choices(letters, k=dice.choice([1, 2, 30, 254, 255]))) for _ in range(300)} - {b".", b".."}
    root = os.fsencode(mount.path)
    for name in names:
        os.close(os.open(root + b"/" + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    assert set(os.listdir(root)) == names
    renamed = {name: name[::-1] + b"!" for name in names if len(name) < 255}
    os.mkdir(root + b"/d")
    for old, new in renamed.items():
        os.rename(root + b"/" + old, root + b"/d/" + new)
    assert set(os.listdir(root + b"/d")) == set(renamed.values())


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
    dice = random.Random(5)
    for name in dice.sample(sorted(places), 100):
        libc.seekdir(directory, ctypes.c_long(places[name]))
        assert next_name() == name
    libc.seekdir(directory, ctypes.c_long(places[b"400"]))
    for number in range(1, 100):
        os.unlink(mount.path / "d" / str(number))
    assert next_name() == b"400"
    (mount.path / "d" / "new").touch()
    libc.rewinddir(directory)
    found = set()
    while name := next_name():
        found.add(name)
    assert len(found) == 404, "rewinddir looks again"
    assert b"new" in found
    libc.closedir(directory)


def test_ten_thousand_names_are_listed_while_others_make_move_and_remove(mount: Mount) -> None:
    os.mkdir(mount.path / "many")
    mount.call("make_many", "many", 10_000)
    stop = threading.Event()

    def churn(number: int) -> None:
        i = 0
        while not stop.is_set():
            path = mount.path / "many" / f"t{number}-{i % 50}"
            path.touch()
            moved = path.rename(path.with_name(path.name + "m"))
            if i % 3:
                moved.unlink()
            i += 1

    threads = [threading.Thread(target=churn, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            names = os.listdir(mount.path / "many")
            kept = [name for name in names if name.startswith("n")]
            assert len(kept) == len(set(kept)) == 10_000
            assert len(names) == len(set(names))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    mount.call("unmake_many", "many")


@pytest.mark.slow
def test_a_tree_of_a_hundred_thousand_files(mount: Mount) -> None:
    for i in range(100):
        mount.call("populate", [(f"d{i}", "dir", 0o755, 0, 0, "")])
        mount.call("make_many", f"d{i}", 1000)
    assert mount.sh("find . -type f | wc -l").strip() == "100000"
    mount.sh("mv d7 d8/; cp -a d8 copy; diff -rq d8 copy; rm -r copy d9; find d1* -delete")
    assert mount.sh("ls -R . | grep -c ^n").strip() == str(100_000 - 1000 - 11 * 1000)
    mount.call("check")
    mount.call("clear")
