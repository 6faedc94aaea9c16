"""Faults between memory and disk that appear only where several things happen at once."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.durable.slot_file import SlotFile
from kvfs.names.inode import Credentials
from kvfs.pages.pool import NO_ROW
from libsym.abi import PAGE_ENTRIES, Advice
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House
from tests.kvfs.durable.test_tiers import files, live

PAGE = PAGE_ENTRIES


def test_a_shared_tail_is_whole_after_a_sync_failed_and_another_wrote_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is on disk alone, and is written anew for the file that has less of it."""
    sync = SlotFile.sync

    def fails(_file: SlotFile) -> None:
        raise OSError(5, "no luck")

    async def work(house: House) -> None:
        long = house.create("long.kv")
        await house.compute(long, range(PAGE + 20))
        short = house.fs.kv_fork(ROOT, long, "short.kv")
        house.fs.kv_truncate(short, PAGE + 10)
        for file in (long, short):
            await house.volume.pager.put_on_disk(file.table)
        monkeypatch.setattr(SlotFile, "sync", fails)
        with pytest.raises(SymError, match="no luck"):
            await house.sync("short.kv")
        monkeypatch.setattr(SlotFile, "sync", sync)
        await house.sync("short.kv")
        await house.volume.pager.put_in_memory(long.table)
        assert house.is_right(long)

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_a_copy_of_a_tail_that_is_on_disk_is_not_taken_for_its_owner_s_alone(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        pool = house.fs.pool
        base = house.create("base.kv")
        await house.compute(base, range(10))
        theirs = base.table.fork(7)  # goes on in place: the page has bytes of another behind the tenth entry
        page = int(theirs.pages[0])
        reservation = theirs.reserve(range(10), range(10, 20))
        assert house.volume.pager.acquire(reservation, 0, lambda _error: None) is None
        house.decoder.step(reservation)
        reservation.commit_first(reservation.tokens)
        await house.volume.pager.put_on_disk(base.table)
        await files(house, 1, 1, prefix="other")  # in the frame that the page was in
        (gone,) = await files(house, 1, 15, prefix="gone")  # all others have bytes of the owner alone
        house.fs.kv_close(gone)
        house.fs.kv_remove(ROOT, "gone0.kv")
        await house.compute(base, [1])
        (copy,) = base.table.pages
        assert copy != page
        assert pool.owners_of(np.array([copy], np.int32))[0] != base.table.owner
        theirs.close()

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_a_number_that_is_given_out_again_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    async def work(house: House) -> None:
        pager = house.volume.pager
        read = house.keeper.pages_in._read

        def slow(*args: Any) -> None:
            assert may_read.wait(20)
            read(*args)

        (old,) = await files(house, 1)
        numbers = set(old.table.pages.tolist())
        await pager.put_on_disk(old.table)
        monkeypatch.setattr(house.keeper.pages_in, "_read", slow)
        reservation = house.fs.reserve(old, [1], [4 * PAGE])
        ticket = pager.acquire(reservation, 0, lambda _error: None)
        await trio.testing.wait_all_tasks_blocked()
        assert ticket is not None
        assert ticket.is_admitted
        pager.cancel(ticket)
        reservation.abort()
        house.fs.kv_close(old)
        house.fs.kv_remove(ROOT, "f0.kv")
        (new,) = await files(house, 1, prefix="new")
        assert numbers & set(new.table.pages.tolist())
        await pager.put_on_disk(new.table)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.compute, new, [3])
            await trio.testing.wait_all_tasks_blocked()
            may_read.set()
        assert house.is_right(new)

    try:
        live(work, tmp_path, num_pages=16, num_on_disk=200)
    finally:
        may_read.set()


def test_a_page_that_is_written_anew_while_it_is_read_is_not_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The slot of old is another page's by then."""
    may_read = threading.Event()

    async def work(house: House) -> None:
        pager, on_disk = house.volume.pager, house.fs.pool.on_disk
        (file,) = await files(house, 1)
        await pager.put_on_disk(file.table)
        before = set(on_disk.slot[file.table.pages].tolist())
        on_disk.spoil(file.table.pages.copy(), np.zeros(4, np.bool_))  # as after a sync that failed
        read = house.keeper.pages_in._read

        def slow(*args: Any) -> None:
            assert may_read.wait(20)
            read(*args)

        monkeypatch.setattr(house.keeper.pages_in, "_read", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.compute, file, [1])
            await trio.testing.wait_all_tasks_blocked()
            await house.keeper.pages_out.write(file.content, 4 * PAGE)
            other = house.create("other.kv")
            await house.compute(other, range(500, 500 + 4 * PAGE))
            await house.keeper.pages_out.write(other.content, 4 * PAGE)
            assert before & set(on_disk.slot[other.table.pages].tolist())
            may_read.set()
        assert house.is_right(file)

    try:
        live(work, tmp_path, num_pages=16, num_on_disk=200)
    finally:
        may_read.set()
    assert not caplog.records


def test_a_file_that_has_not_come_when_it_usually_does_is_not_brought_back_for_nothing(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        pager, residents = house.volume.pager, house.volume.pager.residents
        found = await files(house, 2)
        for file in found:
            await house.keeper.sync(file.inode)
        for file, idle_s in zip(found, (100.0, 0.5), strict=True):
            row = file.table.row
            residents.num_uses[row], residents.latest_gaps_s[row] = 10, 1.0
            residents.last_use_s[row] = pager.clock() - idle_s
            pager.departures.send(pager.departures.may_go(file.table.pages))
            assert pager.tier_of(file.table) == "disk"
        pager.will_need(house.create("wakes.kv").table)
        with trio.fail_after(5):
            while pager.tier_of(found[1].table) != "memory":  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert pager.tier_of(found[0].table) == "disk"

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_pages_that_a_file_does_not_have_any_more_are_not_taken_for_its(tmp_path: Path) -> None:
    """A tail that it made a copy of, and what it was cut by: both are others' still."""

    async def work(house: House) -> None:
        (base,) = await files(house, 1)
        await house.compute(base, [1])
        fork = house.fs.kv_fork(ROOT, base, None)
        house.fs.kv_truncate(fork, 4 * PAGE)
        await house.compute(fork, [2])
        house.fs.kv_truncate(fork, PAGE)
        row = fork.table.row
        house.fs.kv_close(fork)
        assert row not in house.fs.pool.row_of[base.table.pages].tolist()
        assert NO_ROW not in house.fs.pool.row_of[base.table.pages[:1]].tolist()

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_what_a_pinned_file_was_cut_by_is_not_pinned_any_more(tmp_path: Path) -> None:
    """A second file has the page still; and a pinned one keeps what both had."""

    async def work(house: House) -> None:
        pager, pool = house.volume.pager, house.fs.pool
        (base,) = await files(house, 1, 6)
        fork = house.fs.kv_fork(ROOT, base, "fork.kv")
        half = house.fs.kv_fork(ROOT, base, "half.kv")
        house.fs.kv_truncate(half, 3 * PAGE)
        house.fs.kv_advise_open(ROOT, half, [(Advice.PIN, 0)])
        house.fs.kv_advise_open(ROOT, base, [(Advice.PIN, 0)])
        assert pager.statistics().num_kept == 6
        house.fs.kv_truncate(base, PAGE)
        assert pager.statistics().num_kept == 3
        house.fs.kv_advise_open(ROOT, half, [(Advice.UNPIN, 0)])
        assert pager.statistics().num_kept == 1
        assert not pool.kept.until[fork.table.pages[1:]].any()

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_who_sends_a_file_to_a_disk_that_hangs_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = SlotFile.write

    def slow(*args: Any) -> Any:
        assert may_write.wait(20)
        return write(*args)

    async def work(house: House) -> None:
        (file,) = await files(house, 1)
        monkeypatch.setattr(SlotFile, "write", slow)
        with trio.fail_after(10), pytest.raises(SymError) as failed:
            await house.volume.pager.put_on_disk(file.table)
        assert failed.value.errno == errno.ETIMEDOUT
        may_write.set()

    try:
        live(work, tmp_path, num_pages=16, num_on_disk=200, deadline_s=0.2)
    finally:
        may_write.set()


def test_a_priority_puts_a_file_before_others_of_its_user_and_not_before_those_of_another(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        pager, other = house.volume.pager, Credentials(7, 7)
        idle = []
        for priority in (100, 1, 100):
            idle.append(house.fs.kv_create(other, None, 0o600))
            await house.compute(idle[-1], range(4 * PAGE))
            house.fs.kv_advise_open(other, idle[-1], [(Advice.PRIORITY, priority)])
        used = await files(house, 1, 5)
        assert [pager.tier_of(file.table) == "memory" for file in idle] == [True, False, True]
        used += await files(house, 2, 2, prefix="more")
        for number in range(10):
            for file in used:
                await house.compute(file, [number])
        assert all(pager.tier_of(file.table) == "memory" for file in used)
        assert not all(pager.tier_of(file.table) == "memory" for file in idle)

    live(work, tmp_path, num_pages=16, num_on_disk=200)
