"""Memory is the fastest place of several: pages go to disk and come back, and nobody notices but by the clock."""

from __future__ import annotations

import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.durable.slot_file import slot_bytes_of
from kvfs.fs import OpenKv
from kvfs.pages.table import PageTable, Reservation
from libsym.abi import PAGE_ENTRIES
from libsym.errors import NoSpace, SymError
from tests.kvfs.durable.damage import slot_at
from tests.kvfs.durable.house import ROOT, House, running

PAGE = PAGE_ENTRIES


def live(work: Callable[[House], Awaitable[None]], directory: Path, **options: object) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            async with running(House(directory, **options)) as house:  # type: ignore[arg-type]
                await work(house)

    trio.run(main)


async def files(house: House, count: int, num_pages: int = 4, prefix: str = "f") -> list[OpenKv]:
    found = []
    for number in range(count):
        found.append(house.create(f"{prefix}{number}.kv"))
        await house.compute(found[-1], range(number, number + num_pages * PAGE))
    return found


def test_ten_times_more_than_memory_is_computed_and_each_file_is_as_it_was(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        found = await files(house, 40)
        assert house.fs.pool.store.held_pages().size <= 16
        for file in found:
            await house.volume.pager.put_in_memory(file.table)
            assert house.is_right(file)
        assert house.volume.pager.statistics().num_in >= 36 * 4

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_files_go_on_where_they_were_cut_off_by_the_disk(tmp_path: Path) -> None:
    """Tails that are not full, forks that share them, and truncation, below and at a page's boundary."""

    async def work(house: House) -> None:
        rng = random.Random(7)
        found = [house.create(f"{number}.kv") for number in range(12)]
        lengths = [0] * 12
        for turn in range(400):
            place = rng.randrange(len(found))
            file = found[place]
            kind = rng.random()
            if kind < 0.6:
                count = rng.choice((1, 5, 31, 32, 33, 70))
                if lengths[place] + count > 5 * PAGE:
                    house.fs.kv_truncate(file, lengths[place] // 3)
                    lengths[place] //= 3
                await house.compute(file, [turn % 1000 + each for each in range(count)])
                lengths[place] += count
            elif kind < 0.8:
                other = rng.randrange(len(found))
                house.fs.kv_close(found[other])
                if other == place:
                    found[other] = house.create(f"n{turn}.kv")
                    lengths[other] = 0
                else:
                    found[other] = house.fs.kv_fork(ROOT, file, f"n{turn}.kv")
                    lengths[other] = lengths[place]
            elif lengths[place]:
                lengths[place] = rng.randrange(lengths[place])
                house.fs.kv_truncate(file, lengths[place])
            if turn % 10 == 0:
                await trio.sleep(0.001)
            house.fs.check()
        for file, length in zip(found, lengths, strict=True):
            assert file.table.length == length
            await house.volume.pager.put_in_memory(file.table)
            assert house.is_right(file)

    live(work, tmp_path, num_pages=12, num_on_disk=400)


def test_many_wait_at_once_and_all_get_their_turn(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        found = await files(house, 16, 5)

        async def go_on(file: OpenKv) -> None:
            for each in range(10):
                await house.compute(file, [each])
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for file in found:
                nursery.start_soon(go_on, file)
        for file in found:
            assert file.table.length == 5 * PAGE + 10
            await house.volume.pager.put_in_memory(file.table)
            assert house.is_right(file)

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_what_needs_more_than_all_of_memory_is_told_so_and_others_go_on(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        file = house.create("large.kv")
        await house.compute(file, range(10 * PAGE))
        with pytest.raises(NoSpace, match="17 pages are needed in memory at once, and there is room for 16"):
            await house.compute(file, range(7 * PAGE))
        assert file.table.length == 10 * PAGE
        await house.compute(file, range(6 * PAGE))
        (other,) = await files(house, 1)
        assert house.is_right(other)

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_a_full_disk_refuses_who_asks_for_more_and_loses_nothing(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        found = [house.create(f"{number}.kv") for number in range(10)]
        num_done, failure = 0, None
        while failure is None:
            try:
                await house.compute(found[num_done], range(num_done, num_done + 4 * PAGE))
                num_done += 1
            except SymError as error:
                failure = error.errno
        assert failure == errno.ENOSPC
        assert 4 <= num_done < 10
        house.fs.kv_close(found[-1])
        house.fs.kv_remove(ROOT, "9.kv")
        for file in found[:num_done]:
            tokens, _ = file.table.read()
            assert tokens.size == 4 * PAGE
        house.fs.kv_close(found[0])
        house.fs.kv_remove(ROOT, "0.kv")
        with suppress(NoSpace):
            await house.keeper.sync_all()
        await house.compute(found[num_done], range(4 * PAGE))
        for file in found[1 : num_done + 1]:
            await house.volume.pager.put_in_memory(file.table)
            assert house.is_right(file)

    live(work, tmp_path, num_pages=16, num_on_disk=200, disk_limit=20 * 4096)


def test_what_df_calls_available_is_what_the_disk_has_room_for(tmp_path: Path) -> None:
    async def work(house: House) -> None:
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

    live(work, tmp_path, num_pages=64, num_on_disk=20, disk_limit=20 * slot_bytes_of(4096))


def test_a_file_goes_to_disk_and_comes_back_when_it_is_asked_to(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        pager = house.volume.pager
        one, two = await files(house, 2)
        await pager.put_on_disk(one.table)
        assert (pager.tier_of(one.table), pager.tier_of(two.table)) == ("disk", "memory")
        await pager.put_in_memory(one.table)
        assert pager.tier_of(one.table) == "memory"
        assert house.is_right(one)

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_a_hint_brings_a_file_in_behind_its_back(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        pager = house.volume.pager
        (one,) = await files(house, 1)
        await pager.put_on_disk(one.table)
        pager.will_need(one.table)
        while pager.tier_of(one.table) != "memory":  # noqa: ASYNC110
            await trio.sleep(0.001)
        assert house.is_right(one)
        await trio.sleep(0.01)
        house.fs.check()

    live(work, tmp_path, num_pages=16, num_on_disk=200)


def test_pinned_files_stay_until_their_lease_is_over(tmp_path: Path) -> None:
    async def work(house: House) -> None:
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

    live(work, tmp_path, num_pages=16, num_on_disk=400)


def test_a_shared_prefix_stays_as_long_as_its_forks_are_used(tmp_path: Path) -> None:
    async def work(house: House) -> None:
        (base,) = await files(house, 1, 4, prefix="base")
        for number in range(30):
            fork = house.fs.kv_fork(ROOT, base, None)
            await house.compute(fork, [number])
            house.fs.kv_close(fork)
            await files(house, 1, 3, prefix=f"other{number}-")
        assert house.volume.pager.tier_of(base.table) == "memory"
        assert house.volume.pager.statistics().num_in == 0

    live(work, tmp_path, num_pages=16, num_on_disk=400)


async def reserve_all(house: House, file: OpenKv, num_entries: int) -> Reservation:
    """A call that has its pages, and is computing."""
    reservation = house.fs.reserve(file, range(num_entries), range(num_entries))
    if house.volume.pager.acquire(reservation, 0, lambda _error: None) is not None:
        while reservation.pinned is None:  # noqa: ASYNC110
            await trio.sleep(0.001)
    return reservation


def test_a_file_that_is_cut_while_it_waits_to_be_in_memory_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(house: House) -> None:
        pager = house.volume.pager
        (file,) = await files(house, 1)
        await pager.put_on_disk(file.table)
        large = house.create("large.kv")
        reservation = await reserve_all(house, large, 15 * PAGE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pager.put_in_memory, file.table)
            await trio.testing.wait_all_tasks_blocked()
            assert pager.statistics().num_waiting == 1
            house.fs.kv_truncate(file, PAGE)
            house.fs.check()
            reservation.abort()
        await pager.put_in_memory(file.table)
        assert house.tokens(file) == [*range(PAGE)]
        assert house.is_right(file)

    live(work, tmp_path, num_pages=16, num_on_disk=200)
    assert not caplog.records


def test_a_file_that_is_removed_on_its_way_down_is_no_error_of_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(house: House) -> None:
        found = await files(house, 2)
        for file in found:
            house.volume.pager.demote(file.table)
        house.fs.kv_close(found[0])
        house.fs.kv_remove(ROOT, "f0.kv")
        await house.volume.pager.put_on_disk(found[1].table)
        assert not house.volume.pager.statistics().error
        await files(house, 10, prefix="g")

    live(work, tmp_path, num_pages=16, num_on_disk=200)
    assert not caplog.records


def test_a_file_goes_down_while_it_is_synced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(house: House) -> None:
        for number in range(20):
            (file,) = await files(house, 1, 8, prefix=f"{number}-")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(house.keeper.sync, file.inode)
                await trio.lowlevel.checkpoint()
                await house.volume.pager.put_on_disk(file.table)
            await house.volume.pager.put_in_memory(file.table)
            assert house.is_right(file)
        assert not house.volume.pager.statistics().num_computing

    live(work, tmp_path, num_pages=16, num_on_disk=400)
    assert not caplog.records


def test_a_damaged_page_fails_those_who_need_it_and_not_those_who_wait_for_the_same_read(tmp_path: Path) -> None:
    async def work(house: House) -> None:
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

    live(work, tmp_path, num_pages=16, num_on_disk=400)


class Listening:
    """Programs that begin to listen after they could have been told once, and do nothing."""

    def __init__(self) -> None:
        self.graces_s: list[float] = []

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        assert len(tables) > 0
        assert num_pages > 0
        self.graces_s.append(0.05 if self.graces_s else 0.0)
        return self.graces_s[-1]


def test_who_begins_to_listen_is_told_although_pages_have_just_gone_and_then_they_go(tmp_path: Path) -> None:
    listening = Listening()

    async def work(house: House) -> None:
        await files(house, 8)
        assert listening.graces_s[:2] == [0.0, 0.05]

    live(work, tmp_path, num_pages=16, num_on_disk=200, pressure=lambda: listening)
