"""A disk is like any directory, it records what is done in it, and it breaks as the rules say."""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disk.allocation import punch
from tests.disk.log import ROOT, Made, Marked, Punched, Removed, Renamed, Resized, Synced, Written
from tests.disk.recorder import Disk, available

pytestmark = pytest.mark.skipif(bool(available()), reason=available())


@pytest.fixture
def disk(tmp_path):
    with Disk(tmp_path) as disk:
        yield disk


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b"x")


def page(byte: bytes, size: int = 4096) -> mmap.mmap:
    """Memory that O_DIRECT takes."""
    memory = mmap.mmap(-1, size)
    memory[:] = byte * size
    return memory


def refused(code: int):
    return pytest.raises(OSError, match=rf"\[Errno {code}\]")


def test_a_hole_is_punched_and_space_is_allocated(disk):
    descriptor = os.open(disk.path / "slots", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 16384)
    assert disk.used() == 16384
    os.pwrite(descriptor, b"x" * 16384, 0)
    punch(descriptor, 4096, 8192)
    assert isinstance(disk.log().operations[-1], Punched)
    assert os.pread(descriptor, 16384, 0) == b"x" * 4096 + bytes(8192) + b"x" * 4096
    assert disk.used() == 8192
    os.close(descriptor)


def test_every_change_is_recorded_in_order_with_its_bytes(disk):
    descriptor = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(descriptor, b"hello")
    os.fdatasync(descriptor)
    (disk.path / "a").rename(disk.path / "b")
    os.pwrite(descriptor, b"J", 0)
    os.ftruncate(descriptor, 4)
    disk.mark("now")
    sync_directory(disk.path)
    (disk.path / "b").unlink()
    os.close(descriptor)
    log = disk.log()
    made = log.operations[1]
    assert isinstance(made, Made)
    file = made.file
    assert log.operations[2:] == (
        Written("a", file, 0, 5, 0),
        Synced("a", file, 3, data_only=True),
        Renamed("a", file, ROOT, "a", "b", ROOT, "b"),
        Written("b", file, 0, 1, 5),
        Resized("b", file, 4),
        Marked("now"),
        Synced("", ROOT, 8),
        Removed("b", file, ROOT, "b"),
    )
    assert bytes(log.written(log.operations[2])) == b"hello"
    assert log.place_of("now") == 7


def test_a_rule_fails_the_operation_that_it_means_and_no_other(disk):
    disk.fail("write", "a", after=1, times=2, errno=errno.ENOSPC)
    a = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT)
    b = os.open(disk.path / "b", os.O_RDWR | os.O_CREAT)
    assert os.write(a, b"1") == 1
    for _ in range(2):
        with refused(errno.ENOSPC):
            os.write(a, b"2")
        assert os.write(b, b"2") == 1
    assert os.write(a, b"3") == 1
    assert os.pread(a, 9, 0) == b"13"
    assert disk.count("write") == 6
    assert disk.count("write", "a") == 4
    os.close(a)
    os.close(b)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("create", lambda path: (path / "new").touch()),
        ("mkdir", lambda path: (path / "new").mkdir()),
        ("unlink", lambda path: (path / "a").unlink()),
        ("rmdir", lambda path: (path / "d").rmdir()),
        ("rename", lambda path: (path / "a").rename(path / "d" / "new")),
        ("truncate", lambda path: os.truncate(path / "a", 0)),
        ("setattr", lambda path: (path / "a").chmod(0o600)),
        ("write", lambda path: append(path / "a")),
        ("open", lambda path: (path / "a").open().close()),
        ("read", lambda path: (path / "a").read_text()),
        ("fsyncdir", sync_directory),
    ],
)
def test_what_failed_has_not_happened_and_goes_well_when_it_is_tried_again(disk, op, change):
    (disk.path / "a").write_text("a")
    (disk.path / "d").mkdir()
    before = list(disk.log())
    disk.fail(op)
    with refused(errno.EIO):
        change(disk.path)
    after = list(disk.log())
    assert [each for each in after if not isinstance(each, Synced)] == before
    assert [each.failed for each in after if isinstance(each, Synced)] == [True] * (op == "fsyncdir")
    change(disk.path)


def test_many_operations_hang_at_a_time_and_can_be_failed(disk):
    disk.hang("fsync", times=20)

    def sync(number: int) -> int:
        with (disk.path / str(number)).open("wb") as file:
            try:
                os.fsync(file)
            except OSError as error:
                return error.errno or 0
        return 0

    with ThreadPoolExecutor(20) as threads:
        waiting = [threads.submit(sync, number) for number in range(20)]
        disk.wait_hung(20)
        assert disk.resume("fsync", "1*", errno=errno.EIO) == 11
        assert disk.resume() == 9
        assert [one.result() for one in waiting] == [errno.EIO if str(number)[0] == "1" else 0 for number in range(20)]


def test_a_sync_that_hangs_covers_what_was_written_before_it_began(disk):
    with ThreadPoolExecutor() as threads:
        descriptor = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.pwrite(descriptor, page(b"a"), 0)
        disk.hang("fsync")
        waiting = threads.submit(os.fsync, descriptor)
        disk.wait_hung()
        (disk.path / "b").touch()
        disk.resume()
        waiting.result()
        os.close(descriptor)
    *_, written, made, synced = disk.log()
    assert (type(written), type(made), type(synced)) == (Written, Made, Synced)
    assert synced.start == len(disk.log()) - 2


def test_a_disk_has_a_limit(disk):
    descriptor = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, b"x" * 8192, 0)
    disk.limit(16384)
    assert os.statvfs(disk.path).f_bavail == 2
    assert os.pwrite(descriptor, b"y" * 16384, 4096) == 12288
    with refused(errno.ENOSPC):
        os.pwrite(descriptor, b"z", 16384)
    with refused(errno.ENOSPC):
        os.posix_fallocate(descriptor, 0, 20480)
    with refused(errno.ENOSPC):
        (disk.path / "b").touch()
    assert os.pwrite(descriptor, b"z" * 16384, 0) == 16384
    os.ftruncate(descriptor, 4096)
    assert disk.used() == 4096
    (disk.path / "b").write_bytes(b"x" * 8192)
    (disk.path / "b").unlink()
    assert disk.used() == 4096
    os.close(descriptor)
