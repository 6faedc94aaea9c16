"""A mount to test with: a `mount_server` process, commands to it, and shell commands in it."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.pages.digest import digest
from tests.forked import Forked

REPOSITORY = Path(__file__).parents[2]
NUM_PAGES = 256
PAGE_BYTES = 4096
"""Bytes of a page on the mount that most tests share."""


class CommandFailed(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.errno = code


class Mount:
    """A server process with its mount. `path` is the mount point, `outside` a scratch directory beside it."""

    def __init__(
        self, base: Path, num_pages: int, page_bytes: int, *, user: int | None = None, allow_other: bool = True
    ) -> None:
        self.path = base / "kv"
        self.outside = base / "outside"
        self.outside.mkdir(exist_ok=True)
        self._log_path = base / "log"
        self._log = self._log_path.open("ab")
        self.process = Forked(
            [
                *(sys.executable, "-m", "tests.kvfs.mount_server"),
                *(str(self.path), str(base / "backing"), str(num_pages), str(page_bytes), str(int(allow_other))),
                str(os.getuid() if user is None else user),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
        )

    def wait_mounted(self) -> None:
        self._answer()

    def call(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server has died:\n{self.log()}"
        answer = json.loads(line)
        if "error" in answer:
            raise CommandFailed(answer["error"], answer["errno"])
        return answer["result"]

    def log(self) -> str:
        return self._log_path.read_text()

    def sh(self, command: str) -> str:
        """Run a shell command in the mount; it must succeed."""
        done = self.run(command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OUT": str(self.outside), "LC_ALL": "C"}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(["bash", "-c", command], cwd=self.path, env=environment, check=False, **options)

    def settle(self) -> None:
        """Return when the server has seen every RELEASE and FORGET so far: nobody waits for those."""
        for _ in range(32):  # the kernel passes on at most 8 requests before the FORGETs that came earlier
            os.statvfs(self.path)

    def all_free(self) -> bool:
        """Whether no page is in use any more."""
        self.settle()
        free: bool = self.call("all_free")
        return free

    def empty(self) -> None:
        """Close every handle of a LIP, remove everything, and see that all pages are free and the books right."""
        self.call("reset")
        self.sh("rm -rf -- ..?* .[!.]* *; rm -rf $OUT/*")
        self.settle()
        self.call("check")

    def stop(self) -> None:
        """End the server: it must unmount and leave nothing behind."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            rest = self.process.stdout.read()
            assert self.process.wait(timeout=20) == 0, self.log()
            assert b"unmounted" in rest
        finally:
            self.dismiss()

    def dismiss(self) -> None:
        """End process and mount, in any state."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            assert stream is not None
            stream.close()
        if f" {self.path} " in Path("/proc/mounts").read_text():
            subprocess.run(["fusermount3", "-uz", str(self.path)], check=True)


@contextmanager
def mounted(base: Path, *, num_pages: int = NUM_PAGES, page_bytes: int = PAGE_BYTES, **options: Any) -> Iterator[Mount]:
    """A mount for one test or module; it must end cleanly if the test did."""
    mount = Mount(base, num_pages, page_bytes, **options)
    try:
        mount.wait_mounted()
        yield mount
    except BaseException:
        mount.dismiss()
        raise
    mount.stop()


def a_kv_file(mount: Mount, name: str = "a.kv", count: int = 100) -> int:
    handle: int = mount.call("create", name)
    mount.call("append", handle, count)
    return handle


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def refused(code: int, call: Callable[..., object], *arguments: Any) -> None:
    with pytest.raises(OSError, match="Errno") as caught:
        call(*arguments)
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[code], arguments


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for a condition in another process, which sends no event."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def check_image(data: bytes, num_entries: int) -> None:
    """The bytes are the whole image of `num_entries`, and its digest is right."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["tokens"]["shape"] == [num_entries]
    at = {name: [8 + length + offset for offset in header[name]["data_offsets"]] for name in ("pages", "tokens")}
    pages = data[slice(*at["pages"])]
    digests = b"".join(digest(pages[i : i + PAGE_BYTES]) for i in range(0, len(pages), PAGE_BYTES))
    assert digest(digests + data[at["tokens"][0] :]).hex() == header["__metadata__"]["digest"]


def header_of(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def why_no_mount() -> str | None:
    """Why nothing can be mounted here as root, if so."""
    if os.geteuid() != 0:
        return "mounting as root needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"can't mount here: /dev/fuse: {error.strerror}"
    return None


needs_mount = pytest.mark.skipif(why_no_mount() is not None, reason=f"NO MOUNT TESTED: {why_no_mount()}")
