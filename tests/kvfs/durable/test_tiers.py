"""Memory is the fastest place of several: pages go to disk and come back, and nobody notices but by the clock.

Random work on far too little memory is in `test_storm`.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.durable.slot_file import SlotFile, slot_bytes_of
from kvfs.fs import OpenKv
from kvfs.names.inode import Credentials
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES as PAGE
from libsym.abi import Advice
from libsym.errors import NoSpace, SymError
from tests.kvfs.durable.damage import slot_at
from tests.kvfs.durable.house import ROOT, House, held, running


def small(directory: Path, **options: Any) -> AbstractAsyncContextManager[House]:
    """A house that has memory for 16 pages, and more on disk."""
    return running(House(directory, num_pages=16, num_on_disk=400, **options))


async def files(house: House, count: int, num_pages: int = 4, prefix: str = "f") -> list[OpenKv]:
    found = []
    for number in range(count):
        found.append(house.create(f"{prefix}{number}.kv"))
        await house.compute(found[-1], range(number, number + num_pages * PAGE))
    return found


async def test_what_needs_more_than_all_of_memory_is_told_so_and_others_go_on(tmp_path):
    async with small(tmp_path) as house:
        file = house.create("large.kv")
        await house.compute(file, range(10 * PAGE))
        with pytest.raises(NoSpace, match="17 pages are needed in memory at once, and there is room for 16"):
            await house.compute(file, range(7 * PAGE))
        assert file.table.length == 10 * PAGE
        await house.compute(file, range(6 * PAGE))
        (other,) = await files(house, 1)
        assert house.is_right(other)


async def test_what_df_calls_available_is_what_the_disk_has_room_for(tmp_path):
    async with running(House(tmp_path, num_pages=64, num_on_disk=20, disk_limit=20 * slot_bytes_of(4096))) as house:
        root = house.tree.root
        space = house.volume.space_around(root)
        assert space.num_bytes == 64 * 4096, "memory, for it is more than the disk"
        assert space.available_bytes == 20 * 4096 < space.free_bytes
        await house.compute(house.create("a.kv"), range(4 * PAGE))
        await house.keeper.sync_all()
        space = house.volume.space_around(root)
        assert (space.free_bytes, space.available_bytes) == (60 * 4096, 16 * 4096)
        house.write(house.volume.make_plain(root, b"plain", 0o600, 0, 0), b"x" * 16 * slot_bytes_of(4096))
        space = house.volume.space_around(root)
        assert (space.free_bytes, space.available_bytes) == (60 * 4096, 0)
        with pytest.raises(NoSpace):
            house.volume.storage.require_room(1)


async def test_pinned_files_stay_until_their_lease_is_over(tmp_path):
    async with small(tmp_path) as house:
        pager = house.volume.pager
        (one,) = await files(house, 1, prefix="kept")
        pager.pin_file(one.table, pager.clock() + 1000)
        await files(house, 10)
        assert pager.tier_of(one.table) == "memory"
        (two,) = await files(house, 1, 5, prefix="two")
        with pytest.raises(NoSpace, match="pinned"):
            pager.pin_file(two.table, pager.clock() + 1000)
        pager.unpin_file(one.table)
        await files(house, 10, prefix="g")
        assert pager.tier_of(one.table) == "disk"


async def test_a_shared_prefix_stays_as_long_as_its_forks_are_used(tmp_path):
    async with small(tmp_path) as house:
        (base,) = await files(house, 1, 4, prefix="base")
        for number in range(12):
            fork = house.fs.kv_fork(ROOT, base, None)
            await house.compute(fork, [number])
            house.fs.kv_close(fork)
            await files(house, 1, 3, prefix=f"other{number}-")
        assert house.volume.pager.tier_of(base.table) == "memory"
        assert house.volume.pager.statistics().num_in == 0


async def test_a_damaged_page_fails_those_who_need_it_and_not_those_who_wait_for_the_same_read(tmp_path):
    async with small(tmp_path) as house:
        pager, pool = house.volume.pager, house.fs.pool
        (base,) = await files(house, 1, prefix="base")
        broken = house.fs.kv_fork(ROOT, base, "broken.kv")
        await house.compute(broken, range(PAGE))
        sound = house.fs.kv_fork(ROOT, base, "sound.kv")
        await house.compute(sound, [7])
        for file in (broken, sound, base):
            await pager.put_on_disk(file.table)
        slot = int(pool.on_disk.slot[broken.table.pages[-1]])
        with house.keeper.pages_out.file.path.open("r+b") as slots:
            slots.seek(slot_at(slot))
            slots.write(b"damaged")
        errors: list[SymError] = []

        async def compute(file: OpenKv) -> None:
            try:
                await house.compute(file, [1])
            except SymError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for file in (broken, sound, base):
                nursery.start_soon(compute, file)
                await trio.lowlevel.checkpoint()
        assert [str(error).partition(":")[0] for error in errors] == ["damaged on disk"]
        assert house.tokens(sound)[-2:] == [7, 1]
        assert house.is_right(sound)
        assert house.is_right(base)
        assert house.tokens(broken)[-1] == PAGE - 1


class Listening:
    """Programs that begin to listen after they could have been told once, and do nothing."""

    num_told = 0

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        assert len(tables) > 0 < num_pages
        self.num_told += 1
        return 0.05 if self.num_told > 1 else 0.0


async def test_who_begins_to_listen_is_told_although_pages_have_just_gone_and_then_they_go(tmp_path):
    listening = Listening()
    async with small(tmp_path, pressure=lambda: listening) as house:
        await files(house, 8)
        assert listening.num_told > 1


async def test_a_shared_tail_is_whole_after_a_sync_failed_and_another_wrote_its_part(tmp_path, monkeypatch):
    """The page is on disk alone, and is written anew for the file that has less of it."""

    def fails(_file: SlotFile) -> None:
        raise OSError(5, "no luck")

    async with small(tmp_path) as house:
        long = house.create("long.kv")
        await house.compute(long, range(PAGE + 20))
        short = house.fs.kv_fork(ROOT, long, "short.kv")
        house.fs.kv_truncate(short, PAGE + 10)
        for file in (long, short):
            await house.volume.pager.put_on_disk(file.table)
        with monkeypatch.context() as patch:
            patch.setattr(SlotFile, "sync", fails)
            with pytest.raises(SymError, match="no luck"):
                await house.sync("short.kv")
        await house.sync("short.kv")
        await house.volume.pager.put_in_memory(long.table)
        assert house.is_right(long)


async def test_a_page_that_is_written_anew_while_it_is_read_is_not_said_to_be_damaged(tmp_path, monkeypatch, caplog):
    """The slot of old is another page's by then."""
    async with small(tmp_path) as house:
        pager, on_disk = house.volume.pager, house.fs.pool.on_disk
        (file,) = await files(house, 1)
        await pager.put_on_disk(file.table)
        before = set(on_disk.slot[file.table.pages].tolist())
        on_disk.spoil(file.table.pages.copy(), np.zeros(4, np.bool_))  # as after a sync that failed
        with held(monkeypatch, house.keeper.pages_in, "_read") as may_read:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(house.compute, file, [1])
                await wait_all_tasks_blocked()
                await house.keeper.pages_out.write(file.content, 4 * PAGE)
                other = house.create("other.kv")
                await house.compute(other, range(500, 500 + 4 * PAGE))
                await house.keeper.pages_out.write(other.content, 4 * PAGE)
                assert before & set(on_disk.slot[other.table.pages].tolist())
                may_read.set()
        assert house.is_right(file)
    assert not caplog.records


@pytest.mark.slow
async def test_a_file_that_has_not_come_when_it_usually_does_is_not_brought_back_for_nothing(tmp_path):
    async with small(tmp_path) as house:
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


async def test_what_a_pinned_file_was_cut_by_is_not_pinned_any_more(tmp_path):
    """A second file has the page still; and a pinned one keeps what both had."""
    async with small(tmp_path) as house:
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


async def test_a_priority_puts_a_file_before_others_of_its_user_and_not_before_those_of_another(tmp_path):
    async with small(tmp_path) as house:
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
