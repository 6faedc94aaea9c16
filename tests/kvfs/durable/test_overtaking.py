"""An fsync overtakes what nobody synced, with all that it depends on, and returns when that is on disk."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.durable.index import Rows
from kvfs.durable.journal import DIRECTORIES_ABOVE
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.facts.xattrs import put, remove
from kvfs.names.domains import QUOTA
from kvfs.names.inode import SOME_NAMES
from kvfs.names.plain import PlainFile
from tests.kvfs.durable.house import ROOT, House, running


def hold_back_names(house: House) -> None:
    """The next names are not committed before somebody syncs them: a file is renamed whose entries are in memory."""
    house.create("held.kv", range(40))
    house.fs.kv_rename(ROOT, "held.kv", "held2.kv")


def names_after(directory: Path) -> list[str]:
    """Return the names that a daemon finds when it starts on this state."""
    house = House(directory)
    house.keeper.close()
    house.fs.check()
    return house.names()


class Gate:
    """Holds up commits of a house's index, each until `let_pass`, or until the end."""

    def __init__(self, house: House) -> None:
        self._commit = house.state.index.commit
        self._passes = threading.Semaphore(0)
        self._send, self._receive = trio.open_memory_channel[None](100)
        house.state.index.commit = self._wait  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.let_pass(100)

    async def wait_reached(self) -> None:
        await self._receive.receive()

    def let_pass(self, count: int = 1) -> None:
        self._passes.release(count)

    def _wait(self, rows: Rows) -> None:
        trio.from_thread.run_sync(self._send.send_nowait, None)
        self._passes.acquire()
        self._commit(rows)


def test_a_directory_that_is_made_again_leaves_nothing_of_the_one_that_was_removed(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            house.fs.kv_mkdir(ROOT, "d", 0o700)
            house.create("d/a.kv")
            await house.keeper.sync_all()
            hold_back_names(house)
            house.fs.kv_remove(ROOT, "d/a.kv")
            house.tree.rmdir(house.tree.root, b"d")
            house.fs.kv_mkdir(ROOT, "d", 0o700)
            await house.sync("d")

    trio.run(work)
    assert names_after(tmp_path) == ["/d", "/held.kv"]


def test_a_file_that_was_replaced_keeps_the_name_that_it_was_given_before(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            house.create("a.kv", range(10))
            await house.keeper.sync_all()
            hold_back_names(house)
            house.tree.link(house.fs.find(ROOT, "a.kv"), house.tree.root, b"backup.kv")
            house.create("new.kv")
            house.fs.kv_rename(ROOT, "new.kv", "a.kv")
            await house.sync("a.kv")

    trio.run(work)
    assert names_after(tmp_path) == ["/a.kv", "/backup.kv", "/held.kv"]


def test_a_synced_file_is_where_its_directory_is_now(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            house.fs.kv_mkdir(ROOT, "d", 0o700)
            house.create("d/a.kv")
            await house.keeper.sync_all()
            hold_back_names(house)
            house.fs.kv_rename(ROOT, "d", "e")
            await house.sync("e/a.kv")

    trio.run(work)
    assert names_after(tmp_path) == ["/e", "/e/a.kv", "/held.kv"]


def test_a_file_is_synced_with_all_new_directories_above_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            hold_back_names(house)
            directory = house.tree.root
            for _ in range(3 * DIRECTORIES_ABOVE):
                directory = house.tree.make(directory, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
            await house.keeper.sync(directory)

    trio.run(work)
    after = House(tmp_path)
    after.keeper.close()
    directory, depth = after.tree.root, 0
    while directory.entries.get(b"d") is not None:
        directory, depth = directory.entries[b"d"], depth + 1
    assert depth == 3 * DIRECTORIES_ABOVE


def test_a_sync_looks_at_few_directories_above_a_file_and_at_few_of_its_names(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            directory, journal = house.tree.root, house.keeper._journal
            for _ in range(1000):
                directory = house.tree.make(directory, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
            deep = house.tree.make(directory, b"f", stat.S_IFREG, mode=0o600, uid=0, gid=0)
            for number in range(1000):
                beside = house.tree.make(house.tree.root, b"%d" % number, stat.S_IFDIR, mode=0o755, uid=0, gid=0)
                house.tree.link(deep, beside, b"f")
            await house.keeper.sync_all()
            passed = list[int]()
            noted = SimpleNamespace(get=lambda number: passed.append(number) or house.tree.get(number))  # type: ignore[func-returns-value]
            journal._directories = lambda: noted
            deep.changed()
            await house.keeper.sync(deep)
            assert 0 < len(passed) < 10 * (DIRECTORIES_ABOVE + SOME_NAMES)

    trio.run(work)


def test_syncing_everything_waits_for_the_commit_that_has_some_of_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            house.create("a.kv", range(10))
            async with trio.open_nursery() as nursery:
                with Gate(house) as gate:
                    nursery.start_soon(house.keeper.sync_all)
                    await gate.wait_reached()
                    with trio.move_on_after(0) as scope:
                        await house.keeper.sync_all()
                    assert scope.cancelled_caught, "nothing of it is on disk"

    trio.run(work)


def test_a_sync_waits_for_the_commit_that_has_what_it_is_about(tmp_path: Path) -> None:
    """The commit that it asked for went without: the file had other entries by then than those that were on disk."""

    async def work() -> None:
        async with running(House(tmp_path)) as house:
            house.fs.kv_mkdir(ROOT, "d", 0o700)
            file = house.create("d/a.kv", range(10))
            await house.keeper.sync_all()
            is_over = trio.Event()

            async def sync_directory() -> None:
                await house.sync("d")
                is_over.set()

            async with trio.open_nursery() as nursery:
                with Gate(house) as gate:
                    house.tree.root.changed()
                    nursery.start_soon(house.keeper.sync, house.tree.root)
                    await gate.wait_reached()
                    house.fs.kv_rename(ROOT, "d/a.kv", "d/b.kv")
                    nursery.start_soon(sync_directory)
                    await wait_all_tasks_blocked()
                    house.fs.kv_truncate(file, 5)
                    house.append(file, range(5))
                    gate.let_pass()
                    await gate.wait_reached()
                    nursery.start_soon(house.sync, "d/b.kv")
                    await wait_all_tasks_blocked(0.05)
                    gate.let_pass()
                    await gate.wait_reached()
                    assert not is_over.is_set(), "the commit that has the new name is under way"

    trio.run(work)


def test_syncing_everything_syncs_bytes_whose_name_was_committed_without_them(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            inode = house.volume.make_plain(house.tree.root, b"a.txt", 0o600, 0, 0)
            house.write(inode, b"some")
            house.create("b.kv")
            await house.sync("b.kv")
            assert isinstance(inode.content, PlainFile)
            assert inode.content.is_dirty, "its name is before that of the other, and nobody waits for its bytes"
            await house.keeper.sync_all()
            assert not inode.content.is_dirty

    trio.run(work)


def test_a_directory_becomes_a_domain_behind_the_names_that_it_had_and_has_names_behind_that(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(House(tmp_path)) as house:
            volume, first, second = house.volume, *(house.create(f"{name}.kv").inode for name in "ab")
            for name in "de":
                house.fs.kv_mkdir(ROOT, name, 0o700)
            d, e = house.fs.find(ROOT, "d"), house.fs.find(ROOT, "e")
            house.tree.link(first, d, b"a.kv")
            put(volume, e, QUOTA, b"1M", 0)
            await house.keeper.sync_all()
            hold_back_names(house)
            house.tree.unlink(d, b"a.kv")
            put(volume, d, QUOTA, b"1M", 0)
            await house.keeper._commit(lambda: 0, others=OTHERS_A_CUT)
            remove(volume, e, QUOTA, 0)
            house.tree.link(second, e, b"b.kv")
            await house.keeper.sync(second)
            house.tree.unlink(e, b"b.kv")
            put(volume, e, QUOTA, b"1M", 0)
            await house.keeper._commit(lambda: 0, others=OTHERS_A_CUT)

    trio.run(work)
    assert names_after(tmp_path) == ["/a.kv", "/b.kv", "/d", "/e", "/held.kv"]
