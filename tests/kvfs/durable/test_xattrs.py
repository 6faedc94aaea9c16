"""Attributes and names are charged to who has them, large attributes are in the index alone, and it gives room back."""

import errno
import math
import re
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from kvfs.durable import index as index_module
from kvfs.durable import keeper
from kvfs.durable.disk_room import RESERVE_BYTES
from kvfs.durable.fsck import fsck
from kvfs.durable.index import SPARE_PAGES, Index, Rows
from kvfs.durable.keeper import LOOKED_AT, WRITE_BACK_XATTRS_BYTES
from kvfs.durable.records import decode_xattrs, encode_xattrs
from kvfs.facts import xattrs
from kvfs.names.inode import ATTRIBUTE_BYTES, Inode
from kvfs.pages.accounts import NAME_BYTES, AccountLimits
from libsym.errors import NoSpace, OverQuota
from tests.kvfs.core.model import FREE_NAMES
from tests.kvfs.durable.damage import sql
from tests.kvfs.durable.house import ROOT, House, failing, is_clean, running

ANN, BOB = 1000, 1001
LARGE = bytes(range(250)) * 200


def put(house: House, inode: Inode, name: str, value: bytes) -> None:
    xattrs.put(house.volume, inode, f"user.{name}".encode(), value, inode.uid)


def file(house: House, name: str, uid: int = ANN, **attributes: Any) -> Inode:
    inode = house.make_plain(name, uid=uid)
    for each, value in attributes.items():
        put(house, inode, each, value)
    return inode


def link(house: House, size: int) -> None:
    house.tree.make(house.tree.root, b"l", stat.S_IFLNK, mode=0o777, uid=ANN, gid=ANN, target=b"t" * size)


def charged(house: House, uid: int = ANN) -> int:
    return house.fs.pool.accounts.of(uid).other_bytes


async def noted(house: House, inode: Inode) -> dict[bytes, bytes]:
    """Return all attributes of a file, wherever they are kept; their place does not change."""
    await house.keeper.bring_xattrs(inode)
    found = dict(inode.xattrs)
    inode.xattrs.put_away()
    return found


def rows(directory: Path) -> list[int]:
    return [number for (number,) in sql(directory, "SELECT number FROM xattrs ORDER BY number")]


async def test_attributes_links_and_names_count_to_the_quota_of_bytes(tmp_path):
    async with running(House(tmp_path, limits=AccountLimits(num_bytes=8192)), drain=True) as house:
        inode = file(house, "a", x=bytes(5000))
        assert charged(house) == ATTRIBUTE_BYTES + len("user.x") + 5000
        put(house, inode, "y", bytes(2900))
        with pytest.raises(OverQuota, match="uid 1000 is at its quota of 8192 bytes"):
            put(house, inode, "z", bytes(200))
        with pytest.raises(OverQuota):
            put(house, inode, "x", bytes(5200))
        with pytest.raises(OverQuota):
            link(house, 200)
        put(house, inode, "x", bytes(4000))
        house.tree.unlink(house.tree.root, b"a")
        assert charged(house) == 0

        for number in range(FREE_NAMES + 8192 // NAME_BYTES):
            file(house, f"{number:0255}")
        with pytest.raises(OverQuota, match="512 more are wanted"):
            file(house, "one too many")
        house.tree.rename(house.tree.root, b"0" * 255, house.tree.root, b"a" * 255)
        with pytest.raises(OverQuota):
            house.tree.link(house.tree.child(house.tree.root, b"a" * 255), house.tree.root, b"b")


async def test_attributes_links_and_names_count_to_the_disk(tmp_path):
    async with running(House(tmp_path, disk_limit=60000), drain=True) as house:
        inode = file(house, "a", x=bytes(50_000))
        with pytest.raises(NoSpace, match="at its limit of 60000 bytes"):
            put(house, inode, "y", bytes(10_000))
        room = (60_000 - house.keeper.statistics().disk_bytes) // NAME_BYTES
        for number in range(FREE_NAMES + room - 2):  # besides the root, and the first
            file(house, f"b{number}")
        with pytest.raises(NoSpace):
            file(house, "one too many")
        put(house, inode, "x", b"")
        put(house, inode, "y", bytes(10_000))


async def test_attributes_and_links_leave_the_disk_room_for_the_commits_that_remove_some(tmp_path, monkeypatch, caplog):
    """There is no limit but the disk's. An index that had filled the disk could never be told of removals."""
    there = RESERVE_BYTES + 100_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=there))
    async with running(House(tmp_path), drain=True) as house:
        file(house, "a", x=bytes(60_000))
        with pytest.raises(NoSpace, match=r"has 3\d{7} bytes left"):
            file(house, "b", x=bytes(60_000))
        there -= 60_000
        await house.keeper.sync_all()
        await house.keeper.jobs.idle()
        file(house, "c", x=bytes(20_000))
        with pytest.raises(NoSpace):
            link(house, 30_000)
        for number in range(2 * FREE_NAMES):
            file(house, f"{number}")  # a name is few bytes, and what is computed goes on
        there += 100_000 + NAME_BYTES * 2 * FREE_NAMES
        with pytest.raises(NoSpace):
            file(house, "d", x=bytes(60_000))
        await house.keeper.jobs.idle()
        file(house, "e", x=bytes(60_000))
    assert caplog.text.count("attributes and links must leave") == 1, "the log says once why"


async def test_large_attributes_are_in_the_index_alone_once_they_are_kept_and_few_stay_in_memory(tmp_path):
    async with running(House(tmp_path), drain=True) as house:
        large, small = file(house, "large", x=LARGE, y=b"1"), file(house, "small", x=b"1")
        await house.keeper.sync_all()
        assert (large.xattrs, large.xattrs.is_away) == ({}, True)
        assert (small.xattrs, small.xattrs.is_away) == ({b"user.x": b"1"}, False)
        assert await noted(house, large) == {b"user.x": LARGE, b"user.y": b"1"}
        assert large.xattrs.is_away, "who reads them leaves them where they are"
        await house.keeper.bring_xattrs(large)
        put(house, large, "y", b"2")
        assert not large.xattrs.is_away
    async with running(House(tmp_path), drain=True) as house:
        large = house.tree.child(house.tree.root, b"large")
        assert (large.xattrs, large.xattrs.is_away) == ({}, True)
        assert await noted(house, large) == {b"user.x": LARGE, b"user.y": b"2"}
        house.fs.kv_chmod(ROOT, "large", 0o640)
        await house.keeper.sync_all()
        assert large.xattrs.is_away, "another change of the file needs none of them"
        await house.keeper.bring_xattrs(large)
        put(house, large, "x", b"")
        await house.keeper.sync_all()
        assert large.xattrs == {b"user.x": b"", b"user.y": b"2"}
    assert rows(tmp_path) == []
    async with running(House(tmp_path), drain=True) as house:
        assert house.tree.child(house.tree.root, b"large").xattrs == {b"user.x": b"", b"user.y": b"2"}


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "crashed"])
async def test_a_file_that_is_unlinked_and_open_keeps_its_large_attributes_until_it_is_closed_or_the_next_start(
    tmp_path, is_closed
):
    async with running(House(tmp_path)) as house:
        inode = file(house, "a", x=LARGE)
        house.tree.opened(inode)
        await house.keeper.sync_all()
        house.tree.unlink(house.tree.root, b"a")
        await house.keeper.sync_all()
        assert await noted(house, inode) == house.state.index.xattrs(inode.number) == {b"user.x": LARGE}
        if is_closed:
            house.tree.closed(inode)
            await house.keeper.bring_xattrs(inode)
            assert inode.xattrs == {}, "nothing is read for a file that is gone"
            await house.keeper.sync_all()
            assert house.state.index.xattrs(inode.number) is None
    assert len(rows(tmp_path)) == 1 - is_closed
    assert is_clean(fsck(tmp_path))
    House(tmp_path).keeper.close()
    assert rows(tmp_path) == []


async def test_attributes_that_are_brought_twice_at_once_are_those_of_the_last_commit(tmp_path, monkeypatch):
    async with running(House(tmp_path)) as house:
        inode, index = file(house, "a", x=LARGE), house.state.index
        await house.keeper.sync_all()
        read = index.xattrs

        async def change() -> None:
            inode.xattrs.bring(read(inode.number) or {})
            put(house, inode, "x", LARGE[::-1])
            await house.keeper.sync_all()
            assert inode.xattrs.is_away

        def read_slowly(number: int) -> dict[bytes, bytes] | None:
            found = read(number)
            monkeypatch.setattr(index, "xattrs", read)
            trio.from_thread.run(change)
            return found

        monkeypatch.setattr(index, "xattrs", read_slowly)
        assert await noted(house, inode) == {b"user.x": LARGE[::-1]}


async def test_many_attributes_are_written_back_before_they_fill_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "WRITE_BACK_S", math.inf)  # little is not written back
    async with running(House(tmp_path)) as house:
        files = [file(house, f"{number}", x=LARGE) for number in range(WRITE_BACK_XATTRS_BYTES // len(LARGE) + 1)]
        while not files[0].xattrs.is_away:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_attributes_behind_many_other_changes_are_written_first(tmp_path):
    async with running(House(tmp_path), drain=True) as house:
        others = [file(house, f"other{number}") for number in range(LOOKED_AT + 1)]
        await house.keeper.sync_all()
        for inode in others:
            inode.changed()
        large = [file(house, f"{number}", x=LARGE) for number in range(WRITE_BACK_XATTRS_BYTES // len(LARGE) + 1)]
        assert house.keeper.is_behind
        await house.keeper.catch_up()
        assert large[0].xattrs.is_away
        assert not house.keeper.is_behind


async def test_attributes_in_memory_weigh_until_the_index_has_them(tmp_path):
    async with running(House(tmp_path), drain=True) as house:
        ann = house.fs.pool.accounts.of(ANN).holdings
        inode = file(house, "a")
        before = ann.num_bytes
        put(house, inode, "x", LARGE)
        assert ann.num_bytes > before + len(LARGE)
        await house.keeper.sync_all()
        assert ann.num_bytes == before
        await house.keeper.bring_xattrs(inode)
        xattrs.remove(house.volume, inode, b"user.x", ANN)
        assert ann.num_bytes == before


@pytest.mark.parametrize("is_kept", [False, True])
async def test_attributes_of_files_without_a_name_stay_within_the_quota_of_memory(tmp_path, is_kept):
    """The files are open and were removed: no commit ever puts their attributes into the index."""
    async with running(House(tmp_path), drain=True) as house:
        accounts = house.fs.pool.accounts
        kept: dict[str, Any] = {"x": LARGE} if is_kept else {}
        inodes = [file(house, f"{number}", small=b"x", **kept) for number in range(8)]
        await house.keeper.sync_all()
        ann = accounts.of(ANN).holdings
        for number, inode in enumerate(inodes):
            house.tree.opened(inode)
            house.tree.unlink(house.tree.root, b"%d" % number)
            if is_kept:
                await house.keeper.bring_xattrs(inode)
        before = ann.num_bytes
        accounts.limit(AccountLimits(memory_bytes=(before + 3 * len(LARGE)) * 8 // 7))
        put(house, inodes[0], "x", LARGE)
        put(house, inodes[1], "x", LARGE)
        with pytest.raises(OverQuota, match="the daemon's memory"):
            put(house, inodes[2], "x", LARGE)
        if is_kept:
            with pytest.raises(OverQuota, match="the daemon's memory"):
                xattrs.remove(house.volume, inodes[2], b"user.small", ANN)
        house.volume.change_owner(inodes[0], BOB)
        for inode in inodes:
            house.tree.closed(inode)
        assert ann.num_bytes == accounts.of(BOB).holdings.num_bytes == 0


async def test_a_domain_whose_attributes_are_large_has_its_weight_after_a_restart(tmp_path):
    async with running(House(tmp_path), drain=True) as house:
        domain = house.tree.make(house.tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN, gid=ANN)
        house.volume.domains.set_limit(domain, b"user.kv.quota", b"8M", ANN)
        house.volume.domains.set_weight(domain, b"3", ANN)
        put(house, domain, "x", LARGE)
    async with running(House(tmp_path), drain=True) as house:
        domain = house.tree.child(house.tree.root, b"d")
        assert domain.xattrs.is_away
        assert domain.domain is not None
        assert domain.domain.weight == 3


def flip(directory: Path, number: int) -> None:
    ((record,),) = sql(directory, "SELECT record FROM xattrs WHERE number = ?", number)
    sql(directory, "UPDATE xattrs SET record = ? WHERE number = ?", record[:-1] + b"?", number)


def lose(directory: Path, number: int) -> None:
    sql(directory, "DELETE FROM xattrs WHERE number = ?", number)


@pytest.mark.parametrize(
    ("damage", "error", "logged", "found"),
    [
        (flip, r"attributes of inode \d+ are damaged \(its checksum is wrong\)", "", "its attributes' row is damaged"),
        (lose, r"attributes of inode \d+ are", r"the attributes of inode \d+ are lost", "attributes' row is lost"),
    ],
    ids=["damaged", "lost"],
)
async def test_attributes_without_their_row_are_an_error_for_who_reads_them_alone_until_fsck_keeps_the_rest(
    tmp_path, caplog, damage, error, logged, found
):
    async with running(House(tmp_path), drain=True) as house:
        for name in ("a", "b"):
            file(house, name, x=LARGE)
    damage(tmp_path, rows(tmp_path)[0])
    async with running(House(tmp_path)) as house:
        assert re.search(logged, caplog.text)
        with failing(errno.EIO, error):
            await noted(house, house.tree.child(house.tree.root, b"a"))
        assert await noted(house, house.tree.child(house.tree.root, b"b")) == {b"user.x": LARGE}
        house.tree.unlink(house.tree.root, b"a")
    report = fsck(tmp_path, repair=True)
    assert [(each.kind, each.paths) for each in report.findings] == [("attributes", ("/a",))]
    assert found in report.findings[0].what
    assert is_clean(fsck(tmp_path))
    async with running(House(tmp_path)) as house:
        one, other = (house.tree.child(house.tree.root, name) for name in (b"a", b"b"))
        assert (one.xattrs, one.xattrs.is_away) == ({}, False)
        assert await noted(house, other) == {b"user.x": LARGE}


def test_a_row_of_attributes_is_what_was_written_and_of_no_other_inode():
    many = {b"user.%d" % number: bytes(number) for number in range(100)}
    row = encode_xattrs(7, many)
    assert decode_xattrs(7, row) == many
    with pytest.raises(Exception, match="checksum"):
        decode_xattrs(8, row)


@pytest.mark.slow
async def test_the_index_gives_back_what_is_removed_in_slices_between_commits(tmp_path):
    async with running(House(tmp_path)) as house:
        for number in range(400):
            file(house, f"{number}", x=LARGE)
        await house.keeper.sync_all()
        path, most = house.state.index.path, SPARE_PAGES * 4096 + (2 << 20)
        assert path.stat().st_size > 2 * most
        for number in range(400):
            house.tree.unlink(house.tree.root, b"%d" % number)
        await house.keeper.sync_all()
        while path.stat().st_size > most:  # noqa: ASYNC110
            await trio.sleep(0.01)


def test_an_index_of_an_older_release_is_written_anew_once_unless_it_is_large(tmp_path, monkeypatch):
    Index(tmp_path / "index.db").close()
    with closing(sqlite3.connect(tmp_path / "index.db")) as database:
        database.executescript("PRAGMA journal_mode=DELETE; PRAGMA auto_vacuum=0; VACUUM;")

    def mode() -> int:
        index = Index(tmp_path / "index.db")
        index.commit(Rows(xattrs=[(number, LARGE) for number in range(200)]))
        index.commit(Rows(gone_xattrs=[(number,) for number in range(200)]))
        while index.shrink():
            pass
        index.close()
        with closing(sqlite3.connect(tmp_path / "index.db")) as database:
            found: int = database.execute("PRAGMA auto_vacuum").fetchone()[0]
            return found

    monkeypatch.setattr(index_module, "MOST_REWRITTEN_BYTES", 0)
    assert mode() == 0
    size = (tmp_path / "index.db").stat().st_size
    monkeypatch.undo()
    assert mode() == 2
    assert (tmp_path / "index.db").stat().st_size < size
