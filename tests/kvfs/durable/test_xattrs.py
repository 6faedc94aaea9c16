"""Attributes and names are charged to who has them, large attributes are in the index alone, and it gives room back."""

from __future__ import annotations

import errno
import random
import re
import shutil
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from kvfs.durable import index as index_module
from kvfs.durable.disk_room import RESERVE_BYTES
from kvfs.durable.fsck import fsck
from kvfs.durable.index import SPARE_PAGES, Index, Rows
from kvfs.durable.keeper import LOOKED_AT, WRITE_BACK_XATTRS_BYTES
from kvfs.durable.records import decode_xattrs, encode_xattrs
from kvfs.facts import xattrs
from kvfs.names.inode import ATTRIBUTE_BYTES, MOST_IN_MEMORY, Inode
from kvfs.pages.accounts import NAME_BYTES, AccountLimits
from libsym.errors import (
    CrossDevice,
    Exists,
    Invalid,
    IsDirectory,
    NoSpace,
    NotDirectory,
    NotFound,
    OverQuota,
    SymError,
)
from tests.kvfs.core.model import FREE_NAMES
from tests.kvfs.durable.damage import sql
from tests.kvfs.durable.house import ROOT, House, is_clean, running
from tests.kvfs.durable.test_restart import lives

ANN, BOB = 1000, 1001
LARGE = bytes(range(250)) * 200
SIZES = (0, 1, 500, MOST_IN_MEMORY, 20_000)


def file(house: House, name: str, uid: int = ANN) -> Inode:
    return house.volume.make_plain(house.tree.root, name.encode(), 0o600, uid, uid)


def put(house: House, inode: Inode, name: str, value: bytes) -> None:
    xattrs.put(house.volume, inode, f"user.{name}".encode(), value, inode.uid)


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


# Charges


class Life:
    """Random changes of attributes and names; charges are counted anew after each step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: dict[int, dict[bytes, bytes]] = {}
        self.num_away = 0

    async def live(self, house: House) -> None:
        opened: list[Inode] = []
        for _ in range(60):
            inodes = [inode for inode in house.tree if inode.names and not inode.is_directory]
            step = self.random.choice(
                [self.put, self.put, self.put, self.take, self.rename, self.link, self.chown, self.remove, self.keep]
            )
            if len(inodes) < 4 or self.random.random() < 0.2:
                self.make(house)
            else:
                inode = self.random.choice(inodes)
                if self.random.random() < 0.2:
                    house.tree.opened(inode)
                    opened.append(inode)
                await step(house, inode)
            house.fs.check()
        for inode in opened:
            await self.compare(house, inode)
            house.tree.closed(inode)
            house.fs.check()
        for inode in house.tree:
            await self.compare(house, inode)

    async def compare(self, house: House, inode: Inode) -> None:
        self.num_away += inode.xattrs.is_away
        assert await noted(house, inode) == self.known.get(inode.number, {})

    def directory(self, house: House) -> Inode:
        return self.random.choice([inode for inode in house.tree if inode.is_directory])

    def name(self) -> bytes:
        return b"%d" % self.random.randrange(12) * self.random.choice((1, 100))

    def make(self, house: House) -> None:
        place, uid = (self.directory(house), self.name()), self.random.choice((ANN, BOB))
        if place[1] in place[0].entries:
            return
        kind = self.random.choice((stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK))
        if kind == stat.S_IFREG:
            house.volume.make_plain(*place, 0o600, uid, uid)
        else:
            target = b"t" * self.random.randrange(1, 4000) if kind == stat.S_IFLNK else b""
            inode = house.tree.make(*place, kind, mode=0o700, uid=uid, gid=uid, target=target)
            if kind == stat.S_IFDIR and self.random.random() < 0.5:
                house.volume.domains.set_limit(inode, b"user.kv.quota", b"8M", 0)
                house.volume.domains.set_weight(inode, b"2", 0)
                self.known[inode.number] = {b"user.kv.weight": b"2"}

    async def put(self, house: House, inode: Inode) -> None:
        await house.keeper.bring_xattrs(inode)
        name, value = b"user.%d" % self.random.randrange(3), bytes(self.random.choice(SIZES))
        xattrs.put(house.volume, inode, name, value, 0)
        self.known.setdefault(inode.number, {})[name] = value

    async def take(self, house: House, inode: Inode) -> None:
        await house.keeper.bring_xattrs(inode)
        for name in sorted(inode.xattrs)[:1]:
            xattrs.remove(house.volume, inode, name, 0)
            del self.known[inode.number][name]

    async def rename(self, house: House, inode: Inode) -> None:
        number, name = self.random.choice(sorted(inode.names))
        target, new_name = self.directory(house), self.name()
        with suppress(CrossDevice, IsDirectory, NotDirectory, NotFound, Invalid):
            house.tree.rename(house.tree.get(number), name, target, new_name, self.random.choice((0, 0, 2)))

    async def link(self, house: House, inode: Inode) -> None:
        with suppress(CrossDevice, Exists):
            house.tree.link(inode, self.directory(house), self.name())

    async def chown(self, house: House, inode: Inode) -> None:
        house.volume.change_owner(inode, self.random.choice((ANN, BOB)))
        house.volume.change_owner(self.directory(house), self.random.choice((ANN, BOB)))

    async def remove(self, house: House, inode: Inode) -> None:
        number, name = self.random.choice(sorted(inode.names))
        house.tree.unlink(house.tree.get(number), name)

    async def keep(self, house: House, _inode: Inode) -> None:
        await house.keeper.sync_all()


@pytest.mark.parametrize("seed", range(6))
def test_charges_are_what_counting_anew_gives_whatever_happens_also_after_restarts(seed: int, tmp_path: Path) -> None:
    life = Life(seed)
    sums: list[dict[str, tuple[int, int]]] = []

    async def live(house: House) -> None:
        house.fs.check()
        if sums:
            assert accounts(house) == sums.pop()
        await life.live(house)
        sums.append(accounts(house))

    def accounts(house: House) -> dict[str, tuple[int, int]]:
        found = {each.describe(): (each.num_bytes, each.num_files) for each in house.fs.pool.accounts}
        return {who: held for who, held in found.items() if held != (0, 0)}

    lives(tmp_path, live, live, live)
    assert life.num_away, "some attributes were in the index alone"


def test_attributes_links_and_names_count_to_the_quota_of_bytes(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode = file(house, "a")
        put(house, inode, "x", bytes(5000))
        assert charged(house) == ATTRIBUTE_BYTES + len("user.x") + 5000
        put(house, inode, "y", bytes(2900))
        with pytest.raises(OverQuota, match="uid 1000 is at its quota of 8192 bytes"):
            put(house, inode, "z", bytes(200))
        with pytest.raises(OverQuota):
            put(house, inode, "x", bytes(5200))
        with pytest.raises(OverQuota):
            house.tree.make(house.tree.root, b"l", stat.S_IFLNK, mode=0o777, uid=ANN, gid=ANN, target=b"t" * 200)
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

    lives(tmp_path, live, limits=AccountLimits(num_bytes=8192))


def test_attributes_links_and_names_count_to_the_disk(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode = file(house, "a")
        put(house, inode, "x", bytes(50_000))
        with pytest.raises(NoSpace, match="at its limit of 60000 bytes"):
            put(house, inode, "y", bytes(10_000))
        room = (60_000 - house.keeper.statistics().disk_bytes) // NAME_BYTES
        for number in range(FREE_NAMES + room - 2):  # besides the root, and the first
            file(house, f"b{number}")
        with pytest.raises(NoSpace):
            file(house, "one too many")
        put(house, inode, "x", b"")
        put(house, inode, "y", bytes(10_000))

    lives(tmp_path, live, disk_limit=60_000)


def test_attributes_and_links_leave_the_disk_room_for_the_commits_that_remove_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no limit but the disk's. An index that had filled the disk could never be told of removals."""
    there = RESERVE_BYTES + 100_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=there))

    async def live(house: House) -> None:
        nonlocal there
        root = house.tree.root
        put(house, file(house, "a"), "x", bytes(60_000))
        with pytest.raises(NoSpace, match=r"has 3\d{7} bytes left"):
            put(house, file(house, "b"), "x", bytes(60_000))
        there -= 60_000
        await house.keeper.sync_all()
        await house.keeper.jobs.idle()
        put(house, file(house, "c"), "x", bytes(20_000))
        with pytest.raises(NoSpace):
            house.tree.make(root, b"l", stat.S_IFLNK, mode=0o777, uid=ANN, gid=0, target=bytes(30_000))
        for number in range(2 * FREE_NAMES):
            file(house, f"{number}")  # a name is few bytes, and what is computed goes on
        there += 100_000 + NAME_BYTES * 2 * FREE_NAMES
        with pytest.raises(NoSpace):
            put(house, file(house, "d"), "x", bytes(60_000))
        await house.keeper.jobs.idle()
        put(house, file(house, "e"), "x", bytes(60_000))

    lives(tmp_path, live)
    assert caplog.text.count("attributes and links must leave") == 1, "the log says once why"


def test_chown_moves_attributes_and_names_or_nothing(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode, before = file(house, "a"), charged(house, BOB)
        put(house, inode, "x", bytes(5000))
        put(house, file(house, "theirs", BOB), "x", bytes(6000))
        sums = charged(house), charged(house, BOB)
        with pytest.raises(OverQuota):
            house.volume.change_owner(inode, BOB)
        assert (charged(house), charged(house, BOB)) == sums
        assert inode.uid == ANN
        house.tree.unlink(house.tree.root, b"theirs")
        house.volume.change_owner(inode, BOB)
        assert (charged(house), charged(house, BOB)) == (0, before + sums[0])

    lives(tmp_path, live, limits=AccountLimits(num_bytes=8192))


def test_what_is_over_a_smaller_quota_can_be_read_made_smaller_and_removed(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        for name in ("a", "b"):
            put(house, file(house, name), "x", LARGE)

    async def after(house: House) -> None:
        inode = house.tree.child(house.tree.root, b"a")
        assert await noted(house, inode) == {b"user.x": LARGE}
        await house.keeper.bring_xattrs(inode)
        with pytest.raises(OverQuota):
            put(house, inode, "y", b"")
        put(house, inode, "x", LARGE[1:])
        xattrs.remove(house.volume, inode, b"user.x", ANN)
        house.tree.unlink(house.tree.root, b"b")
        assert charged(house) == 0

    lives(tmp_path, before)
    lives(tmp_path, after, limits=AccountLimits(num_bytes=4096))


# Where they are


def test_large_attributes_are_in_the_index_alone_once_they_are_kept_and_few_stay_in_memory(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        large, small = file(house, "large"), file(house, "small")
        put(house, large, "x", LARGE)
        put(house, large, "y", b"1")
        put(house, small, "x", b"1")
        await house.keeper.sync_all()
        assert (large.xattrs, large.xattrs.is_away) == ({}, True)
        assert (small.xattrs, small.xattrs.is_away) == ({b"user.x": b"1"}, False)
        assert await noted(house, large) == {b"user.x": LARGE, b"user.y": b"1"}
        assert large.xattrs.is_away, "who reads them leaves them where they are"
        await house.keeper.bring_xattrs(large)
        put(house, large, "y", b"2")
        assert not large.xattrs.is_away

    async def after(house: House) -> None:
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

    async def at_last(house: House) -> None:
        assert house.tree.child(house.tree.root, b"large").xattrs == {b"user.x": b"", b"user.y": b"2"}

    lives(tmp_path, before, after)
    assert rows(tmp_path) == []
    lives(tmp_path, at_last)


async def unlinked_and_open(house: House) -> Inode:
    inode = file(house, "a")
    put(house, inode, "x", LARGE)
    house.tree.opened(inode)
    await house.keeper.sync_all()
    house.tree.unlink(house.tree.root, b"a")
    await house.keeper.sync_all()
    return inode


def test_a_file_that_is_unlinked_and_open_keeps_its_large_attributes_until_it_is_closed(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode = await unlinked_and_open(house)
        assert await noted(house, inode) == {b"user.x": LARGE}
        assert house.state.index.xattrs(inode.number) == {b"user.x": LARGE}
        house.tree.closed(inode)
        await house.keeper.sync_all()
        assert house.state.index.xattrs(inode.number) is None

    lives(tmp_path, live)


def test_attributes_of_an_open_file_that_a_crash_ended_are_removed_at_the_next_start(tmp_path: Path) -> None:
    async def crash() -> None:
        async with running(House(tmp_path)) as house:
            await unlinked_and_open(house)

    trio.run(crash)
    assert len(rows(tmp_path)) == 1
    assert is_clean(fsck(tmp_path))
    House(tmp_path).keeper.close()
    assert rows(tmp_path) == []


def test_a_set_while_the_attributes_are_being_written_is_kept_as_well(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode = file(house, "a")
        put(house, inode, "x", LARGE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.keeper.sync_all)
            while not house.keeper._committing.xattrs:
                await trio.lowlevel.checkpoint()
            put(house, inode, "y", b"later")
        assert not inode.xattrs.is_away
        await house.keeper.sync_all()
        assert await noted(house, inode) == {b"user.x": LARGE, b"user.y": b"later"}

    lives(tmp_path, live)


def test_attributes_that_are_brought_twice_at_once_are_those_of_the_last_commit(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode = file(house, "a")
        put(house, inode, "x", LARGE)
        await house.keeper.sync_all()
        read = house.state.index.xattrs

        def read_slowly(number: int) -> dict[bytes, bytes] | None:
            found = read(number)
            house.state.index.xattrs = read  # type: ignore[method-assign]
            trio.from_thread.run(change)
            return found

        async def change() -> None:
            inode.xattrs.bring(read(inode.number) or {})
            put(house, inode, "x", LARGE[::-1])
            await house.keeper.sync_all()
            assert inode.xattrs.is_away

        house.state.index.xattrs = read_slowly  # type: ignore[method-assign]
        assert await noted(house, inode) == {b"user.x": LARGE[::-1]}

    lives(tmp_path, live)


def test_many_attributes_are_written_back_before_they_fill_memory(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        with trio.fail_after(4):  # what is little waits for 5 s
            for number in range(WRITE_BACK_XATTRS_BYTES // len(LARGE) + 1):
                put(house, file(house, f"{number}"), "x", LARGE)
            while not house.tree.child(house.tree.root, b"0").xattrs.is_away:  # noqa: ASYNC110
                await trio.sleep(0.1)

    lives(tmp_path, live)


def test_attributes_behind_many_other_changes_are_written_first(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        others = [file(house, f"other{number}") for number in range(LOOKED_AT + 1)]
        await house.keeper.sync_all()
        for inode in others:
            inode.changed()
        large = [file(house, f"{number}") for number in range(WRITE_BACK_XATTRS_BYTES // len(LARGE) + 1)]
        for inode in large:
            put(house, inode, "x", LARGE)
        assert house.keeper.is_behind
        await house.keeper.catch_up()
        assert large[0].xattrs.is_away
        assert not house.keeper.is_behind

    lives(tmp_path, live)


def test_attributes_in_memory_weigh_until_the_index_has_them(tmp_path: Path) -> None:
    async def live(house: House) -> None:
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

    lives(tmp_path, live)


@pytest.mark.parametrize("is_kept", [False, True])
def test_attributes_of_files_without_a_name_stay_within_the_quota_of_memory(tmp_path: Path, is_kept: bool) -> None:
    """The files are open and were removed: no commit ever puts their attributes into the index."""

    async def live(house: House) -> None:
        accounts, inodes = house.fs.pool.accounts, [file(house, f"{number}") for number in range(8)]
        for inode in inodes:
            put(house, inode, "small", b"x")
            if is_kept:
                put(house, inode, "x", LARGE)
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

    lives(tmp_path, live)


def test_a_domain_whose_attributes_are_large_has_its_weight_after_a_restart(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        domain = house.tree.make(house.tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN, gid=ANN)
        house.volume.domains.set_limit(domain, b"user.kv.quota", b"8M", ANN)
        house.volume.domains.set_weight(domain, b"3", ANN)
        put(house, domain, "x", LARGE)

    async def after(house: House) -> None:
        domain = house.tree.child(house.tree.root, b"d")
        assert domain.xattrs.is_away
        assert domain.domain is not None
        assert domain.domain.weight == 3

    lives(tmp_path, before, after)


# Damage


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A state with large attributes of two files."""

    async def live(house: House) -> None:
        for name in ("a", "b"):
            put(house, file(house, name), "x", LARGE)

    lives(tmp_path, live)
    return tmp_path


def flip(directory: Path, number: int) -> None:
    ((record,),) = sql(directory, "SELECT record FROM xattrs WHERE number = ?", number)
    sql(directory, "UPDATE xattrs SET record = ? WHERE number = ?", record[:-1] + b"?", number)


def test_damaged_attributes_are_an_error_for_who_reads_them_and_for_nobody_else(large: Path) -> None:
    flip(large, rows(large)[0])

    async def look(house: House) -> None:
        one, other = (house.tree.child(house.tree.root, name) for name in (b"a", b"b"))
        with pytest.raises(SymError, match=r"attributes of inode \d+ are damaged \(its checksum is wrong\)") as caught:
            await noted(house, one)
        assert caught.value.errno == errno.EIO
        assert await noted(house, other) == {b"user.x": LARGE}
        house.tree.unlink(house.tree.root, b"a")

    lives(large, look)


def test_a_start_names_an_inode_whose_attributes_are_lost_and_reading_them_is_an_error(
    large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sql(large, "DELETE FROM xattrs WHERE number = ?", rows(large)[0])

    async def look(house: House) -> None:
        assert re.search(r"the attributes of inode \d+ are lost", caplog.text)
        with pytest.raises(SymError) as caught:
            await noted(house, house.tree.child(house.tree.root, b"a"))
        assert caught.value.errno == errno.EIO
        assert await noted(house, house.tree.child(house.tree.root, b"b")) == {b"user.x": LARGE}

    lives(large, look)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip, "its attributes' row is damaged"),
        (lambda state, number: sql(state, "DELETE FROM xattrs WHERE number = ?", number), "attributes' row is lost"),
    ],
)
def test_fsck_keeps_all_but_attributes_that_are_damaged(
    large: Path, damage: Callable[[Path, int], Awaitable[None]], says: str
) -> None:
    damage(large, rows(large)[0])
    found = fsck(large, repair=True)
    assert [(each.kind, each.paths) for each in found.findings] == [("attributes", ("/a",))]
    assert says in found.findings[0].what
    assert is_clean(fsck(large))

    async def look(house: House) -> None:
        one, other = (house.tree.child(house.tree.root, name) for name in (b"a", b"b"))
        assert (one.xattrs, one.xattrs.is_away) == ({}, False)
        assert await noted(house, other) == {b"user.x": LARGE}

    lives(large, look)


def test_a_row_of_attributes_is_what_was_written_and_of_no_other_inode() -> None:
    many = {b"user.%d" % number: bytes(number) for number in range(100)}
    row = encode_xattrs(7, many)
    assert decode_xattrs(7, row) == many
    with pytest.raises(Exception, match="checksum"):
        decode_xattrs(8, row)


# The index's own size


def test_the_index_gives_back_what_is_removed_in_slices_between_commits(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        for number in range(400):
            put(house, file(house, f"{number}"), "x", LARGE)
        await house.keeper.sync_all()
        path, most = house.state.index.path, SPARE_PAGES * 4096 + (2 << 20)
        assert path.stat().st_size > 2 * most
        for number in range(400):
            house.tree.unlink(house.tree.root, b"%d" % number)
        await house.keeper.sync_all()
        with trio.fail_after(30):
            while path.stat().st_size > most:  # noqa: ASYNC110
                await trio.sleep(0.1)

    lives(tmp_path, live)


def test_an_index_of_an_older_release_is_written_anew_once_unless_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_nothing_is_read_for_a_file_that_is_gone(tmp_path: Path) -> None:
    async def live(house: House) -> None:
        inode = file(house, "a")
        put(house, inode, "x", LARGE)
        await house.keeper.sync_all()
        house.tree.unlink(house.tree.root, b"a")
        await house.keeper.bring_xattrs(inode)
        assert inode.xattrs == {}
        with pytest.raises(NotFound):
            house.tree.get(inode.number)

    lives(tmp_path, live)
