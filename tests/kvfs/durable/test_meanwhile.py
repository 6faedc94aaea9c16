"""Races of the storage: a file changes, or a daemon starts, while a commit, a sync or a read is under way."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.durable import slot_file
from kvfs.durable.index import Rows
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.durable.slot_file import SlotFile
from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import OpenFiles
from kvfs.names.disk import Disk
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, held, names_after, plain_of, running
from tests.kvfs.durable.test_overtaking import Gate


async def test_a_slot_that_is_written_while_the_file_is_about_to_be_cut_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(slot_file, "_GROWTH_BYTES", 4096)
    async with running(House(tmp_path)) as house:
        house.fs.kv_close(house.create("a.kv", range(32)))
        house.fs.kv_close(house.create("large.kv", range(20 * 32)))
        await house.keeper.sync_all()
        house.fs.kv_remove(ROOT, "large.kv")
        await house.keeper.sync_all()
        await house.keeper.jobs.idle()
        with held(monkeypatch, SlotFile, "give_back"):
            house.fs.kv_remove(ROOT, "a.kv")
            await house.keeper.sync_all()
            house.create("new.kv", range(70))
            await house.sync("new.kv")
        await house.keeper.jobs.idle()
    async with running(House(tmp_path)) as house:
        assert house.is_right(await house.open("new.kv"))


async def test_a_plain_file_that_becomes_a_kv_file_while_it_is_synced_is_kept_as_that(tmp_path):
    async with running(House(tmp_path)) as house:
        source = house.create("source.kv", range(40))
        inode = house.make_plain("file")
        await house.keeper.sync_all()
        house.append(source, range(40))
        async with trio.open_nursery() as nursery:
            with Gate(house) as gate:
                house.make_plain("other")
                nursery.start_soon(house.sync, "other")
                await gate.wait_reached()
                inode.modified()
                nursery.start_soon(house.sync, "file")
                await wait_all_tasks_blocked()
                snapshot = house.volume.hold(source.content)
                house.volume.fork_into(snapshot, source.inode, source.content, inode)
    async with running(House(tmp_path)) as house:
        assert house.fs.kv_stat(ROOT, "file").tokens == 80


async def test_what_was_cut_off_while_it_was_written_is_not_in_the_image(tmp_path):
    async with running(House(tmp_path)) as house:
        file = house.create("a.kv", range(20))
        await house.keeper.pages_out.write(file.content, 20)
        house.fs.kv_truncate(file, 10)
        house.append(file, range(3))
        house.create("other.kv", range(3))
        await house.sync("other.kv")
    async with running(House(tmp_path)) as house:
        content = house.kv("a.kv")
        assert content.table.length == 10
        image = await house.image(content)
        page = image[house.volume.image_format.data_start :][: house.store.page_bytes]
        assert any(page)
        assert page == house.store.masked(memoryview(page), 10)


@pytest.mark.slow
async def test_a_file_comes_from_a_disk_that_is_slow_as_long_as_its_pages_come(tmp_path, monkeypatch):
    read = SlotFile.read_into

    def read_slowly(self: SlotFile, *given: Any) -> None:
        time.sleep(0.6)
        read(self, *given)

    async with running(House(tmp_path, num_pages=160), drain=True) as house:
        house.create("a.kv", range(150 * 32))
    async with running(House(tmp_path, num_pages=160, deadline_s=1.5)) as house:
        monkeypatch.setattr(SlotFile, "read_into", read_slowly)
        assert house.is_right(await house.open("a.kv"))


async def test_what_was_written_before_the_disk_was_full_is_kept(tmp_path):
    def pwritev(number: int, data: list[bytes | memoryview], offset: int, _flags: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(number, bytes(data[0])[:50], 0)

    async with running(House(tmp_path, disk=Disk(pwritev=pwritev))) as house:
        inode = house.make_plain("note")
        await house.sync("note")
        files = OpenFiles(house.volume, Eager(), Nodes(house.tree))
        handle = await files.open(inode, inode.number, readable=True, writable=True)
        with pytest.raises(SymError):
            await files.write(handle, 0, bytes(100))
        await house.sync("note")
        files.release_all()
    async with running(House(tmp_path)) as house:
        assert house.volume.size_of(house.fs.find(ROOT, "note")) == 50


@pytest.mark.slow
async def test_a_drain_that_is_cut_short_keeps_what_has_waited_longest_and_names_the_rest(tmp_path, monkeypatch):
    names, go_on, commits = [f"/{number:02}" for number in range(3 * OTHERS_A_CUT)], threading.Event(), list[Rows]()
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
    num_kept = len(names) - len(left)
    assert num_kept > OTHERS_A_CUT / 2
    assert left == names[num_kept:]
    assert {*names[:num_kept]} <= {*names_after(tmp_path)}


async def test_a_sync_of_all_covers_bytes_that_were_written_just_before_a_commit(tmp_path):
    fails = False

    def fdatasync(number: int) -> None:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(number)

    async with running(House(tmp_path, disk=Disk(fdatasync=fdatasync))) as house:
        content = plain_of(house.make_plain("note", b"text"))
        house.create("other.kv", range(3))
        await house.sync("other.kv")  # the row of the file, and nothing of its bytes
        assert content.is_dirty
        await house.keeper.sync_all()
        assert not content.is_dirty
        house.make_plain("bad", b"text")
        fails = True
        for _ in range(2):
            with pytest.raises(SymError):
                await house.keeper.sync_all()
        assert house.keeper.unsynced_names() == ["/bad"]
