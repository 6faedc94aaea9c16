"""Races of the storage: a file changes, or a daemon starts, while a commit, a sync or a read is under way."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.durable import slot_file
from kvfs.durable.index import Rows
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.durable.slot_file import SlotFile
from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import OpenFiles
from kvfs.names.content import KvFile
from kvfs.names.disk import Disk
from kvfs.names.plain import PlainFile
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, running
from tests.kvfs.durable.test_overtaking import Gate
from tests.kvfs.durable.test_restart import image as copied


def plain_file(house: House, name: bytes, data: bytes) -> PlainFile:
    """Make a plain file with these bytes, not synced."""
    inode = house.volume.make_plain(house.tree.root, name, 0o644, 0, 0)
    assert isinstance(inode.content, PlainFile)
    with house.volume.charged_for(inode, inode.content, len(data)):
        inode.content.write_at(0, data)
    inode.modified()
    return inode.content


def test_a_slot_that_is_written_while_the_file_is_about_to_be_cut_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    give_back = SlotFile.give_back

    def give_back_late(self: SlotFile, slots: Sequence[int], end: Callable[[], int]) -> None:
        begun.set()
        go_on.wait()
        give_back(self, slots, end)

    async def before() -> None:
        async with running(House(tmp_path)) as house:
            house.fs.kv_close(house.create("a.kv", range(32)))
            house.fs.kv_close(house.create("large.kv", range(20 * 32)))
            await house.keeper.sync_all()
            house.fs.kv_remove(ROOT, "large.kv")
            await house.keeper.sync_all()
            await house.keeper.jobs.idle()
            monkeypatch.setattr(SlotFile, "give_back", give_back_late)
            house.fs.kv_remove(ROOT, "a.kv")
            await house.keeper.sync_all()
            await trio.to_thread.run_sync(begun.wait)
            try:
                house.create("new.kv", range(70))
                await house.sync("new.kv")
            finally:
                go_on.set()
            await house.keeper.jobs.idle()

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert house.is_right(await house.open("new.kv"))

    monkeypatch.setattr(slot_file, "_GROWTH_BYTES", 4096)
    trio.run(before)
    trio.run(after)


def test_bytes_that_the_daemon_before_has_not_synced_are_synced_by_the_next(tmp_path: Path) -> None:
    synced: list[int] = []
    disk = Disk(fdatasync=synced.append)

    async def before() -> None:
        async with running(House(tmp_path, disk=disk)) as house:
            plain_file(house, b"note", b"text")
            house.create("other.kv", range(3))
            await house.sync("other.kv")
            assert not synced

    async def after() -> None:
        async with running(House(tmp_path, disk=disk)) as house:
            await house.sync("note")
            assert synced
            synced.clear()
            await house.sync("note")
            assert not synced, "once is enough"

    trio.run(before)
    trio.run(after)


def test_a_sync_of_all_covers_bytes_that_were_written_just_before_a_commit(tmp_path: Path) -> None:
    fails = False

    def fdatasync(number: int) -> None:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(number)

    async def main() -> None:
        nonlocal fails
        async with running(House(tmp_path, disk=Disk(fdatasync=fdatasync))) as house:
            content = plain_file(house, b"note", b"text")
            house.create("other.kv", range(3))
            await house.sync("other.kv")  # the row of the file, and nothing of its bytes
            assert content.is_dirty
            await house.keeper.sync_all()
            assert not content.is_dirty
            plain_file(house, b"bad", b"text")
            fails = True
            for _ in range(2):
                with pytest.raises(SymError):
                    await house.keeper.sync_all()
            assert house.keeper.unsynced_names() == ["/bad"]

    trio.run(main)


def test_a_plain_file_that_becomes_a_kv_file_while_it_is_synced_is_kept_as_that(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path)) as house:
            source = house.create("source.kv", range(40))
            inode = house.volume.make_plain(house.tree.root, b"file", 0o644, 0, 0)
            await house.keeper.sync_all()
            house.append(source, range(40))
            with Gate(house) as gate:
                async with trio.open_nursery() as nursery:
                    house.volume.make_plain(house.tree.root, b"other", 0o644, 0, 0)
                    nursery.start_soon(house.sync, "other")
                    await gate.wait_reached()
                    inode.modified()
                    nursery.start_soon(house.sync, "file")
                    await trio.testing.wait_all_tasks_blocked()
                    snapshot = house.volume.hold(source.content)
                    house.volume.fork_into(snapshot, source.inode, source.content, inode)
                    gate.let_pass(100)

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert house.fs.kv_stat(ROOT, "file").tokens == 80

    trio.run(before)
    trio.run(after)


def test_what_was_cut_off_while_it_was_written_is_not_in_the_image(tmp_path: Path) -> None:
    async def before() -> None:
        async with running(House(tmp_path)) as house:
            file = house.create("a.kv", range(20))
            await house.keeper.pages_out.write(file.content, 20)
            house.fs.kv_truncate(file, 10)
            house.append(file, range(3))
            house.create("other.kv", range(3))
            await house.sync("other.kv")

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            content = house.fs.find(ROOT, "a.kv").content
            assert isinstance(content, KvFile)
            assert content.table.length == 10
            image = await copied(house, content)
            page = image[house.volume.image_format.data_start :][: house.store.page_bytes]
            assert any(page)
            assert page == house.store.masked(memoryview(page), 10)

    trio.run(before)
    trio.run(after)


def test_a_file_comes_from_a_disk_that_is_slow_as_long_as_its_pages_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SlotFile.read_into

    def read_slowly(self: SlotFile, *given: Any) -> None:
        time.sleep(0.6)
        read(self, *given)

    async def before() -> None:
        async with running(House(tmp_path, num_pages=160), drain=True) as house:
            house.create("a.kv", range(150 * 32))

    async def after() -> None:
        async with running(House(tmp_path, num_pages=160, deadline_s=1.5)) as house:
            monkeypatch.setattr(SlotFile, "read_into", read_slowly)
            assert house.is_right(await house.open("a.kv"))

    trio.run(before)
    trio.run(after)


def test_what_was_written_before_the_disk_was_full_is_kept(tmp_path: Path) -> None:
    def pwritev(number: int, data: list[bytes | memoryview], offset: int, _flags: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(number, bytes(data[0])[:50], 0)

    async def before() -> None:
        async with running(House(tmp_path, disk=Disk(pwritev=pwritev))) as house:
            inode = house.volume.make_plain(house.tree.root, b"note", 0o644, 0, 0)
            await house.sync("note")
            files = OpenFiles(house.volume, Eager(), Nodes(house.tree))
            handle = await files.open(inode, inode.number, readable=True, writable=True)
            with pytest.raises(SymError):
                await files.write(handle, 0, bytes(100))
            await house.sync("note")
            files.release_all()

    async def after() -> None:
        async with running(House(tmp_path)) as house:
            assert house.volume.size_of(house.fs.find(ROOT, "note")) == 50

    trio.run(before)
    trio.run(after)


def test_a_drain_that_is_cut_short_keeps_what_has_waited_longest_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, go_on, commits = [f"/{number:02}" for number in range(3 * OTHERS_A_CUT)], threading.Event(), list[Rows]()

    async def before() -> list[str]:
        house = House(tmp_path, num_pages=2 * len(names))
        commit = house.state.index.commit

        def hangs_soon(rows: Rows) -> None:
            if commits:
                assert go_on.wait(20)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            commits.append(rows)
            commit(rows)

        monkeypatch.setattr(house.state.index, "commit", hangs_soon)
        async with running(house):
            for name in names:
                house.create(name[1:], [1])
            left = await house.keeper.drain(1.0)
            go_on.set()
        return left

    async def after() -> list[str]:
        async with running(House(tmp_path)) as house:
            return house.names()

    left, kept = trio.run(before), trio.run(after)
    num_kept = len(names) - len(left)
    assert num_kept > OTHERS_A_CUT / 2
    assert left == names[num_kept:]
    assert set(names[:num_kept]) <= set(kept)
