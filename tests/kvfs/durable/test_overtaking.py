"""An fsync overtakes what nobody synced, with all that it depends on, and returns when that is on disk."""

import threading
from typing import Self

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.durable.cut import Cut, Cutter
from kvfs.durable.index import Rows
from tests.kvfs.durable.house import ROOT, House, running


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


async def test_a_sync_of_many_operations_lets_none_overtake_a_file_that_changes_before_the_cut(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    take, committed, changes = Cutter.take, list[bytes](), [1, 2, 3]
    async with running(House(tmp_path, a_cut=(2, 3))) as house:
        file = house.create("old.kv", range(5))
        await house.keeper.sync_all()
        house.fs.kv_rename(ROOT, "old.kv", "new.kv")
        house.make_plain("unsynced")
        for depth in range(1, 6):
            house.fs.kv_mkdir(ROOT, "/".join("d" * depth), 0o700)

        def changed(cutter: Cutter, *arguments: object, **named: object) -> Cut:
            if changes:
                house.fs.kv_truncate(file, 0)
                house.append(file, [changes.pop()] * 5)
            cut = take(cutter, *arguments, **named)  # type: ignore[arg-type]
            committed.extend(put.key[1] for change in cut.changes for put in change.puts)
            return cut

        monkeypatch.setattr(Cutter, "take", changed)
        await house.sync("d/d/d/d/d")
        assert not changes
        assert committed.index(b"new.kv") < committed.index(b"unsynced")
