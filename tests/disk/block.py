"""A real ext4 on a disk for tests: power cuts below the file system, which replays its journal afterwards.

    with Ext4(tmp_path) as ext4:
        ...                                     # use ext4.path
        ext4.disk.mark("synced")
        log = ext4.disk.log()
    for state in states(log, seed=1, count=20, after=MOUNTED):
        with mounted(state, tmp_path / "after") as path:
            ...

The image is one file of a `Disk`, below a loop device. So its log has the block writes and flushes of ext4, and a state
of it is an image whose writes since the last flush are there, lost or torn. It needs root, a loop device, and seconds.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.disk import recorder
from tests.disk.powercut import State, materialize
from tests.disk.recorder import Disk

IMAGE = "image"
MOUNTED = "mounted"
"""The mark in the log behind which the empty file system is mounted."""

_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount", "e2fsck")


def available() -> str:
    """Why there can be no ext4 here; empty if there can."""
    if os.geteuid() != 0:
        return "NO BLOCK DEVICE TESTED: it takes root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"NO BLOCK DEVICE TESTED: {', '.join(missing)} not installed"
    if why := recorder.available():
        return why
    with tempfile.TemporaryDirectory() as directory:
        image = Path(directory) / IMAGE
        image.touch()
        os.truncate(image, 1 << 20)
        try:
            with _attached(image):
                pass
        except RuntimeError as error:
            return f"NO BLOCK DEVICE TESTED: {error}"
    return ""


class Ext4:
    """A new file system of `size_bytes`, mounted at `base`/ext4. `disk` below it records, fails and hangs."""

    def __init__(self, base: Path, *, size_bytes: int = 64 << 20, options: str = "defaults") -> None:
        self.path = base / "ext4"
        with ExitStack() as stack:
            self.disk = stack.enter_context(Disk(base))
            image = self.disk.path / IMAGE
            image.touch()
            os.truncate(image, size_bytes)
            _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
            self.disk.settle()
            stack.enter_context(_mounted(image, self.path, options))
            self.disk.mark(MOUNTED)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmount it, and the disk below."""
        self._stack.close()


@contextmanager
def mounted(state: State, base: Path, *, options: str = "defaults") -> Iterator[Path]:
    """The file system of this state, mounted: ext4 has replayed its journal. It is checked when it is unmounted."""
    materialize(state, base / "lower")
    image = base / "lower" / IMAGE
    with _mounted(image, base / "ext4", options):
        yield base / "ext4"
    _run("e2fsck", "-f", "-n", str(image))


@contextmanager
def _mounted(image: Path, path: Path, options: str) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    with _attached(image) as device:
        _run("mount", "-t", "ext4", "-o", options, device, str(path))
    # The loop device is detached already, and goes when it is unmounted.
    try:
        with _guard(path):
            yield
    finally:
        try:
            _run("umount", str(path))
        except RuntimeError:  # somebody is in it; what is mounted must not outlive the test all the same
            _run("umount", "-l", str(path))
            raise


@contextmanager
def _attached(image: Path) -> Iterator[str]:
    device = _run("losetup", "--find", "--show", str(image)).strip()
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Unmounts when this process is gone, even by SIGKILL: a pipe ends then."""
    program = 'read -r over || umount -l "$0"'
    with subprocess.Popen(["sh", "-c", program, str(path)], stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.communicate(b"over\n")


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"{' '.join(command)} gave {done.returncode}: {said}")
    return done.stdout
