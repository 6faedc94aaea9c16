"""Races of the storage: a file changes, or a daemon starts, while a commit, a sync or a read is under way."""

import errno
import os
import threading
import time
from typing import Any

import pytest

from kvfs.durable import slot_file
from kvfs.durable.index import Rows
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.durable.slot_file import SlotFile
from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import OpenFiles
from kvfs.names.disk import Disk
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, held, names_after, running


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
