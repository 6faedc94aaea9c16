"""A reader of an image of a file that is on disk brings nothing into memory, puts nobody out, and gets the right bytes
although pages come and go meanwhile.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from kvfs.durable.slot_file import SlotFile
from kvfs.mount import spans
from kvfs.mount.eager import Eager
from kvfs.mount.spans import MAX_ROOMS, ROOMS_KEPT, Rooms
from kvfs.mount.views import Reader
from kvfs.names.content import KvFile
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import Bytes, copies, look
from libsym.errors import SymError
from tests.kvfs.durable.damage import flip, own_slots, slot_at
from tests.kvfs.durable.house import House, held, running

NUM_TOKENS = 50 * 32 + 7
PAGES_A_SPAN = 4


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SPAN_BYTES", PAGES_A_SPAN * 4096)


def put_out(house: House, pages: IntArray) -> None:
    """Send pages to disk: they are there alone, and their frames hold something else."""
    pool = house.fs.pool
    assert (pool.on_disk.kept[pages] >= pool.fill[pages]).all()
    frames = pool.store.of[pages]
    frames = frames[frames != NOWHERE]
    pool.drop_frames(pages)
    for frame in frames.tolist():
        house.store.pages[frame] = -1.0


@asynccontextmanager
async def with_file(directory: Path, *, is_cold: bool = True) -> AsyncIterator[tuple[House, KvFile, bytes]]:
    """A house with a file that is on disk, and in memory unless it is cold; and the image of the file."""
    async with running(House(directory, num_pages=120)) as house:
        house.create("a.kv", [each % 900 for each in range(NUM_TOKENS)])
        await house.sync("a.kv")
        kv = house.kv("a.kv")
        image = await house.image(kv)
        if is_cold:
            put_out(house, kv.table.pages)
        yield house, kv, image


async def read_all(reader: Reader, piece: int = 5000) -> bytes:
    found = b""
    while data := bytes(await reader.read(len(found), piece)):
        found += data
    return found


async def test_an_image_of_a_cold_file_is_read_and_no_page_comes_or_goes(tmp_path, small_spans):
    async with with_file(tmp_path) as (house, kv, image):
        hot = house.create("hot.kv", range(60 * 32)).content
        where, num_free = house.fs.pool.store.page_of[:], house.fs.pool.num_free
        num_read = house.keeper.statistics().read_bytes
        reader = Reader(house.volume, kv, Eager(), Rooms())
        assert await read_all(reader) == image
        reader.close()
        assert house.keeper.statistics().read_bytes - num_read == 50 * 4096
        assert (house.fs.pool.store.page_of[:] == where).all()
        assert house.fs.pool.num_free == num_free
        assert (house.fs.pool.store.of[hot.table.pages] != NOWHERE).all()


async def test_pages_are_read_once_for_many_small_reads_by_large_reads_and_ahead(tmp_path, small_spans, monkeypatch):
    jobs: list[int] = []
    read_into = SlotFile.read_into

    def counted(self: SlotFile, slots: Sequence[int], *rest: Any) -> None:
        jobs.append(len(slots))
        read_into(self, slots, *rest)

    async with with_file(tmp_path) as (house, kv, image):
        reader = Reader(house.volume, kv, Eager(), Rooms())
        await reader.read(0, 1)
        monkeypatch.setattr(SlotFile, "read_into", counted)
        start = house.volume.image_format.data_start
        await reader.read(start, 100)
        await house.keeper.jobs.idle()
        assert jobs == [PAGES_A_SPAN] * 2, "the first span, and the next one ahead"
        assert await read_all(reader, piece=1000) == image
        assert sorted(jobs) == [2] + [PAGES_A_SPAN] * 12
        reader.close()


@pytest.mark.slow
async def test_many_readers_share_few_rooms(tmp_path, small_spans):
    async with with_file(tmp_path) as (house, kv, image):
        rooms = Rooms()
        readers = [Reader(house.volume, kv, Eager(), rooms) for _ in range(3 * MAX_ROOMS)]

        async def read(reader: Reader) -> None:
            assert await read_all(reader, piece=9000) == image

        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(read, reader)
        assert len(rooms._spans) <= MAX_ROOMS
        for reader in readers:
            reader.close()
        assert not rooms._spans
        assert len(rooms._free) <= ROOMS_KEPT


async def test_a_reader_that_is_closed_while_its_room_is_filled_leaves_that_room(tmp_path, small_spans, monkeypatch):
    async with with_file(tmp_path) as (house, kv, image):
        rooms = Rooms()
        reader, other = (Reader(house.volume, kv, Eager(), rooms) for _ in range(2))
        await other.read(0, 1)
        await reader.read(0, 1)
        with held(monkeypatch, SlotFile, "read_into") as may_go_on:
            with trio.move_on_after(0.05):
                await reader.read(house.volume.image_format.data_start, 100)
            reader.close()
            assert not rooms._free, "it is being written to"
            may_go_on.set()
            assert await read_all(other) == image
        other.close()


async def test_a_disk_that_hangs_is_told_to_who_reads_and_to_who_hashes(tmp_path, small_spans, monkeypatch):
    async with with_file(tmp_path) as (house, kv, image):
        readers = [Reader(house.volume, kv, Eager(), Rooms()) for _ in range(2)]
        await readers[0].read(0, 1)
        with held(monkeypatch, SlotFile, "read_into"):
            house.keeper.jobs.deadline_s = 0.1
            with pytest.raises(SymError, match="has not answered"):
                await readers[0].read(house.volume.image_format.data_start, 100)
            house.fs.pool.has_digest[kv.table.pages] = False
            with pytest.raises(SymError, match="has not answered"):
                await readers[1].read(0, 100)
            house.keeper.jobs.deadline_s = 30.0
        await house.keeper.jobs.are_over()
        for reader in readers:
            assert await read_all(reader) == image
            reader.close()


async def test_damage_is_told_to_who_reads_it_and_the_rest_can_be_read(state, small_spans):
    flip(own_slots(state), slot_at(5) + 1)
    async with running(House(state)) as house:
        kv = house.kv("a.kv")
        house.fs.pool.has_digest[kv.table.pages[:9]] = True  # as if it had been read before it was damaged
        reader = Reader(house.volume, kv, Eager(), Rooms())
        start = house.volume.image_format.data_start
        with pytest.raises(SymError, match=r"a\.kv from entry 160"):
            await reader.read(start + 5 * 4096, 10)
        assert len(await reader.read(start + 9 * 4096, 10)) == 10
        reader.close()


async def test_what_is_made_of_a_frame_that_was_taken_away_meanwhile_is_thrown_away(tmp_path):
    async with with_file(tmp_path, is_cold=False) as (house, kv, _):
        pool, page = house.fs.pool, kv.table.pages[3:4].copy()
        wanted, seen = bytes(pool.store.view(int(page[0]))), list[bytes]()

        def take_away_and_copy(views: list[Bytes]) -> list[bytes]:
            if not seen:
                put_out(house, page)
            seen.extend(map(bytes, views))
            return seen[-1:]

        assert await trio.to_thread.run_sync(look, pool.store, pool.cold, page, take_away_and_copy) == [wanted]
        assert seen == [np.full(1024, -1.0, np.float32).tobytes(), wanted]


@pytest.mark.parametrize("way", ["use", "read_into"])
async def test_a_page_that_gets_another_slot_while_its_old_one_is_read_is_read_again(tmp_path, monkeypatch, way):
    """A page came in, was written anew, and went out; its old slot holds another page by now."""
    fill = SlotFile._fill
    num_tries = 0

    def read_by(house: House, way: str, pages: IntArray) -> list[bytes]:
        pool = house.fs.pool
        if way == "use":
            return look(pool.store, pool.cold, pages, copies)
        rooms = [memoryview(bytearray(4096)) for _ in pages]
        house.keeper.pages_in.read_into(pages, rooms)
        return [bytes(room) for room in rooms]

    async with with_file(tmp_path, is_cold=False) as (house, kv, _):
        pool, pages = house.fs.pool, kv.table.pages[2:4].copy()
        wanted = [bytes(pool.store.view(page)) for page in pages.tolist()]
        put_out(house, pages)
        slots, checks = pool.on_disk.slot[pages].copy(), pool.on_disk.check[pages].copy()
        new_slots = np.array([90, 91], np.int32)
        new_checks = house.keeper.pages_out.file.write(new_slots.tolist(), [partial(bytes, each) for each in wanted])

        def fill_late(self: SlotFile, rooms: list[memoryview], numbers: list[int]) -> None:
            nonlocal num_tries
            num_tries += 1
            if num_tries == 1:
                pool.on_disk.slot[pages], pool.on_disk.check[pages] = new_slots, new_checks
                house.keeper.pages_out.file.write(slots.tolist(), [partial(bytes, 4096)] * 2)
            fill(self, rooms, numbers)

        monkeypatch.setattr(SlotFile, "_fill", fill_late)
        found = await trio.to_thread.run_sync(read_by, house, way, pages)
        assert found == wanted
        assert num_tries > 1
        pool.on_disk.slot[pages], pool.on_disk.check[pages] = slots, checks
