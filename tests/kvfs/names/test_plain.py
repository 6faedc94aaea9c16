"""The bytes of a plain file, read by a worker while its owner changes them."""

import dataclasses
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvfs.names.disk import Disk, Unwritten
from kvfs.names.gaps import MAX_GAPS, UnfilledRanges
from kvfs.names.plain import UNWRITTEN_BYTES, PlainFile, sync_all
from kvfs.names.removals import Removals
from libsym.errors import SymError
from tests.kvfs.disks import TroubledDisk

WHOLE = bytes(range(256)) * 16


def failing(code: int) -> Callable[..., Any]:
    def fail(*_arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def a_file(directory: Path, **calls: Callable[..., Any]) -> PlainFile:
    """Make a plain file that contains WHOLE, with these calls in place of the real ones."""
    PlainFile(directory, "1.1.plain").write_at(0, WHOLE)
    calls_of: Any = calls
    return PlainFile.existing(directory, "1.1.plain", len(WHOLE), disk=dataclasses.replace(Disk(), **calls_of))


def test_gaps_are_the_bytes_that_nobody_wrote(tmp_path: Path) -> None:
    file, written, dice = PlainFile(tmp_path, "2.1.plain"), bytearray(), random.Random(3)
    for _ in range(500):
        start, size = dice.randrange(200), dice.randrange(1, 60)
        match dice.randrange(5):
            case 0:
                file.resize(start)
                written = written[:start].ljust(start, b"-")
                continue
            case 1:
                file.allocate(start, size)
                written = written.ljust(start + size, b"-")
                continue
            case 2:
                file.write_at(start, b"+" * size)
            case _:
                size = file.write_nowait(start, b"+" * size)
        if size:
            written = written.ljust(start, b"-")
            written[start : start + size] = b"+" * size
    assert file.size == len(written)
    gaps = list(file.gaps)
    assert {at for gap in gaps for at in gap} == {at for at, byte in enumerate(written) if byte == ord("-")}
    assert all(one.stop < next_one.start for one, next_one in pairwise(gaps)), "none touch"


def test_gaps_are_bounded() -> None:
    gaps = UnfilledRanges()
    for at in range(2 * MAX_GAPS):
        gaps.grown(3 * at, 3 * at + 2)
    assert len(list(gaps)) == MAX_GAPS
    gaps.written(0, 9 * MAX_GAPS)
    assert not gaps


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_is_cut_while_it_is_read_ends_where_it_was_cut(tmp_path: Path, size: int) -> None:
    """The cut comes when the worker has decided what to read, but has not read it yet."""
    cuts = [size]

    def late(fd: int, rooms: list[memoryview], offset: int) -> int:
        if cuts:
            file.resize(cuts.pop())
        return os.preadv(fd, rooms, offset)

    file = a_file(tmp_path, pread=late)
    for _ in range(2):
        assert file.read_at(0, len(WHOLE)) == WHOLE[:size]


def test_a_cut_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = a_file(tmp_path, ftruncate=failing(errno.EIO))
    with pytest.raises(SymError, match="can't resize"):
        file.resize(100)
    assert file.read_at(0, 2 * len(WHOLE)) == WHOLE


def test_bytes_that_are_missing_below_are_an_error(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    os.truncate(file.path, 100)
    with pytest.raises(SymError, match=r"gave 100 of 4096 bytes"):
        file.read_at(0, len(WHOLE))
    file.path.unlink()
    file = PlainFile.existing(tmp_path, "1.1.plain", len(WHOLE))
    with pytest.raises(SymError, match="can't read backing file") as caught:
        file.read_at(0, len(WHOLE))
    assert caught.value.errno == errno.EIO


def test_the_log_is_for_what_is_wrong_with_the_disk_not_for_what_a_caller_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    levels = {errno.EFBIG: "DEBUG", errno.EINVAL: "DEBUG", errno.EIO: "WARNING", errno.ENOSPC: "WARNING"}
    for code, level in levels.items():
        with pytest.raises(SymError) as caught:
            a_file(tmp_path, pwritev=failing(code)).write_at(0, b"x")
        assert caught.value.errno == code
        assert [record.levelname for record in caplog.records] == [level]
        caplog.clear()


# Without waiting


def test_what_is_in_memory_is_read_at_once_and_nothing_else(tmp_path: Path) -> None:
    present = [len(WHOLE)]

    def preadv(fd: int, rooms: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if present[0] <= offset:
            raise BlockingIOError(errno.EAGAIN, "")
        return os.preadv(fd, [memoryview(rooms[0])[: present[0] - offset]], offset)

    def not_cached(_path: Path) -> int:
        raise BlockingIOError(errno.EAGAIN, "")

    file = a_file(tmp_path, preadv=preadv, open_nowait=not_cached)
    assert file.read_nowait(0, 10) is None, "it is not open"
    file.read_at(0, 1)
    assert file.read_nowait(0, 10_000) == WHOLE
    assert file.read_nowait(4000, 10_000) == WHOLE[4000:]
    assert file.read_nowait(4096, 10) == b""
    present[0] = 100
    assert file.read_nowait(0, 4096) is None, "fewer bytes are not the end of the file"
    assert file.read_nowait(200, 100) is None


def test_a_file_system_that_may_wait_in_any_call_is_asked_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def refuse(name: str) -> int:
        asked.append(name)
        raise OSError(errno.EOPNOTSUPP, "")

    disk = dataclasses.replace(
        Disk(),
        preadv=lambda *_rest: refuse("preadv"),
        pwritev=lambda *rest: refuse("pwritev") if rest[-1] else os.pwritev(*rest),
    )
    for number in range(2):
        file = PlainFile(tmp_path, f"{number}.plain", disk=disk)
        file.write_at(0, WHOLE)
        assert file.read_nowait(0, 10) is None
        assert file.write_nowait(0, b"x") == 0
    assert asked == ["preadv", "pwritev"]


def test_as_much_is_written_at_once_as_the_file_system_takes(tmp_path: Path) -> None:
    taken = [3]

    def pwritev(fd: int, data: list[bytes | memoryview], offset: int, flags: int) -> int:
        if flags and not taken[0]:
            raise BlockingIOError(errno.EAGAIN, "")
        return os.pwrite(fd, data[0][: taken[0]] if flags else data[0], offset)

    file = PlainFile(tmp_path, "1.1.plain", disk=dataclasses.replace(Disk(), pwritev=pwritev))
    file.write_at(0, b"ab")
    assert file.write_nowait(2, b"cdefg") == 3
    assert file.size == 5
    taken[0] = 0
    assert file.write_nowait(5, b"fg") == 0
    assert file.read_at(0, 100) == b"abcde"


# Without a backing file


def an_unwritten_file(directory: Path, data: bytes = b"small", **calls: Callable[..., Any]) -> PlainFile:
    """Make a file whose bytes are in memory."""
    calls_of: Any = calls
    disk = dataclasses.replace(Disk(), unwritten=Unwritten(), **calls_of)
    disk.unwritten.most_bytes = 1 << 20
    disk.nowait.is_local = True
    file = PlainFile(directory, "1.1.plain", disk=disk)
    assert file.write_nowait(0, data) == len(data)
    return file


def test_a_small_new_file_takes_no_call_of_the_disk_before_its_sync(tmp_path: Path) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError

    file = an_unwritten_file(tmp_path, open=never, unlink=never)
    assert file.write_nowait(10, b"more") == 4
    assert file.write_nowait(0, b"S") == 1
    wanted = b"Small" + bytes(5) + b"more"
    assert file.read_nowait(0, 100) == file.read_at(0, 100) == wanted
    room = memoryview(bytearray(100))
    assert file.read_into(3, room) == len(wanted) - 3
    assert room[: len(wanted) - 3] == wanted[3:]
    assert list(file.gaps) == [range(5, 10)]
    assert file.is_dirty
    assert not file.exists
    file.discard()
    assert file.read_at(0, 100) == b""
    assert file.write_nowait(0, b"late") == 0
    assert file._disk.unwritten.num_bytes == 0
    assert not list(tmp_path.iterdir())


def test_the_first_sync_makes_the_backing_file(tmp_path: Path) -> None:
    file = an_unwritten_file(tmp_path)
    file.sync()
    assert file.exists
    assert not file.is_dirty
    assert file.path.read_bytes() == file.read_nowait(0, 100) == b"small"
    file.write_at(0, b"S")
    assert file.path.read_bytes() == b"Small"


@pytest.mark.parametrize("change", ["write_at", "resize", "allocate"])
def test_a_change_by_a_worker_keeps_the_bytes_in_memory(tmp_path: Path, change: str) -> None:
    file = an_unwritten_file(tmp_path)
    arguments, wanted = {
        "write_at": ((5, WHOLE), b"small" + WHOLE),
        "resize": ((3,), b"sma"),
        "allocate": ((0, 7), b"small\0\0"),
    }[change]
    getattr(file, change)(*arguments)
    assert file.path.read_bytes() == file.read_at(0, 10_000) == wanted


def test_a_change_while_the_backing_file_is_made_waits_for_a_worker(tmp_path: Path) -> None:
    def pwritev(*arguments: Any) -> int:
        assert file.exists or file.write_nowait(1, b"X") == 0
        return os.pwritev(*arguments)

    file = an_unwritten_file(tmp_path, pwritev=pwritev)
    file.sync()
    assert file.path.read_bytes() == b"small"
    file.write_at(1, b"X")
    assert file.path.read_bytes() == b"sXall"
    assert file.is_dirty, "the change came after the sync had begun"


def test_a_file_that_is_removed_while_its_backing_file_is_made_leaves_none(tmp_path: Path) -> None:
    def pwritev(*arguments: Any) -> int:
        file.discard()
        return os.pwritev(*arguments)

    file = an_unwritten_file(tmp_path, pwritev=pwritev)
    file.sync()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_bytes_stay_in_memory_until_the_disk_takes_them(tmp_path: Path, trouble: TroubledDisk, call: str) -> None:
    file = an_unwritten_file(tmp_path, open=trouble.disk.open, pwritev=trouble.disk.pwritev)
    trouble.fail(call, errno.ENOSPC)
    with pytest.raises(SymError, match="can't sync") as caught:
        file.sync()
    assert caught.value.errno == errno.ENOSPC
    assert file.is_dirty
    assert not list(tmp_path.iterdir())
    assert file.write_nowait(0, b"S") == 0, "the program that writes more should get the error"
    with pytest.raises(SymError, match="can't write"):
        file.write_at(0, b"S")
    assert file.read_at(0, 100) == b"small"
    trouble.mend()
    file.write_at(0, b"S")
    file.sync()
    assert file.path.read_bytes() == b"Small"


@pytest.mark.parametrize("call", ["open", "pwritev", "begin_writing", "fdatasync", None])
def test_names_wait_for_the_first_sync_of_a_new_file_whether_or_not_the_disk_takes_it(
    tmp_path: Path, trouble: TroubledDisk, call: str | None
) -> None:
    def fdatasync(number: int) -> None:
        assert file.is_awaited, "a power cut would leave zeros"
        trouble.disk.fdatasync(number)

    file = an_unwritten_file(tmp_path)
    for each in ("open", "pwritev", "begin_writing"):
        setattr(file._disk, each, getattr(trouble.disk, each))
    file._disk.fdatasync = fdatasync
    if call is not None:
        trouble.fail(call, errno.EIO)
    assert file.is_awaited
    assert len(sync_all([file])) == (call is not None)
    assert not file.is_awaited


def test_names_wait_for_no_sync_after_a_worker_has_changed_the_file(tmp_path: Path) -> None:
    file = an_unwritten_file(tmp_path)
    file.write_at(5, b"more")
    assert not file.is_awaited


def test_bytes_without_a_backing_file_are_bounded(tmp_path: Path) -> None:
    file = an_unwritten_file(tmp_path, b"")
    assert file.write_nowait(0, bytes(UNWRITTEN_BYTES + 1)) == 0, "such a file is not small"
    assert file.write_nowait(UNWRITTEN_BYTES, b"x") == 0
    disk = dataclasses.replace(Disk(), unwritten=Unwritten())
    disk.unwritten.most_bytes = 3 * 4096
    files = [PlainFile(tmp_path, f"{each}.1.plain", disk=disk) for each in range(3)]
    assert [each.write_nowait(0, bytes(5000)) for each in files] == [5000, 0, 0], "whole blocks count"
    assert files[1].write_nowait(0, b"x") == 1
    assert files[0].write_nowait(5000, b"x") == 1, "the block is there already"
    files[0].discard()
    assert files[2].write_nowait(0, bytes(5000)) == 5000
    files[2].write_at(5000, b"x")
    assert files[1].write_nowait(0, bytes(8192)) == 8192
    files[1].discard()
    assert disk.unwritten.num_bytes == 0


def test_files_that_are_synced_together_fail_alone(tmp_path: Path, trouble: TroubledDisk) -> None:
    files = [PlainFile(tmp_path, f"{each}.1.plain", disk=trouble.disk) for each in range(3)]
    for file in files:
        file.write_at(0, WHOLE)
    trouble.disk.fdatasync = lambda number: (
        failing(errno.EIO)() if Path(f"/proc/self/fd/{number}").readlink() == files[1].path else None
    )
    errors = sync_all(files)
    assert [(file, error.errno) for file, error in errors.items()] == [(files[1], errno.EIO)]
    assert [file.is_dirty for file in files] == [False, True, False]
    assert trouble.calls.count("begin_writing") == 3


@pytest.mark.parametrize("is_offered", [True, False])
def test_a_file_is_opened_at_once_where_a_read_was_possible_at_once(tmp_path: Path, *, is_offered: bool) -> None:
    opened = list[Path]()

    def preadv(fd: int, rooms: list[memoryview], offset: int, flags: int) -> int:
        if flags and not is_offered:
            raise OSError(errno.EOPNOTSUPP, "")
        return os.preadv(fd, rooms, offset)

    def open_nowait(path: Path) -> int:
        opened.append(path)
        return os.open(path, os.O_RDWR)

    file = a_file(tmp_path, preadv=preadv, open_nowait=open_nowait)
    assert file.read_nowait(0, 10) is None, "nothing is known of the file system"
    file.read_at(0, 10)
    assert (file.read_nowait(0, 10) == WHOLE[:10]) == is_offered
    file.close()
    assert (file.read_nowait(0, 10) == WHOLE[:10]) == is_offered
    assert opened == [file.path] * is_offered


@pytest.mark.parametrize("call", ["begin_writing", "fdatasync"])
def test_bytes_that_the_disk_has_refused_are_in_doubt_even_if_it_takes_the_next(
    tmp_path: Path, trouble: TroubledDisk, call: str
) -> None:
    file = PlainFile(tmp_path, "1.1.plain", disk=trouble.disk)
    file.write_at(0, WHOLE)
    trouble.fail(call, errno.ENOSPC)
    assert sync_all([file])[file].errno == errno.ENOSPC
    trouble.mend()
    assert sync_all([file])[file].errno == errno.EIO
    file.write_at(0, WHOLE)
    assert sync_all([file]) == {}


# Removed


def test_a_late_reader_of_a_file_that_is_gone_does_not_bring_it_back(tmp_path: Path) -> None:
    """Left behind, it would never be removed."""
    removed: list[Path] = []

    def late(path: Path, flags: int) -> int:
        file.discard()
        path.unlink(missing_ok=True)
        return os.open(path, flags)

    disk = dataclasses.replace(Disk(), open=late)
    file = PlainFile.existing(
        tmp_path, "1.1.plain", 100, disk=disk, remove=lambda path, _descriptor: removed.append(path)
    )
    assert file.read_at(0, len(WHOLE)) == b""
    assert removed == [file.path]
    fresh = file = PlainFile(tmp_path, "1.2.plain", disk=disk)
    with pytest.raises(SymError, match="it was removed"):
        fresh.write_at(0, b"x")
    assert not fresh.path.exists(), "whoever made it after it was removed has removed it"
    assert fresh.size == 0


def test_files_are_unlinked_and_closed_in_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trouble = TroubledDisk()
    removals = Removals(trouble.disk)

    def files(count: int) -> list[PlainFile]:
        files = [PlainFile(tmp_path, f"{each}.plain", disk=trouble.disk, removals=removals) for each in range(count)]
        for file in files:
            file.write_at(0, WHOLE)
        return files

    trouble.stall("unlink")
    for file in files(3):
        file.discard()
    trouble.entered.acquire()
    assert not removals.wait(0)
    assert len(list(tmp_path.iterdir())) == 3
    trouble.go_on()
    assert removals.wait(20)
    assert not list(tmp_path.iterdir())
    trouble.fail("unlink", errno.EIO)
    files(1)[0].discard()
    assert removals.wait(20)
    assert "can't remove /" in caplog.text


# To last


@pytest.fixture
def trouble() -> TroubledDisk:
    return TroubledDisk()


@pytest.fixture(name="file")
def _file(tmp_path: Path, trouble: TroubledDisk) -> PlainFile:
    """A file on the troubled disk, which was never synced."""
    return PlainFile(tmp_path, "1.1.plain", disk=trouble.disk)


def test_a_file_is_dirty_from_its_first_change_to_the_end_of_a_sync(file: PlainFile, trouble: TroubledDisk) -> None:
    assert not file.is_dirty
    for change, *arguments in ((file.write_at, 0, WHOLE), (file.resize, 100), (file.allocate, 0, 200)):
        change(*arguments)
        assert file.is_dirty
        file.sync()
        assert not file.is_dirty
    assert trouble.calls.count("fdatasync") == 3
    file.sync()
    assert trouble.calls.count("fdatasync") == 3, "there was nothing to do"


def test_bytes_that_come_during_a_sync_are_for_the_next_one(tmp_path: Path) -> None:
    file = a_file(tmp_path, fdatasync=lambda _fd: file.write_at(0, b"x") if once.pop() else None)
    once = [False, True]
    file.write_at(0, b"y")
    for is_dirty in (True, False):
        file.sync()
        assert file.is_dirty == is_dirty


def test_a_change_that_ends_after_a_sync_is_for_the_next_one(tmp_path: Path) -> None:
    """The change may have begun before the sync."""

    def pwritev(fd: int, data: list[bytes], offset: int, _flags: int) -> int:
        file.sync()
        return os.pwritev(fd, data, offset)

    file = a_file(tmp_path, pwritev=pwritev)
    file.write_at(0, b"y")
    assert file.is_dirty


def test_a_file_of_an_earlier_daemon_is_synced_once_more_and_ends_where_it_was_said_to(tmp_path: Path) -> None:
    for name in ("1.1.plain", "2.1.plain"):
        (tmp_path / name).write_bytes(WHOLE)
    file = PlainFile.existing(tmp_path, "1.1.plain", 100)
    assert (file.size, file.is_dirty) == (100, True), "that daemon may have been killed before it could sync"
    file.sync()
    assert not file.is_dirty
    file.resize(200)
    assert file.read_at(0, 300) == WHOLE[:100] + bytes(100)
    file = PlainFile.existing(tmp_path, "2.1.plain", 0)
    file.write_at(10, b"x")
    assert file.read_at(0, 300) == bytes(10) + b"x"


def fail_sync(file: PlainFile, trouble: TroubledDisk, code: int = errno.EIO) -> None:
    trouble.fail("fdatasync", code)
    with pytest.raises(SymError, match="can't sync") as caught:
        file.sync()
    assert caught.value.errno == code
    trouble.mend()


def test_a_sync_that_failed_fails_until_every_byte_was_written_anew(file: PlainFile, trouble: TroubledDisk) -> None:
    file.write_at(0, WHOLE)
    fail_sync(file, trouble, errno.ENOSPC)
    for at, data in ((0, b""), (2048, WHOLE[2048:]), (0, WHOLE[:2048])):
        if data:
            file.write_at(at, data)
        with pytest.raises(SymError, match="was not written anew") as caught:
            file.sync()
        assert caught.value.errno == errno.EIO
        assert file.is_dirty
        assert file.sync_failed
    file.write_at(2048, WHOLE[2048:])
    file.sync()
    assert not file.is_dirty
    assert not file.sync_failed
    file.write_at(0, WHOLE)
    fail_sync(file, trouble)
    file.resize(0)
    file.sync()
    assert not file.sync_failed, "of bytes that were cut off"


def test_bytes_that_were_being_written_while_a_sync_failed_are_in_doubt(tmp_path: Path, trouble: TroubledDisk) -> None:
    def pwritev(*arguments: Any) -> int:
        written = trouble.disk.pwritev(*arguments)
        fail_sync(file, trouble)
        return written

    file = PlainFile(tmp_path, "1.1.plain", disk=dataclasses.replace(trouble.disk, pwritev=pwritev))
    file.write_at(0, WHOLE)
    with pytest.raises(SymError, match="was not written anew"):
        file.sync()
    assert file.sync_failed


class Noticed:
    """A lock that tells when two want it."""

    def __init__(self) -> None:
        self.both = threading.Event()
        self._lock, self._num = threading.Lock(), 0

    def __enter__(self) -> None:
        self._num += 1
        if self._num == 2:
            self.both.set()
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def test_two_syncs_at_once_both_fail_where_linux_tells_one_of_the_error(tmp_path: Path) -> None:
    """A program may sync a file that is being written back."""
    noticed, errors = Noticed(), [OSError(errno.EIO, "planted")]

    def fdatasync(_fd: int) -> None:
        assert noticed.both.wait(10)
        if errors:
            raise errors.pop()

    file = a_file(tmp_path, fdatasync=fdatasync)
    file._syncing = noticed  # type: ignore[assignment]  # a lock of another type
    file.write_at(0, WHOLE)
    with ThreadPoolExecutor() as pool:
        found = [each.exception() for each in [pool.submit(file.sync), pool.submit(file.sync)]]
    assert [type(each) for each in found] == [SymError, SymError]
    assert file.is_dirty


def test_an_open_file_does_not_hold_up_the_end_of_its_process(tmp_path: Path) -> None:
    """No thread starts any more that could close the file."""
    program = f"""
import sys
from pathlib import Path
from kvfs.names.plain import PlainFile
sys.kept = PlainFile(Path({str(tmp_path)!r}), "1.1.plain")
sys.kept.write_at(0, b"kept")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
