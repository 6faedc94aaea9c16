"""A disk is like any directory, it records what is done in it, and it breaks as the rules say."""

import errno
import os
from pathlib import Path

import pytest

from tests.disk.log import ROOT, Made, Marked, Removed, Renamed, Resized, Synced, Written
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


def refused(code: int):
    return pytest.raises(OSError, match=rf"\[Errno {code}\]")


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
