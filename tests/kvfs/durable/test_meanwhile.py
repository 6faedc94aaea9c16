"""Races of the storage: a file changes, or a daemon starts, while a commit, a sync or a read is under way."""

import errno
import math
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from kvfs.durable import slot_file
from kvfs.durable.cut import NO_BYTES
from kvfs.durable.disk_room import RESERVE_BYTES
from kvfs.durable.index import Rows
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.durable.slot_file import SlotFile
from kvfs.mount.disk_work import DiskWork
from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import OpenFiles
from kvfs.names.disk import BLOCK_BYTES, Disk
from libsym.errors import SymError
from tests.kvfs.disks import TroubledDisk
from tests.kvfs.durable.house import ROOT, House, held, names_after, plain_of, running


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
        inode = house.make_plain("note", b"old")
        await house.sync("note")
        files = OpenFiles(house.volume, Eager(), Nodes(house.tree))
        handle = await files.open(inode, inode.number, readable=True, writable=True)
        with pytest.raises(SymError):
            await files.write(handle, 0, bytes(100))
        await house.sync("note")
        files.release_all()
    async with running(House(tmp_path)) as house:
        assert house.volume.size_of(house.fs.find(ROOT, "note")) == 50


async def test_a_backing_file_that_is_made_during_a_commit_is_named_by_the_next(tmp_path, monkeypatch):
    async with running(House(tmp_path)) as house:
        note = house.make_plain("note", b"small")
        async with trio.open_nursery() as nursery:
            with held(monkeypatch, house.state.index, "commit") as commit:
                nursery.start_soon(house.keeper._commit, lambda: 0, (note,))
                await trio.to_thread.run_sync(commit.reached.wait)
                await trio.to_thread.run_sync(plain_of(note).sync)
        await house.keeper.sync_all()
    async with running(House(tmp_path)) as house:
        assert house.read(house.fs.find(ROOT, "note")) == b"small"


async def test_a_crash_leaves_the_old_file_while_the_bytes_of_its_replacement_are_in_memory_alone(tmp_path):
    async with running(House(tmp_path)) as house:
        await house.keeper.sync(house.make_plain("config", b"old"))
        house.make_plain("new", b"new")
        house.tree.rename(house.tree.root, b"new", house.tree.root, b"config", 0)
        await house.keeper.sync(house.make_plain("other", b"other"))
        await house.keeper._commit(lambda: 0, others=OTHERS_A_CUT)  # as a write-back that began before the change
        assert not plain_of(house.fs.find(ROOT, "config")).exists
    async with running(House(tmp_path)) as house:
        assert house.read(house.fs.find(ROOT, "config")) == b"old"
        assert house.read(house.fs.find(ROOT, "other")) == b"other"


async def test_a_file_that_is_emptied_and_written_for_ever_holds_up_names_once(tmp_path):
    async with running(House(tmp_path)) as house:
        status = house.make_plain("status", b"1")
        house.volume.truncate(status, 0)
        house.write(status, b"2")
        house.make_plain("later")
        await house.keeper._commit(lambda: 0)
    assert names_after(tmp_path) == ["/later", "/status"]


async def test_small_new_files_stay_in_memory_only_while_the_disk_has_room_for_them(tmp_path, monkeypatch):
    there = RESERVE_BYTES + 3 * BLOCK_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=there))
    async with running(House(tmp_path)) as house:
        notes = [house.make_plain(f"note{number}", b"small") for number in range(4)]
        assert [plain_of(note).exists for note in notes] == [False, False, False, True]
        assert house.keeper._is_much_dirty(), "the write-back does not wait"
        await house.keeper.sync_all()
        assert not house.keeper._is_much_dirty()
        there = RESERVE_BYTES
        await house.keeper.sync(house.make_plain("other", b"small"))
        await house.keeper.jobs.idle()
        assert plain_of(house.make_plain("last", b"small")).exists


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.ENOSPC])
async def test_small_files_that_the_disk_does_not_take_hold_up_no_others(tmp_path, code):
    refused = set[str]()

    def refusing(path: Path, flags: int) -> int:
        if path.name in refused:
            raise OSError(code, os.strerror(code))
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    names = [f"/{number:03}" for number in range(4 * OTHERS_A_CUT)]
    async with running(House(tmp_path, disk=Disk(open=refusing))) as house:
        for number, name in enumerate(names):
            note = house.make_plain(name[1:], b"small")
            if number % 3 == 0:
                refused.add(plain_of(note).name)
        assert await house.keeper.drain() == names[::3]
    assert names_after(tmp_path) == names, "a name that is kept has all names before it"


async def test_a_commit_during_the_first_sync_of_a_file_leaves_its_name_to_the_next(tmp_path):
    trouble = TroubledDisk()
    async with running(House(tmp_path, disk=trouble.disk)) as house:
        config, root = house.make_plain("config", b"old"), house.tree.root
        await house.keeper.sync(config)
        new = house.make_plain("new", b"new")
        house.tree.rename(root, b"new", root, b"config", 0)
        trouble.stall("fdatasync", whose=plain_of(new).name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.keeper.sync_all)
            await trio.to_thread.run_sync(trouble.entered.acquire)
            await house.keeper.sync(house.make_plain("other"))
            assert not house.keeper._cutter.known.get(new.number), "a power cut would leave zeros"
            trouble.go_on()
        assert house.keeper._cutter.known[new.number].backing == plain_of(new).number


async def test_a_commit_during_the_first_sync_of_an_empty_file_that_was_kept_leaves_it_empty(tmp_path):
    trouble = TroubledDisk()
    async with running(House(tmp_path, disk=trouble.disk)) as house:
        note = house.make_plain("note")
        await house.keeper.sync(note)
        house.write(note, b"new")
        trouble.stall("fdatasync", whose=plain_of(note).name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.keeper.sync_all)
            await trio.to_thread.run_sync(trouble.entered.acquire)
            await house.keeper._commit(lambda: 0, (note,))
            assert house.keeper._cutter.known[note.number].backing == NO_BYTES, "a power cut would leave zeros"
            trouble.go_on()
        assert house.keeper._cutter.known[note.number].backing == plain_of(note).number


async def test_files_without_a_name_leave_memory(tmp_path):
    async with running(House(tmp_path)) as house:
        unwritten, disk = house.volume.disk.unwritten, DiskWork(house.volume, Eager())
        for number in range(3 * OTHERS_A_CUT):
            note = house.make_plain(str(number), b"small")
            house.tree.opened(note)
            house.tree.unlink(house.tree.root, str(number).encode())
        for _ in range(3):
            await house.keeper._commit(lambda: 0, others=OTHERS_A_CUT)  # as when attributes are many
        last = house.make_plain("last")
        house.tree.opened(last)
        house.tree.unlink(house.tree.root, b"last")
        while house.keeper._journal.dirty:
            await house.keeper.sync_all()
        await disk.write(last, plain_of(last), 0, b"small", math.inf)
        assert unwritten.num_bytes == 0


async def test_a_sync_of_a_directory_has_the_bytes_of_the_new_files_in_it(tmp_path):
    names = [f"{number:03}" for number in range(3 * OTHERS_A_CUT)]
    async with running(House(tmp_path)) as house:
        for name in names:
            house.make_plain(name, name.encode())
        await house.keeper.sync(house.tree.root)
    async with running(House(tmp_path)) as house:
        assert [house.read(house.fs.find(ROOT, name)) for name in names] == [name.encode() for name in names]


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
