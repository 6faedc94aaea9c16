"""An fsync overtakes what nobody synced, with all that it depends on, and returns when that is on disk."""

from __future__ import annotations

import stat
import threading
from types import SimpleNamespace
from typing import Self

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.durable.index import Rows
from kvfs.durable.journal import DIRECTORIES_ABOVE
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.facts.xattrs import put, remove
from kvfs.names.domains import QUOTA
from kvfs.names.inode import SOME_NAMES, Inode
from tests.kvfs.durable.house import ROOT, House, names_after, running


def hold_back_names(house: House) -> None:
    """The next names are not committed before somebody syncs them: a file is renamed whose entries are in memory."""
    house.create("held.kv", range(40))
    house.fs.kv_rename(ROOT, "held.kv", "held2.kv")


class Gate:
    """Holds up commits of a house's index, each until `let_pass`, or until the end."""

    def __init__(self, house: House) -> None:
        commit, self._passes = house.state.index.commit, threading.Semaphore(0)
        send, self._receive = trio.open_memory_channel[None](100)

        def wait(rows: Rows) -> None:
            trio.from_thread.run_sync(send.send_nowait, None)
            self._passes.acquire()
            commit(rows)

        house.state.index.commit = wait  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.let_pass(100)

    async def wait_reached(self) -> None:
        await self._receive.receive()

    def let_pass(self, count: int = 1) -> None:
        self._passes.release(count)


def remove_and_make_a_directory(house: House) -> str:
    house.fs.kv_remove(ROOT, "d/b.kv")
    house.tree.rmdir(house.tree.root, b"d")
    house.fs.kv_mkdir(ROOT, "d", 0o700)
    return "d"


def replace_a_file_that_got_another_name(house: House) -> str:
    house.tree.link(house.fs.find(ROOT, "a.kv"), house.tree.root, b"backup.kv")
    house.create("new.kv")
    house.fs.kv_rename(ROOT, "new.kv", "a.kv")
    return "a.kv"


def rename_the_directory_of_a_file(house: House) -> str:
    house.fs.kv_rename(ROOT, "d", "e")
    return "e/b.kv"


@pytest.mark.parametrize(
    ("work", "left"),
    [
        (remove_and_make_a_directory, ["/a.kv", "/d"]),
        (replace_a_file_that_got_another_name, ["/a.kv", "/backup.kv", "/d", "/d/b.kv"]),
        (rename_the_directory_of_a_file, ["/a.kv", "/e", "/e/b.kv"]),
    ],
)
async def test_a_sync_takes_along_what_its_names_depend_on(work, left, tmp_path):
    async with running(House(tmp_path)) as house:
        house.create("a.kv", range(10))
        house.fs.kv_mkdir(ROOT, "d", 0o700)
        house.create("d/b.kv")
        await house.keeper.sync_all()
        hold_back_names(house)
        await house.sync(work(house))
    assert names_after(tmp_path) == [*left, "/held.kv"]


async def test_a_file_is_synced_with_all_new_directories_above_it(tmp_path):
    async with running(House(tmp_path)) as house:
        hold_back_names(house)
        directory = house.tree.root
        for _ in range(3 * DIRECTORIES_ABOVE):
            directory = house.tree.make(directory, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
        await house.keeper.sync(directory)
    assert names_after(tmp_path) == [*("/d" * depth for depth in range(1, 3 * DIRECTORIES_ABOVE + 1)), "/held.kv"]


async def test_a_sync_looks_at_few_directories_above_a_file_and_at_few_of_its_names(tmp_path):
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

        def passing(number: int) -> Inode:
            passed.append(number)
            return house.tree.get(number)

        journal._directories = lambda: SimpleNamespace(get=passing)
        deep.changed()
        await house.keeper.sync(deep)
        assert 0 < len(passed) < 2 * (DIRECTORIES_ABOVE + SOME_NAMES)


async def test_syncing_everything_waits_for_the_commit_that_has_some_of_it(tmp_path):
    async with running(House(tmp_path)) as house:
        house.create("a.kv", range(10))
        async with trio.open_nursery() as nursery:
            with Gate(house) as gate:
                nursery.start_soon(house.keeper.sync_all)
                await gate.wait_reached()
                with trio.move_on_after(0) as scope:
                    await house.keeper.sync_all()
                assert scope.cancelled_caught, "nothing of it is on disk"


async def test_a_sync_waits_for_the_commit_that_has_what_it_is_about(tmp_path):
    """The commit that it asked for went without: the file had other entries by then than those that were on disk."""
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


async def test_a_directory_becomes_a_domain_behind_the_names_that_it_had_and_has_names_behind_that(tmp_path):
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
    assert names_after(tmp_path) == ["/a.kv", "/b.kv", "/d", "/d/a.kv", "/e", "/e/b.kv", "/held.kv"]
