"""Checksums of plain files: what damage of a backing file is told, and what they cost who writes."""

import errno
import math
import os
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import trio

from kvfs.durable.fsck import fsck
from kvfs.durable.index import Rows
from kvfs.mount.disk_work import DiskWork
from kvfs.mount.eager import Eager
from kvfs.names.disk import Disk
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.sums import EXTENT_BYTES, Sums
from libsym.errors import SymError
from tests.kvfs.disks import TroubledDisk
from tests.kvfs.durable.damage import flip, number_of, sql
from tests.kvfs.durable.house import ROOT, House, failing, plain_of, running

BYTES = Random(1).randbytes(3 * EXTENT_BYTES + 1000)
PIECE = 128 << 10


class Programs:
    """Reads and writes plain files as the mount does."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.disk = DiskWork(house.volume, Eager())

    async def write(self, inode: Inode, offset: int, data: bytes) -> None:
        await self.disk.write(inode, plain_of(inode), offset, data, math.inf)
        inode.modified()

    async def read(self, inode: Inode, offset: int, size: int) -> bytes:
        return bytes(await self.disk.read(plain_of(inode), offset, size, math.inf))

    async def cut(self, inode: Inode, size: int) -> None:
        content = plain_of(inode)
        resize = lambda: content.resize(size)  # noqa: E731
        await self.disk.change(inode, content, size, resize, math.inf, start=size, is_cut=True)
        inode.modified()

    async def make(self, name: bytes, data: bytes) -> Inode:
        """A file that was written in pieces and synced."""
        inode = self.house.volume.make_plain(self.house.tree.root, name, 0o600, 0, 0)
        for start in range(0, len(data), PIECE):
            await self.write(inode, start, data[start : start + PIECE])
        await self.house.keeper.sync(inode)
        return inode


@asynccontextmanager
async def programs_on(directory: Path, *, drain: bool = False) -> AsyncIterator[Programs]:
    async with running(House(directory), drain=drain) as house:
        yield Programs(house)


def backing(directory: Path) -> Path:
    (path,) = (directory / "files").iterdir()
    return path


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """A state with a note that was synced."""

    async def make() -> None:
        async with programs_on(tmp_path) as programs:
            await programs.make(b"note", BYTES)

    trio.run(make)
    return tmp_path


def unchecked(content: PlainFile) -> list[int]:
    """Extents that have no sum in the index."""
    return [each for each, value in enumerate(content.sums._kept) if not value]


DAMAGES: dict[str, tuple[Callable[[Path], object], set[int], str]] = {
    "flipped": (lambda path: flip(path, EXTENT_BYTES + 5), {1}, "bytes 262144 to 524288 are not as they were synced"),
    "flipped at its end": (lambda path: flip(path, len(BYTES) - 1), {3}, "bytes 786432 to 787432 are not as"),
    "overwritten": (lambda path: path.write_bytes(bytes(len(BYTES))), {0, 1, 2, 3}, "bytes 0 to 787432 are not as"),
    "truncated": (lambda path: path.write_bytes(BYTES[:262149]), {1, 2, 3}, "262149 of the 787432 bytes that were syn"),
}
"""Damages, each with its extents, and with what fsck says of it."""


@pytest.mark.parametrize("kind", DAMAGES)
async def test_damage_of_a_backing_file_is_eio_and_in_the_log_and_fsck_names_the_file(kind, noted, caplog):
    plant, damaged, what = DAMAGES[kind]
    assert fsck(noted).findings == ()
    plant(backing(noted))
    async with programs_on(noted) as programs:
        note = programs.house.fs.find(ROOT, "note")
        assert plain_of(note).size == len(BYTES), "bytes that are missing are not hidden by a size"
        for offset in range(0, len(BYTES), PIECE):
            extent = offset // EXTENT_BYTES
            if extent in damaged:
                told = f"damaged on disk: /note: bytes {extent * EXTENT_BYTES} to"
                with failing(errno.EIO, told):
                    await programs.read(note, offset, PIECE)
                assert told in caplog.text
            else:
                assert await programs.read(note, offset, PIECE) == BYTES[offset : offset + PIECE]
    report = fsck(noted, repair=True)
    assert [(each.kind, each.paths) for each in report.findings] == [("sum", ("/note",))]
    assert what in report.findings[0].what
    assert fsck(noted).findings == ()
    left = backing(noted).read_bytes()
    async with programs_on(noted) as programs:
        assert await programs.read(programs.house.fs.find(ROOT, "note"), 0, len(BYTES)) == left


async def test_a_write_heals_a_damaged_extent_that_it_replaces_and_is_eio_where_it_keeps_some(noted):
    flip(backing(noted), EXTENT_BYTES + 5)
    async with programs_on(noted) as programs:
        note = programs.house.fs.find(ROOT, "note")
        for change in (programs.write(note, EXTENT_BYTES + 100, b"some"), programs.cut(note, EXTENT_BYTES + 100)):
            with failing(errno.EIO, "damaged on disk"):
                await change
        await programs.write(note, EXTENT_BYTES - 100, BYTES[EXTENT_BYTES - 100 : 2 * EXTENT_BYTES + 100])
        assert await programs.read(note, 0, len(BYTES)) == BYTES
        await programs.house.keeper.sync(note)
    assert fsck(noted).findings == ()


async def test_damage_behind_a_daemon_s_back_is_found_at_the_first_read(tmp_path):
    async with programs_on(tmp_path) as programs:
        note = await programs.make(b"note", BYTES)
        flip(backing(tmp_path), 5)
        with pytest.raises(SymError, match="damaged on disk"):
            await programs.read(note, 100, 10)


async def test_small_bytes_in_memory_are_verified_without_a_worker(tmp_path):
    def never(*_arguments: object) -> int:
        raise AssertionError

    disk = Disk(pread=never, preadv=lambda fd, rooms, offset, _flags: os.preadv(fd, rooms, offset))
    async with running(House(tmp_path, disk=disk)) as house:
        programs = Programs(house)
        note = await programs.make(b"note", BYTES[:5000])
        plain_of(note).close()
        disk.nowait.is_local = True
        assert await programs.read(note, 100, 1000) == BYTES[100:1100]
        assert plain_of(note).sums.is_verified(0, 5000)
        flip(backing(tmp_path), 5)
        await programs.write(note, 5000, BYTES[5000:6000])
        await programs.house.keeper.sync(note)
        with failing(errno.EIO, "damaged on disk: /note: bytes 0 to 6000"):
            await programs.read(note, 100, 10)


async def test_a_file_that_is_emptied_during_its_first_read_is_not_damaged(noted):
    trouble = TroubledDisk()
    async with running(House(noted, disk=trouble.disk)) as house:
        programs, note = Programs(house), house.fs.find(ROOT, "note")
        before = plain_of(note)
        trouble.stall("open")

        async def read() -> None:
            assert bytes(await programs.disk.read(before, 0, PIECE, math.inf)) == b""

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.to_thread.run_sync(trouble.entered.acquire)
            house.volume.truncate(note, 0)
            trouble.go_on()


async def test_a_reader_between_extents_has_few_bytes_read_twice(tmp_path):
    num_read = 0

    def counted(fd: int, rooms: list[memoryview], offset: int) -> int:
        nonlocal num_read
        num_read += (found := os.preadv(fd, rooms, offset))
        return found

    async with running(House(tmp_path, disk=Disk(pread=counted))) as house:
        programs = Programs(house)
        note = await programs.make(b"note", BYTES)
        starts = [0, *range(EXTENT_BYTES - 4096, len(BYTES), PIECE)]
        parts = [await programs.read(note, start, stop - start) for start, stop in pairwise([*starts, len(BYTES)])]
        assert b"".join(parts) == BYTES
    assert num_read < 1.1 * len(BYTES)


async def test_first_writes_and_appends_make_no_commit(tmp_path):
    async with programs_on(tmp_path) as programs:
        num_commits = lambda: programs.house.keeper.statistics().num_commits  # noqa: E731
        root = programs.house.tree.root
        note, other = (programs.house.volume.make_plain(root, name, 0o600, 0, 0) for name in (b"note", b"other"))
        await programs.write(note, 0, BYTES[:1000])
        for offset in (5000, 0, 700):
            await programs.write(other, offset, b"some")
        assert num_commits() == 0
        await programs.house.keeper.sync(note)
        before = num_commits()
        await programs.write(note, 1000, BYTES[1000:])
        assert num_commits() == before
        await programs.write(note, 0, BYTES[:100])
        assert num_commits() == before + 1, "one that was synced is marked"
        await programs.write(note, 200, BYTES[200:300])
        assert num_commits() == before + 1, "and needs no other"


async def test_the_marks_of_one_cut_share_one_sync(tmp_path):
    async with programs_on(tmp_path) as programs:
        notes = [await programs.make(b"note%d" % each, BYTES[:5000]) for each in range(40)]
        for each in notes:
            await programs.read(each, 0, 10)  # of extents that nobody has verified a worker would read the rest first
        index = programs.house.state.index
        made, commit = list[Rows](), index.commit

        def counted(rows: Rows) -> None:
            made.append(rows)
            commit(rows)

        index.commit = counted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for each in notes:
                nursery.start_soon(programs.write, each, 10, b"new")
        assert [len(rows.sums) for rows in made] == [len(notes)]


async def test_a_daemon_that_ends_keeps_the_sums_that_it_knows(tmp_path):
    async with programs_on(tmp_path, drain=True) as programs:
        note = await programs.make(b"note", BYTES)
        await programs.write(note, 10, b"new")
        await programs.write(note, EXTENT_BYTES + 10, b"new")
        assert unchecked(plain_of(note)) == [0, 1, 2, 3], "the second mark takes seven ahead"
    async with programs_on(tmp_path) as programs:
        assert unchecked(plain_of(programs.house.fs.find(ROOT, "note"))) == [0, 1]


async def test_quiet_files_are_summed_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr("kvfs.durable.sums.QUIET_S", 0.01)
    async with programs_on(tmp_path) as programs:
        summer, is_summed = programs.house.keeper.summer, trio.Event()
        keep_now = summer._keep

        async def told(contents: list[PlainFile]) -> None:
            await keep_now(contents)
            if not any(content.sums.is_lacking(content.size) for content in contents):
                is_summed.set()

        note = await programs.make(b"note", BYTES)
        monkeypatch.setattr(summer, "_keep", told)
        await programs.write(note, 10, b"new")
        await programs.house.keeper.sync(note)
        await is_summed.wait()
        assert unchecked(plain_of(note)) == []


async def test_the_sums_of_many_quiet_files_share_a_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("kvfs.durable.sums.FILES_A_COMMIT", 4)
    async with programs_on(tmp_path) as programs:
        keeper = programs.house.keeper
        notes = [await programs.make(b"note%d" % each, BYTES[:1000]) for each in range(6)]
        for each in notes:
            await programs.write(each, 10, b"new")
        await keeper.sync_all()
        for each in notes:
            plain_of(each).close()  # as when the last handle goes
        keeper.summer.look()
        before = keeper.statistics().num_commits
        await keeper.summer.sum_quiet()
        assert keeper.statistics().num_commits == before + 2
        assert not any(unchecked(plain_of(each)) for each in notes)
        assert not any(plain_of(each)._file for each in notes), "nobody would close them"


async def test_a_damaged_row_of_sums_refuses_no_good_bytes_and_is_a_finding(noted, caplog):
    number = number_of(noted, "/note")
    row = bytearray(sql(noted, "SELECT record FROM sums WHERE number = ?", number)[0][0])
    row[-1] ^= 1
    sql(noted, "UPDATE sums SET record = ? WHERE number = ?", bytes(row), number)
    (finding,) = fsck(noted).findings
    assert (finding.kind, finding.paths) == ("sum", ("/note",))
    assert "a row of the checksums of its bytes is damaged" in finding.what
    async with programs_on(noted) as programs:
        note = programs.house.fs.find(ROOT, "note")
        assert await programs.read(note, 0, len(BYTES)) == BYTES
        assert "symphony fsck" in caplog.text
        await programs.write(note, 10, BYTES[10:20])
        await programs.house.keeper.sync(note)
        await programs.house.keeper.summer.sum(plain_of(note))
    assert fsck(noted).findings == ()
    assert len(sql(noted, "SELECT record FROM sums")) == 1


async def test_a_commit_of_a_mark_that_fails_fails_the_write_and_changes_no_byte(tmp_path, monkeypatch):
    async with programs_on(tmp_path) as programs:
        note = await programs.make(b"note", BYTES)

        def fail(_rows: Rows) -> None:
            raise SymError("the disk is full", errno.ENOSPC)

        with monkeypatch.context() as patch:
            patch.setattr(programs.house.state.index, "commit", fail)
            with pytest.raises(SymError, match="full"):
                await programs.write(note, 10, b"new")
        assert await programs.read(note, 0, len(BYTES)) == BYTES
        await programs.write(note, 10, b"new")
        assert (await programs.read(note, 0, 20)) == BYTES[:10] + b"new" + BYTES[13:20]
    assert fsck(tmp_path).findings == ()


@pytest.mark.parametrize("is_late", [False, True], ids=["before it", "behind the end"])
async def test_a_sum_that_a_mark_took_aside_is_not_put_back_where_the_file_has_grown(is_late, noted):
    async with programs_on(noted) as programs:
        # The second mark takes the last extent ahead.
        note = programs.house.fs.find(ROOT, "note")
        if not is_late:
            await programs.write(note, len(BYTES), b"more")
        await programs.write(note, 10, b"new")
        await programs.write(note, 2 * EXTENT_BYTES + 10, b"new")
        if is_late:
            await programs.write(note, 5 * EXTENT_BYTES, b"far")
        await programs.house.keeper.sync(note)
        await programs.read(note, 0, plain_of(note).size)
        await programs.house.keeper.summer.sum(plain_of(note))
        assert unchecked(plain_of(note)) == []
    assert fsck(noted).findings == ()


def test_a_file_that_nobody_changes_takes_little_memory_for_its_sums():
    """A state may have a million such files."""
    tracemalloc.start()
    try:
        sums = [Sums(array("Q", [1]), 100) for _ in range(1000)]
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 600 * len(sums)
    assert all(each._hasher is None for each in sums), "700 bytes that tracemalloc does not see"


async def test_sums_of_a_commit_that_failed_and_was_made_all_the_same_are_marked(tmp_path, monkeypatch):
    """The commit that failed is the first one with bytes of the file."""
    async with programs_on(tmp_path) as programs:
        index, note = programs.house.state.index, programs.house.make_plain("note")
        await programs.house.keeper.sync(note)
        commit = index.commit

        def fail(rows: Rows) -> None:
            commit(rows)
            raise SymError("the disk has failed", errno.EIO)

        await programs.write(note, 0, BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(index, "commit", fail)
            with pytest.raises(SymError, match="the disk has failed"):
                await programs.house.keeper.sync(note)
        await programs.write(note, 10, b"new")
    assert fsck(tmp_path).findings == ()
