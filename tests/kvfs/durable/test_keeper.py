"""Synced state is there after the daemon was cut off; of unsynced state a prefix is."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvfs.durable.fsck import fsck
from kvfs.facts import xattrs
from libsym.errors import Invalid, NotPermitted
from tests.kvfs.durable.house import ROOT, House, is_clean, running
from tests.kvfs.fakes import FakeFacts, fake_identity


def test_a_synced_file_is_there_again_with_the_same_bytes(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path)) as house:
            house.create("a.kv", range(1, 71))
            await house.sync("a.kv")
            house.create("lost.kv", range(5))

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert house.names() == ["/a.kv"]
            assert house.fs.kv_stat(ROOT, "a.kv").tokens == 70
            file = await house.open("a.kv", write=True)
            assert house.tokens(file) == list(range(1, 71))
            assert house.is_right(file)
            house.append(file, [7, 8, 9])
            assert house.is_right(file)

    trio.run(before)
    trio.run(after)


def test_forks_still_share_their_pages_in_memory_and_on_disk(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path), drain=True) as house:
            base = house.create("base.kv", range(100))
            for name in ("one.kv", "two.kv"):
                fork = house.fs.kv_fork(ROOT, base, name)
                house.append(fork, [1, 2])

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert sum(slots.num_used for slots in house.keeper.slots.values()) == 3 + 2, (
                "one goes on in the page that it shares"
            )
            one, two = await house.open("one.kv"), await house.open("two.kv")
            assert list(one.table.pages[:3]) == list(two.table.pages[:3])
            assert house.is_right(one)
            assert house.is_right(two)
            assert house.fs.pool.num_free_frames == 64 - 5

    trio.run(before)
    trio.run(after)


def test_a_rename_over_a_file_never_leaves_less_than_what_was_renamed(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path)) as house:
            house.create("a.kv", range(40))
            await house.keeper.sync_all()
            house.create("b.kv", range(100, 200))
            house.fs.kv_rename(ROOT, "b.kv", "a.kv")
            house.create("c.kv", [1])
            await house.sync("c.kv")  # overtakes: it waits for no byte of the other

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert house.fs.kv_stat(ROOT, "c.kv").tokens == 1
            assert house.tokens(await house.open("a.kv")) in (list(range(40)), list(range(100, 200)))
            if house.tokens(await house.open("a.kv")) == list(range(40)):
                assert house.fs.kv_stat(ROOT, "b.kv").tokens == 0, "nobody synced it, and it has its name"
                assert house.fs.kv_stat(ROOT, "b.kv").lost_tokens == 100

    trio.run(before)
    trio.run(after)


def test_an_append_that_copies_the_last_page_takes_nothing_from_what_was_synced(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path)) as house:
            one = house.create("one.kv", range(40))
            two = house.fs.kv_fork(ROOT, one, "two.kv")
            house.tree.link(two.inode, house.tree.root, b"three.kv")
            await house.keeper.sync_all()
            house.append(one, [1])
            house.append(two, [2])  # its last page is a copy, of which nothing is on disk
            house.fs.kv_remove(ROOT, "three.kv")  # and this has a commit write about it
            await house.keeper.sync(house.tree.root)

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert house.tokens(await house.open("two.kv")) == list(range(40))
            assert house.fs.kv_stat(ROOT, "two.kv").lost_tokens == 1

    trio.run(before)
    trio.run(after)


def test_a_slot_that_is_used_again_is_known_by_what_is_in_it_now(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path)) as house:
            old = house.create("old.kv", range(32))
            await house.sync("old.kv")
            house.fs.kv_remove(ROOT, "old.kv")
            await house.keeper.sync_all()
            house.fs.kv_close(old)  # now it has no use for its slot either
            house.create("new.kv", range(100, 132))
            await house.sync("new.kv")

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            file = await house.open("new.kv")
            assert house.tokens(file) == list(range(100, 132))
            assert house.is_right(file)

    trio.run(before)
    trio.run(after)


def test_entries_that_something_else_computed_are_marked_in_forks_and_in_files_made_of_them(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path, bits="cpu avx512"), drain=True) as house:
            house.create("a.kv", range(40))

    async def after() -> None:
        async with running(House(tmp_path, bits="cpu avx2")) as house:
            file = await house.open("a.kv", write=True)
            house.append(file, [1, 2])
            assert house.fs.kv_stat_open(file).other_bits == 40
            fork = house.fs.kv_fork(ROOT, file, "fork.kv")
            assert house.fs.kv_stat_open(fork).other_bits == 40
            assembly = house.fs.begin_merge(ROOT, [house.create("own.kv", [5]), file], "both.kv", 0o600, rebase=False)
            assembly.plan()
            assembly.reserve()
            assembly.fill()
            assert house.fs.kv_stat_open(house.fs.finish_assembly(ROOT, assembly, "both.kv", 0o600)).other_bits == 43
            house.fs.kv_truncate(file, 20)
            assert house.fs.kv_stat_open(file).other_bits == 20
            await house.keeper.sync_all()

    async def at_last() -> None:
        async with running(House(tmp_path, bits="cpu avx512", same_bits=True)) as house:
            assert house.fs.kv_stat(ROOT, "own.kv").other_bits == 1
            with pytest.raises(Invalid, match="--same-bits"):
                await house.open("own.kv")
            assert (await house.open("a.kv")).table.length == 20

    trio.run(before)
    trio.run(after)
    trio.run(at_last)


def test_an_empty_file_of_another_model_is_moved_and_removed(tmp_path: Path) -> None:
    """The state has no page of that model."""

    async def before() -> None:
        async with running(
            House(tmp_path, FakeFacts(name="other", identity=fake_identity("other"))), drain=True
        ) as house:
            house.create("a.kv")
            house.create("b.kv")

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            house.fs.kv_rename(ROOT, "a.kv", "moved.kv")
            house.fs.kv_chmod(ROOT, "moved.kv", 0o644)
            await house.sync("moved.kv")
            house.fs.kv_remove(ROOT, "b.kv")
            house.fs.kv_remove(ROOT, "moved.kv")
            await house.keeper.sync_all()
            assert house.names() == []

    trio.run(before)
    trio.run(after)


def test_bytes_that_were_never_kept_are_not_behind_those_that_come_after_a_crash(tmp_path: Path) -> None:
    async def first() -> None:
        async with running(House(tmp_path)) as house:
            inode = house.volume.make_plain(house.tree.root, b"a.txt", 0o600, 0, 0)
            await house.sync("a.txt")
            house.write(inode, b"never kept")

    async def second() -> None:
        async with running(House(tmp_path), drain=True) as house:
            inode = house.fs.find(ROOT, "a.txt")
            assert house.read(inode) == b""
            house.write(inode, b"new")

    async def third() -> None:
        async with running(House(tmp_path)) as house:
            assert house.read(house.fs.find(ROOT, "a.txt")) == b"new"

    trio.run(first)
    trio.run(second)
    trio.run(third)


def test_files_that_lost_entries_to_a_full_disk_are_told_of_until_they_are_cut_removed_or_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        found = [each.getMessage() for each in caplog.records if "lost entries" in each.getMessage()]
        caplog.clear()
        return found

    async def full() -> None:
        async with running(House(tmp_path, num_pages=80, disk_limit=0)) as house:
            for number in range(25):
                house.create(f"{number}.kv", range(40))
            assert await house.keeper.drain()

    async def next_start() -> None:
        async with running(House(tmp_path), drain=True) as house:
            (line,) = told()
            assert line.startswith("KV files that lost entries: 25: /0.kv has 0 of 40, /1.kv has 0 of 40, ")
            assert line.endswith("/19.kv has 0 of 40, symphony fsck names the others")
            assert house.keeper.statistics().num_lost_files == 25
            cut, grown = await house.open("0.kv", write=True), await house.open("1.kv", write=True)
            house.fs.kv_truncate(cut, 0)
            house.append(grown, [1])
            house.fs.kv_remove(ROOT, "2.kv")
            known = house.fs.find(ROOT, "3.kv")
            with pytest.raises(NotPermitted):
                xattrs.remove(house.volume, known, xattrs.LOST, 4242)
            xattrs.remove(house.volume, known, xattrs.LOST, 0)
            assert xattrs.LOST not in xattrs.names(house.volume, known)
            assert house.keeper.statistics().num_lost_files == 22

    async def last_start() -> None:
        async with running(House(tmp_path), drain=True) as house:
            assert told()[0].startswith("KV files that lost entries: 22: /1.kv has 1 of 41, /4.kv has 0 of 40, ")
            for number in (1, *range(4, 25)):
                house.fs.kv_remove(ROOT, f"{number}.kv")

    trio.run(full)
    trio.run(next_start)
    found = fsck(tmp_path)
    assert (is_clean(found), len(found.findings)) == (True, 22)
    assert found.findings[0].line(is_repaired=False) == (
        "/1.kv: 1 of its 41 entries are left: see symphony help user.kv.lost"
    )
    assert not fsck(tmp_path, repair=True).is_repaired
    trio.run(last_start)
    House(tmp_path).keeper.close()
    assert told() == []
