"""Attributes that the kernel holds, and names that C answers, are those of the file, whatever is done to it by programs
and other clients of the mount.

A descriptor of O_PATH shows what the kernel holds, without a request. A path makes the kernel ask for the name.
AT_STATX_FORCE_SYNC asks the daemon. The variable SYMPHONY_TEST_STEPS sets the number of random steps.
"""

import ctypes
import errno
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.kvfs.mounted import (
    NUM_PAGES,
    PAGE_BYTES,
    CommandFailed,
    Mount,
    a_kv_file,
    mounted,
    needs_mount,
    opened,
    refused,
)

pytestmark = needs_mount

NUM_STEPS = int(os.environ.get("SYMPHONY_TEST_STEPS", "1000"))
NAMES = ("a", "b", "c", "d/a", "d/b")
NUM_DESCRIPTORS = 16
MOST_OF_ONE_HASH = 8
"""The most names of one hash that C keeps."""
EXPECTED = {errno.ENOENT, errno.EEXIST, errno.EOPNOTSUPP, errno.EBUSY, errno.EINVAL, errno.ESTALE, errno.ENOSPC}
"""Errors of steps that meet no file, or a file of another kind."""

_NOFOLLOW, _EMPTY_PATH, _FORCE_SYNC, _BASIC_STATS = 0x100, 0x1000, 0x2000, 0x7FF
_libc = ctypes.CDLL(None, use_errno=True)


def attributes(descriptor: int, path: str, *, asked: bool) -> bytes | None:
    """Return the statx(2) of a descriptor, or of a path below it: as the kernel shows it, or asked for at the daemon.
    None: no file has the path.
    """
    found = ctypes.create_string_buffer(256)
    flags = _NOFOLLOW | (0 if path else _EMPTY_PATH) | (_FORCE_SYNC if asked else 0)
    if _libc.statx(descriptor, path.encode(), flags, _BASIC_STATS, found) == 0:
        return found.raw
    error = ctypes.get_errno()
    assert path, "a descriptor has attributes"
    assert error == errno.ENOENT, os.strerror(error)
    return None


def is_fresh(descriptor: int, path: str = "") -> bool:
    """Whether the kernel shows what the daemon knows. From now on the kernel holds the attributes."""
    return attributes(descriptor, path, asked=False) == attributes(descriptor, path, asked=True)


def number_of(path: Path) -> int | None:
    """Return the number of the inode that a name leads to, or None."""
    return path.lstat().st_ino if os.path.lexists(path) else None


class TwoClients:
    """Random steps on a few names: by system calls on the mount, and by calls of programs."""

    def __init__(self, mount: Mount, seed: int) -> None:
        self._mount = mount
        self._random = random.Random(seed)
        self._handles: list[int] = []
        self._open: list[int] = []
        self._descriptors = [os.open(mount.path, os.O_PATH)]
        self.num_compared = self.num_done = 0

    def run(self, num_steps: int) -> None:
        steps: list[Callable[[], None]] = [
            *(self.make, self.write, self.truncate, self.set_mode, self.set_times, self.set_xattr, self.link),
            *(self.rename, self.unlink, self.open, self.close, self.open, self.close, self.read, self.fork_by_cp),
            *(self.kv_create, self.kv_open, self.kv_append, self.kv_append, self.kv_truncate, self.kv_close),
            *(self.kv_close, self.kv_fork, self.kv_remove, self.kv_rename, self.kv_chmod, self.kv_append_once),
            self.lose,
        ]
        for number in range(num_steps):
            step = self._random.choice(steps)
            try:
                step()
                self.num_done += 1
            except (OSError, CommandFailed) as error:
                if error.errno not in EXPECTED:
                    raise
            self._compare(f"{number}: {step.__name__}")

    def _compare(self, what: str) -> None:
        for descriptor in self._random.sample(self._descriptors, min(4, len(self._descriptors))):
            assert is_fresh(descriptor), f"after step {what}: {os.fstat(descriptor)}"
            self.num_compared += 1
        names = self._random.sample(NAMES, 1)
        numbers = self._mount.call("numbers", names)
        assert [number_of(self._mount.path / name) for name in names] == numbers, f"after step {what}: {names}"
        for name in names:
            assert is_fresh(self._descriptors[0], name), f"after step {what}: {name}"
        if self._random.random() < 0.2:
            path = self._mount.path / self._random.choice(("d", *NAMES))
            if path.exists():
                self._descriptors.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))
        if len(self._descriptors) > NUM_DESCRIPTORS:
            os.close(self._descriptors.pop(self._random.randrange(1, NUM_DESCRIPTORS)))

    def end(self) -> None:
        for descriptor in (*self._descriptors, *self._open):
            os.close(descriptor)

    @property
    def _name(self) -> str:
        return self._random.choice(NAMES)

    @property
    def _path(self) -> Path:
        return self._mount.path / self._name

    # System calls

    def make(self) -> None:
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    def write(self) -> None:
        with opened(self._path, os.O_WRONLY) as descriptor:
            os.pwrite(descriptor, b"x" * self._random.randrange(1, 9000), self._random.randrange(3) * 1000)

    def truncate(self) -> None:
        os.truncate(self._path, self._random.randrange(2) * 100)

    def set_mode(self) -> None:
        self._path.chmod(self._random.choice((0o600, 0o644, 0o755)))

    def set_times(self) -> None:
        os.utime(self._path, ns=(self._random.randrange(1 << 40), self._random.randrange(1 << 40)))

    def set_xattr(self) -> None:
        os.setxattr(self._path, "user.note", b"x" * self._random.randrange(9))

    def link(self) -> None:
        self._path.hardlink_to(self._path)

    def rename(self) -> None:
        self._path.rename(self._path)

    def unlink(self) -> None:
        self._path.unlink()

    def open(self) -> None:
        if len(self._open) < 8:
            self._open.append(os.open(self._path, self._random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR))))

    def close(self) -> None:
        if self._open:
            os.close(self._open.pop(self._random.randrange(len(self._open))))

    def read(self) -> None:
        self._path.read_bytes()

    def lose(self) -> None:
        self._mount.call("lose", self._name)

    def fork_by_cp(self) -> None:
        with opened(self._path) as source, opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as target:
            os.copy_file_range(source, target, 1 << 30)

    # Calls of programs

    def _keep(self, handle: int) -> None:
        self._handles.append(handle)
        if len(self._handles) > 4:
            self.kv_close()

    def _handle(self) -> int | None:
        return self._random.choice(self._handles) if self._handles else None

    def kv_create(self) -> None:
        self._keep(self._mount.call("create", self._name))

    def kv_open(self) -> None:
        self._keep(self._mount.call("open", self._name))

    def kv_append(self) -> None:
        if (handle := self._handle()) is not None:
            self._mount.call("append", handle, self._random.choice((1, 31, 33)))

    def kv_append_once(self) -> None:
        handle = self._mount.call("open", self._name)
        self._mount.call("append", handle, 1)
        self._mount.call("close", handle)

    def kv_truncate(self) -> None:
        if (handle := self._handle()) is not None:
            self._mount.call("truncate", handle, self._random.randrange(2))

    def kv_close(self) -> None:
        if self._handles:
            self._mount.call("close", self._handles.pop(self._random.randrange(len(self._handles))))

    def kv_fork(self) -> None:
        if (handle := self._handle()) is not None:
            self._mount.call("close", self._mount.call("fork", handle, self._name))

    def kv_remove(self) -> None:
        self._mount.call("remove", self._name)

    def kv_rename(self) -> None:
        self._mount.call("rename", self._name, self._name)

    def kv_chmod(self) -> None:
        self._mount.call("chmod", self._name, self._random.choice((0o600, 0o644, 0o755)))


@contextmanager
def walkers(path: Path, count: int = 2) -> Iterator[None]:
    """Processes that ask for all attributes again and again, so that answers cross the messages to the kernel."""
    loop = f"while :; do find {path} -printf %s%T@ ; ls -l {path}/d; done > /dev/null 2>&1"
    processes = [subprocess.Popen(["bash", "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_never_shows_an_old_attribute(tmp_path: Path, seed: int) -> None:
    with mounted(tmp_path) as mount:
        (mount.path / "d").mkdir()
        clients = TwoClients(mount, seed)
        with walkers(mount.path, seed):
            clients.run(NUM_STEPS)
        clients.end()
        print(f"{clients.num_done} steps done, {clients.num_compared} attributes compared")
        mount.empty()
        assert "can't forget" not in mount.log()


def test_unchanged_attributes_are_asked_for_once_and_each_change_is_seen_at_once(tmp_path: Path) -> None:
    with mounted(tmp_path) as mount:
        mount.call("close", a_kv_file(mount))
        descriptor = os.open(mount.path / "a.kv", os.O_PATH)
        before = os.fstat(descriptor)
        num_requests = mount.call("num_requests")
        assert [os.fstat(descriptor) for _ in range(10)] == 10 * [before]
        assert mount.call("num_requests") == num_requests
        mount.call("chmod", "a.kv", 0o604)
        changed = os.fstat(descriptor)
        assert changed.st_mode & 0o7777 == 0o604
        assert changed.st_ctime_ns > before.st_ctime_ns
        os.close(descriptor)


def test_c_answers_names_of_unchanged_files(tmp_path: Path) -> None:
    """Python answers every 16th lookup, to see whether the model computes, and each lookup while it does."""
    with mounted(tmp_path) as mount:
        path = mount.path / "d/file"
        path.parent.mkdir()
        path.touch()
        names = [path, mount.path / "d/link"]
        names[1].hardlink_to(path)
        for name in names:
            found = name.stat()
            num_requests = mount.call("num_requests")
            for _ in range(80):
                assert name.stat() == found
            assert mount.call("num_requests") - num_requests <= 80 * 3 / 16 + 1
        list(path.parent.iterdir())  # the names of a listing are kept, too: here the link's
        mount.call("rename", "d/file", "moved")
        assert [os.path.lexists(name) for name in names] == [False, True]
        assert mount.call("numbers", ["moved"]) == [found.st_ino]
        assert (mount.path / "moved").stat().st_ctime_ns > found.st_ctime_ns
        names[1].unlink()
        mount.call("remove", "moved")
        mount.settle()
        mount.call("check")  # also the lookups that C has answered are forgotten
        assert mount.call("num_inodes") == 2  # the root and the directory


def colliding(parent: int, count: int) -> list[str]:
    """Return names that C keeps in one list: all have one hash, see kept_names.c."""
    tried = np.arange(count << 17, dtype=np.uint64)
    states = np.full(tried.shape, 14695981039346656037 ^ parent, np.uint64)
    for shift in range(0, 32, 4):
        states = (states ^ (ord("a") + (tried >> np.uint64(shift) & np.uint64(15)))) * np.uint64(1099511628211)
    found = np.flatnonzero((states ^ states >> np.uint64(32)) % np.uint64(65536) == 0)[:count]
    return ["".join(chr(ord("a") + (int(number) >> shift & 15)) for shift in range(0, 32, 4)) for number in found]


def test_c_keeps_few_names_of_one_hash(tmp_path: Path) -> None:
    """A user can choose such names. If C kept many of them, each request for one of them would take long."""
    with mounted(tmp_path) as mount:
        directory = mount.path / "d"
        directory.mkdir()
        names = colliding(directory.stat().st_ino, 64)
        assert len(names) == 64
        for name in names:
            (directory / name).touch()
        assert len(tuple(directory.iterdir())) == len(names)
        num_requests = mount.call("num_requests")
        for name in names:
            assert os.path.lexists(directory / name)
        assert mount.call("num_requests") - num_requests >= len(names) - MOST_OF_ONE_HASH


def test_a_file_that_a_program_extends_is_asked_for_each_time(tmp_path: Path) -> None:
    """The core appends entries without an event. So the kernel holds nothing while a handle is open."""
    with mounted(tmp_path) as mount:
        mount.call("close", a_kv_file(mount))
        descriptor = os.open(mount.path / "a.kv", os.O_PATH)
        os.fstat(descriptor)
        handle = mount.call("open", "a.kv")
        num_requests = mount.call("num_requests")
        for _ in range(5):
            os.fstat(descriptor)
        assert mount.call("num_requests") == num_requests + 5
        mount.call("close", handle)
        os.close(descriptor)


def test_no_path_leads_to_attributes_once_the_daemon_was_killed(tmp_path: Path) -> None:
    mount = Mount(tmp_path, NUM_PAGES, PAGE_BYTES)
    try:
        mount.wait_mounted()
        file = mount.path / "d/a"
        file.parent.mkdir()
        file.touch()
        for path in 2 * [mount.path, file.parent, file]:
            path.stat()
        mount.process.kill()
        mount.process.wait()
        for path in (mount.path, file.parent, file):
            refused(errno.ENOTCONN, path.stat)
    finally:
        mount.dismiss()
