"""A disk for tests: a directory that records what is done in it, and that fails or hangs when it is told to.

    with Disk(tmp_path) as disk:
        disk.fail(op="fsync", path="*.slots", errno=errno.EIO)
        ...                       # use disk.path like any directory, from any process
        disk.mark("synced")
        log = disk.log()

`disk.path` is a mount of a FUSE file system, served by a process of its own from the directory `disk.lower`. Every read
and write goes there: there is no page cache in between, and a write is recorded when write(2) returns. So O_DIRECT,
fallocate (also with PUNCH_HOLE), flock and POSIX locks work; a shared mapping does not (ENODEV), nor do links, devices,
times, extended attributes, O_DSYNC and O_TMPFILE. O_DIRECT wants offsets and sizes that are multiples of 512. The
kernel cuts what is longer than 1 MiB into several writes. sync(2) and syncfs(2) are not seen. Nothing is synced below,
for that costs time and no test cuts the power of the machine.
"""

import errno as errno_names
import mmap
import os
import shutil
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from tests.disk.faults import OPERATIONS, Effect, Rule
from tests.disk.fuse import unmount
from tests.disk.log import Log, Marked, Operation, Settled

_REPOSITORY = Path(__file__).parents[2]


def available() -> str:
    """Why there can be no such disk here; empty if there can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "NO DISK TESTED: /dev/fuse is missing or not open to this user"
    if shutil.which("fusermount3") is None:
        return "NO DISK TESTED: fusermount3 is not installed"
    return ""


class Disk:
    """Mounted at `base`/disk over `base`/lower, which is empty."""

    def __init__(self, base: Path, *, timeout_s: float = 60) -> None:
        self.path = base / "disk"
        self.lower = (base / "lower").resolve()
        self.path.mkdir(exist_ok=True)
        self.lower.mkdir(exist_ok=True)
        self._timeout_s = timeout_s
        self._operations: list[Operation] = []
        self._data = os.memfd_create("disk")
        self._lock = Lock()
        self._closed = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-S", "-m", "tests.disk.server", str(self.lower), str(self.path)),
                    *(str(theirs.fileno()), str(self._data)),
                ],
                cwd=_REPOSITORY,
                pass_fds=[theirs.fileno(), self._data],
            )
        self._control = Connection(ours.detach())
        try:
            self._receive()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmount, in use or not. What hangs gets an error. A defect of the disk itself is raised here."""
        if self._closed:
            return
        try:
            troubles = self._command("troubles")
        finally:
            self._end()
        assert not troubles, "\n".join(troubles)

    def _end(self) -> None:
        self._closed = True
        self._control.close()
        try:
            self.process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        unmount(self.path)  # if that process could not
        os.close(self._data)

    # What was done

    def log(self) -> Log:
        """Return the log so far; later operations do not change it."""
        new, data_bytes = self._command("log", len(self._operations))
        self._operations += new
        data = memoryview(mmap.mmap(self._data, data_bytes, prot=mmap.PROT_READ) if data_bytes else b"")
        return Log(tuple(self._operations), data)

    def mark(self, label: str) -> None:
        """Say in the log that this is now; for example that sync() has returned 0."""
        self._command("append", Marked(label))

    def settle(self) -> None:
        """Say in the log that everything so far is on the disk, as if a long time had passed."""
        self._command("append", Settled())

    def count(self, op: str = "any", path: str = "*") -> int:
        """How many such operations were asked for so far, also those that failed or hang."""
        return int(self._command("count", _known(op), path))

    # What goes wrong

    def fail(
        self, op: str = "any", path: str = "*", *, after: int = 0, times: int | None = 1, errno: int = errno_names.EIO
    ) -> None:
        """Let `after` such operations pass and fail the next `times`; None: all that follow.

        `op` is one of write, truncate, allocate, punch, create, mkdir, unlink, rmdir, rename, setattr, fsync (of a
        file, also fdatasync), fsyncdir; any, which is all of these; open, read. `path` is a glob for the path below the
        mount; without a slash, for its last name. What fails has not happened. After an fsync that failed, no later
        fsync covers what this one would have.
        """
        self._command("add_rule", Rule(Effect.FAIL, _known(op), path, after, times, errno))

    def heal(self) -> None:
        """Forget all rules but rules that hang."""
        self._command("heal")

    def hang(self, op: str = "any", path: str = "*", *, after: int = 0, times: int | None = None) -> None:
        """Answer such operations when `resume` comes. Others go on, but for those that the kernel makes wait.

        A write or fsync that hangs has the file's lock, so others of that file wait for it: except writes through
        O_DIRECT that don't make the file longer. What changes a directory has that directory's lock. A process that is
        killed meanwhile is gone when its operation is answered.
        """
        self._command("add_rule", Rule(Effect.HANG, _known(op), path, after, times))

    def resume(self) -> int:
        """Forget all rules that hang, and do what hangs. Returns how many operations that are."""
        return int(self._command("resume"))

    def limit(self, limit_bytes: int | None) -> None:
        """ENOSPC for whatever would need more blocks than that; None: no limit. statvfs(2) shows it.

        A write that fits in part is short. Blocks of 4096 bytes of files are counted; what overwrites them needs none.
        """
        self._command("limit", limit_bytes)

    def used(self) -> int:
        """The bytes of blocks that files have now."""
        return int(self._command("used"))

    def _command(self, command: str, *arguments: Any) -> Any:
        with self._lock:
            self._control.send((command, arguments))
            answer = self._receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> Any:
        if not self._control.poll(self._timeout_s):
            raise TimeoutError(f"no answer from the disk at {self.path} in {self._timeout_s} s")
        try:
            return self._control.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the process of the disk at {self.path} is gone") from None


def _known(op: str) -> str:
    if op != "any" and op not in OPERATIONS:
        raise ValueError(f"{op} is no operation of a disk: any, {', '.join(sorted(OPERATIONS))}")
    return op
