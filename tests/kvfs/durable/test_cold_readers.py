"""A reader of an image of a file that is on disk brings nothing into memory, puts nobody out, and gets the right bytes
although pages come and go meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from kvfs.durable.slot_file import SlotFile
from kvfs.images.snapshot import Snapshot
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
from tests.kvfs.durable.house import ROOT, House, running

NUM_TOKENS = 50 * 32 + 7
PAGES_A_SPAN = 4


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SPAN_BYTES", PAGES_A_SPAN * 4096)


def content(house: House, path: str) -> KvFile:
    found = house.fs.find(ROOT, path).content
    assert isinstance(found, KvFile)
    return found


def put_out(house: House, pages: IntArray) -> None:
    """Send pages to disk: they are there alone, and their frames hold something else."""
    pool = house.fs.pool
    assert (pool.on_disk.kept[pages] >= pool.fill[pages]).all()
    frames = pool.store.of[pages]
    frames = frames[frames != NOWHERE]
    pool.drop_frames(pages)
    for frame in frames.tolist():
        house.store.pages[frame] = -1.0


async def with_file(house: House, name: str = "a.kv") -> tuple[KvFile, bytes]:
    """A file in memory and in slots; and its image."""
    house.create(name, [each % 900 for each in range(NUM_TOKENS)])
    await house.sync(name)
    kv = content(house, name)
    snapshot = house.volume.open_snapshot(kv)
    image = bytes(snapshot.read(0, snapshot.size))
    house.volume.close_snapshot(snapshot)
    return kv, image


async def read_all(reader: Reader, piece: int = 5000) -> bytes:
    found = b""
    while data := bytes(await reader.read(len(found), piece)):
        found += data
    return found


def test_an_image_of_a_cold_file_is_read_and_no_page_comes_or_goes(tmp_path: Path, small_spans: None) -> None:
    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            hot = house.create("hot.kv", range(60 * 32)).content
            put_out(house, kv.table.pages)
            where, num_free = house.fs.pool.store.page_of[:], house.fs.pool.num_free
            num_read = house.keeper.statistics().read_bytes
            reader = Reader(house.volume, kv, Eager(), Rooms())
            assert await read_all(reader) == image
            reader.close()
            assert house.keeper.statistics().read_bytes - num_read == 50 * 4096
            assert (house.fs.pool.store.page_of[:] == where).all()
            assert house.fs.pool.num_free == num_free
            assert (house.fs.pool.store.of[hot.table.pages] != NOWHERE).all()

    trio.run(live)


def test_pages_are_read_once_for_many_small_reads_by_large_reads_and_ahead(
    tmp_path: Path, small_spans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[int] = []
    read_into = SlotFile.read_into

    def counted(self: SlotFile, slots: Sequence[int], *rest: Any) -> None:
        jobs.append(len(slots))
        read_into(self, slots, *rest)

    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            put_out(house, kv.table.pages)
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

    trio.run(live)


def test_every_range_of_a_file_in_both_places_reads_as_that_range(tmp_path: Path, small_spans: None) -> None:
    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            reader, rng = Reader(house.volume, kv, Eager(), Rooms()), np.random.default_rng(0)
            for _ in range(60):
                put_out(house, kv.table.pages[rng.random(kv.table.pages.size) < 0.2])
                offset, size = int(rng.integers(len(image))), int(rng.integers(60_000))
                assert bytes(await reader.read(offset, size)) == image[offset : offset + size]
            reader.close()

    trio.run(live)


def test_many_readers_share_few_rooms(tmp_path: Path, small_spans: None) -> None:
    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            put_out(house, kv.table.pages)
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

    trio.run(live)


def test_a_reader_that_is_closed_while_its_room_is_filled_leaves_that_room(
    tmp_path: Path, small_spans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, read_into = threading.Event(), SlotFile.read_into

    def held(self: SlotFile, *given: Any) -> None:
        may_go_on.wait()
        read_into(self, *given)

    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            put_out(house, kv.table.pages)
            rooms = Rooms()
            reader, other = (Reader(house.volume, kv, Eager(), rooms) for _ in range(2))
            await other.read(0, 1)
            await reader.read(0, 1)
            monkeypatch.setattr(SlotFile, "read_into", held)
            with trio.move_on_after(0.05):
                await reader.read(house.volume.image_format.data_start, 100)
            reader.close()
            assert not rooms._free, "it is being written to"
            may_go_on.set()
            assert await read_all(other) == image
            other.close()

    trio.run(live)


def test_a_disk_that_hangs_is_told_to_who_reads_and_to_who_hashes(
    tmp_path: Path, small_spans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, read_into = threading.Event(), SlotFile.read_into

    def held(self: SlotFile, *given: Any) -> None:
        may_go_on.wait()
        read_into(self, *given)

    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            put_out(house, kv.table.pages[:50])
            readers = [Reader(house.volume, kv, Eager(), Rooms()) for _ in range(2)]
            await readers[0].read(0, 1)
            monkeypatch.setattr(SlotFile, "read_into", held)
            house.keeper.jobs.deadline_s = 0.1
            with pytest.raises(SymError, match="has not answered"):
                await readers[0].read(house.volume.image_format.data_start, 100)
            house.fs.pool.has_digest[kv.table.pages] = False
            with pytest.raises(SymError, match="has not answered"):
                await readers[1].read(0, 100)
            house.keeper.jobs.deadline_s = 30.0
            may_go_on.set()
            await house.keeper.jobs.are_over()
            for reader in readers:
                assert await read_all(reader) == image
                reader.close()

    trio.run(live)


def test_damage_is_told_to_who_reads_it_and_the_rest_can_be_read(state: Path, small_spans: None) -> None:
    flip(own_slots(state), slot_at(5) + 1)

    async def live() -> None:
        async with running(House(state)) as house:
            kv = content(house, "a.kv")
            house.fs.pool.has_digest[kv.table.pages[:9]] = True  # as if it had been read before it was damaged
            reader = Reader(house.volume, kv, Eager(), Rooms())
            start = house.volume.image_format.data_start
            with pytest.raises(SymError, match=r"a\.kv from entry 160"):
                await reader.read(start + 5 * 4096, 10)
            assert len(await reader.read(start + 9 * 4096, 10)) == 10
            reader.close()

    trio.run(live)


# Workers


class Churn:
    """The trio thread, as far as a reader knows: takes frames away and gives them to others, all the time."""

    def __init__(self, house: House, pages: IntArray, seed: int = 0) -> None:
        self._pool, self._house, self._pages = house.fs.pool, house, pages
        self._rng = np.random.default_rng(seed)
        self._bytes = {page: bytes(self._pool.store.view(page)) for page in pages.tolist()}
        self.num_moves = 0

    def once(self) -> None:
        store = self._pool.store
        page = int(self._rng.choice(self._pages))
        if store.of[page] == NOWHERE:
            (frame,) = store.free.take(1).tolist()
            house_bytes = np.frombuffer(self._bytes[page], np.float32).reshape(self._house.store.pages.shape[1:])
            self._house.store.pages[frame] = house_bytes
            store.bind(np.array([page], np.int32), np.array([frame], np.int32))
        else:
            frame = int(store.of[page])
            self._pool.drop_frames(np.array([page], np.int32))
            self._house.store.pages[frame] = self.num_moves  # another page's
        self.num_moves += 1


def test_workers_get_the_right_bytes_while_pages_come_and_go(tmp_path: Path) -> None:
    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, image = await with_file(house)
            pool, pages = house.fs.pool, kv.table.pages[:50].copy()
            wanted = [bytes(pool.store.view(page)) for page in pages.tolist()]
            churn, is_over = Churn(house, pages), threading.Event()

            def read() -> None:
                try:
                    for _ in range(40):
                        assert look(pool.store, pool.cold, pages, copies) == wanted
                        snapshot._computed = None
                        pool.has_digest[pages] = False
                        snapshot.prepare()
                        header_bytes = snapshot.layout.pages
                        assert bytes(snapshot.read(0, header_bytes)) == image[:header_bytes]  # it has all digests
                finally:
                    is_over.set()

            snapshot = Snapshot(kv.table, house.volume.image_format)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, read)
                while not is_over.is_set():
                    for _ in range(20):
                        churn.once()
                    await trio.lowlevel.checkpoint()
            assert churn.num_moves > 1000
            snapshot.close()

    trio.run(live)


def test_what_is_made_of_a_frame_that_was_taken_away_meanwhile_is_thrown_away(tmp_path: Path) -> None:
    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, _ = await with_file(house)
            pool, page = house.fs.pool, kv.table.pages[3:4].copy()
            wanted, seen = bytes(pool.store.view(int(page[0]))), list[bytes]()

            def take_away_and_copy(views: list[Bytes]) -> list[bytes]:
                if not seen:
                    put_out(house, page)
                seen.extend(map(bytes, views))
                return seen[-1:]

            assert await trio.to_thread.run_sync(look, pool.store, pool.cold, page, take_away_and_copy) == [wanted]
            assert seen == [np.full(1024, -1.0, np.float32).tobytes(), wanted]

    trio.run(live)


@pytest.mark.parametrize("way", ["use", "read_into"])
def test_a_page_that_gets_another_slot_while_its_old_one_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A page came in, was written anew, and went out; its old slot holds another page by now."""
    fill = SlotFile._fill
    num_tries = 0

    async def live() -> None:
        async with running(House(tmp_path, num_pages=120)) as house:
            kv, _ = await with_file(house)
            pool, pages = house.fs.pool, kv.table.pages[2:4].copy()
            wanted = [bytes(pool.store.view(page)) for page in pages.tolist()]
            put_out(house, pages)
            slots, checks = pool.on_disk.slot[pages].copy(), pool.on_disk.check[pages].copy()
            new_slots = np.array([90, 91], np.int32)
            new_checks = house.keeper.pages_out.file.write(
                new_slots.tolist(), [partial(bytes, each) for each in wanted]
            )

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

    def read_by(house: House, way: str, pages: IntArray) -> list[bytes]:
        pool = house.fs.pool
        if way == "use":
            return look(pool.store, pool.cold, pages, copies)
        rooms = [memoryview(bytearray(4096)) for _ in pages]
        house.keeper.pages_in.read_into(pages, rooms)
        return [bytes(room) for room in rooms]

    trio.run(live)
