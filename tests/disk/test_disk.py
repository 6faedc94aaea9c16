"""A disk is like any directory, it records what is done in it, and it breaks as the rules say."""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disk.allocation import punch
from tests.disk.log import ROOT, Linked, Made, Marked, Punched, Removed, Renamed, Resized, Settled, Synced, Written
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


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


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


def test_a_disk_is_a_directory_like_any_other(disk):
    data = os.urandom(3_000_001)
    (disk.path / "d").mkdir()
    (disk.path / "a").write_bytes(data)
    assert (disk.path / "a").read_bytes() == (disk.lower / "a").read_bytes() == data
    (disk.path / "a").rename(disk.path / "d" / "b")
    (disk.path / "d" / "c").hardlink_to(disk.path / "d" / "b")
    (disk.path / "d" / "l").symlink_to("b")
    assert names(disk.path / "d") == ["b", "c", "l"]
    assert (disk.path / "d" / "l").read_bytes() == data
    assert ((disk.path / "d" / "c").stat().st_nlink, (disk.path / "d" / "c").stat().st_size) == (2, len(data))
    (disk.path / "d" / "c").chmod(0o604)
    os.utime(disk.path / "d" / "c", ns=(1_000_000_001, 2_000_000_002))
    status = (disk.path / "d" / "b").stat()
    assert (status.st_mode, status.st_atime_ns, status.st_mtime_ns) == (0o100604, 1_000_000_001, 2_000_000_002)
    with (disk.path / "d" / "b").open("rb") as b, mmap.mmap(b.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        assert mapped[:] == data
    for name in "bcl":
        (disk.path / "d" / name).unlink()
    (disk.path / "d").rmdir()
    assert names(disk.path) == []
    for number in range(300):
        (disk.path / f"a file with a rather long name, number {number}").touch()
    assert len(set(names(disk.path))) == 300


def test_an_unlinked_file_lives_while_it_is_open(disk):
    with (disk.path / "a").open("w+b", buffering=0) as file:
        file.write(b"here")
        (disk.path / "a").unlink()
        file.write(b" still")
        assert os.pread(file.fileno(), 10, 0) == b"here still"
        assert os.fstat(file.fileno()).st_nlink == 0


def test_appending_and_truncating(disk):
    for word in ("one", "two"):
        with (disk.path / "a").open("a") as file:
            file.write(word)
    for size, left in (4, b"onet"), (6, b"onet\0\0"), (0, b""):
        os.truncate(disk.path / "a", size)
        assert (disk.path / "a").read_bytes() == left


def test_o_direct_wants_whole_sectors_as_a_disk_does(disk):
    descriptor = os.open(disk.path / "slots", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert os.pwritev(descriptor, [page(b"a"), page(b"b")], 4096) == 8192
    into = page(b"-")
    assert os.preadv(descriptor, [into], 8192) == 4096
    assert into[:] == b"b" * 4096
    for data, offset in (b"odd", 0), (page(b"c"), 100):
        with refused(errno.EINVAL):
            os.pwrite(descriptor, data, offset)
    os.close(descriptor)


def test_a_hole_is_punched_and_space_is_allocated(disk):
    descriptor = os.open(disk.path / "slots", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 16384)
    assert disk.used() == 16384
    os.pwrite(descriptor, b"x" * 16384, 0)
    punch(descriptor, 4096, 8192)
    assert isinstance(disk.log().operations[-1], Punched)
    assert os.pread(descriptor, 16384, 0) == b"x" * 4096 + bytes(8192) + b"x" * 4096
    assert os.lseek(descriptor, 0, os.SEEK_HOLE) == 4096
    assert disk.used() == 8192
    os.close(descriptor)


def test_a_new_disk_finds_what_an_older_one_left(tmp_path):
    with Disk(tmp_path) as disk:
        (disk.path / "d").mkdir()
        (disk.path / "d" / "a").write_text("kept")
        (disk.path / "b").hardlink_to(disk.path / "d" / "a")
    assert names(tmp_path / "disk") == []
    with Disk(tmp_path) as disk:
        assert (disk.path / "b").read_text() == "kept"
        *before, settled = disk.log()
    assert settled == Settled()
    assert {operation.path for operation in before if not isinstance(operation, Settled | Marked)} == {"d", "d/a", "b"}


def test_a_disk_that_is_closed_lets_go_of_those_who_wait(tmp_path):
    with Disk(tmp_path) as disk, ThreadPoolExecutor() as threads:
        disk.hang("create")
        waiting = threads.submit((disk.path / "a").touch)
        disk.wait_hung()
        disk.close()
        with pytest.raises(OSError):
            waiting.result()


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


def test_a_file_is_the_same_by_every_name_and_no_other_gets_its_number(disk):
    (disk.path / "a").touch()
    (disk.path / "b").hardlink_to(disk.path / "a")
    (disk.path / "c").touch()
    (disk.path / "c").rename(disk.path / "b")
    (disk.path / "a").unlink()
    (disk.path / "a").touch()
    _, first, linked, second, renamed, removed, third = disk.log()
    assert (linked, removed) == (Linked("b", first.file, ROOT, "b"), Removed("a", first.file, ROOT, "a"))
    assert (renamed.file, renamed.other) == (second.file, first.file)
    assert len({first.file, second.file, third.file}) == 3


def test_a_write_through_o_dsync_is_synced_and_no_other(disk):
    descriptor = os.open(disk.path / "a", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"x")
    os.pwritev(descriptor, [b"y"], 1, os.RWF_DSYNC)
    os.close(descriptor)
    _, _, _, written, synced = disk.log()
    assert synced == Synced("a", written.file, 4, data_only=True, first=3)


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
        ("symlink", lambda path: (path / "new").symlink_to("a")),
        ("link", lambda path: (path / "new").hardlink_to(path / "a")),
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
    before = [operation for operation in disk.log() if not isinstance(operation, Synced)]
    disk.fail(op)
    with refused(errno.EIO):
        change(disk.path)
    assert [operation for operation in disk.log() if not isinstance(operation, Synced)] == before
    change(disk.path)


def test_a_short_write_says_so(disk):
    disk.fail("write", short=True)
    descriptor = os.open(disk.path / "a", os.O_RDWR | os.O_CREAT)
    assert os.write(descriptor, b"x" * 4096) == 2048
    assert os.fstat(descriptor).st_size == 2048
    assert disk.log().operations[-1].size == 2048
    os.close(descriptor)


def test_a_sync_that_failed_is_in_the_log(disk):
    disk.fail("fsync", "*.db")
    with (disk.path / "x.db").open("wb", buffering=0) as file:
        with refused(errno.EIO):
            os.fdatasync(file)
        os.fdatasync(file)
    assert [operation.failed for operation in disk.log() if isinstance(operation, Synced)] == [True, False]


def test_a_write_that_hangs_keeps_no_other_from_its_work(disk):
    with ThreadPoolExecutor() as threads:
        disk.hang("write", "a")
        waiting = threads.submit((disk.path / "a").write_text, "late")
        disk.wait_hung()
        (disk.path / "b").write_text("early")
        assert (disk.path / "a").read_text() == ""
        assert not waiting.done()
        assert disk.resume() == 1
        assert waiting.result() == 4
    assert (disk.path / "a").read_text() == "late"


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


def test_commands_get_through_while_clients_never_stop(disk):
    with ThreadPoolExecutor() as threads, (disk.path / "a").open("wb", buffering=0) as file:

        def write_until_it_fails() -> None:
            while True:
                os.pwrite(file.fileno(), b"x", 0)

        waiting = [threads.submit(write_until_it_fails) for _ in range(4)]
        while disk.count("write") < 100:
            pass
        disk.mark("seen")
        disk.fail("write", times=None)
        for one in waiting:
            with refused(errno.EIO):
                one.result()


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
