"""Pages go to slots and come back from them, wherever they lie in memory; what is not as it was written is told."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvfs.durable.slot_file import ALIGNMENT, SLOTS_A_JOB, SUPERBLOCK_BYTES, Damaged, SlotFile
from kvfs.pages.columns import Columns
from kvfs.pages.page_slots import PageSlots

LARGE = 3 * ALIGNMENT
SLOTS = [4, 5, 6, 1, 9, 10]
"""Runs of three, one and two."""


def slot_file(directory: Path, page_bytes: int) -> SlotFile:
    path = directory / "1.kv"
    path.write_bytes(bytes(SUPERBLOCK_BYTES))
    return SlotFile(path, page_bytes)


class Pages:
    """Pages in memory that lie apart from each other, at multiples of 4096 or `beside` those."""

    def __init__(self, page_bytes: int, count: int, beside: int = 0) -> None:
        step = 2 * (page_bytes // ALIGNMENT + 2) * ALIGNMENT
        memory = memoryview(mmap.mmap(-1, count * step))
        self.rooms = [memory[place * step + beside :][:page_bytes] for place in reversed(range(count))]

    def fill(self, seed: int = 0) -> Pages:
        for number, room in enumerate(self.rooms):
            room[:] = np.random.default_rng([seed, number]).bytes(len(room))
        return self

    def sources(self) -> list[Callable[[], bytes]]:
        return [partial(bytes, room) for room in self.rooms]

    def read(self) -> list[bytes]:
        return [bytes(room) for room in self.rooms]


@pytest.mark.parametrize("page_bytes", [LARGE, LARGE - 100])
@pytest.mark.parametrize("beside", [0, 16])
@pytest.mark.parametrize("into_beside", [0, 512])
def test_pages_come_back_wherever_they_lie(tmp_path, page_bytes, beside, into_beside):
    file = slot_file(tmp_path, page_bytes)
    pages = Pages(page_bytes, len(SLOTS), beside).fill()
    checks = file.write(SLOTS, pages.sources())
    found = Pages(page_bytes, len(SLOTS), into_beside)
    file.read_into(SLOTS, checks.tolist(), found.rooms)
    assert found.read() == pages.read()
    with file.lent(SLOTS, checks.tolist()) as (views, damaged):
        assert ([bytes(view) for view in views], damaged) == (pages.read(), [])
    file.close()


def test_the_same_page_has_the_same_checksum_from_anywhere_and_slots_end_in_zeros(tmp_path):
    file = slot_file(tmp_path, LARGE - 100)
    dirty = file.write([0], Pages(LARGE - 100, 1).fill(seed=1).sources())
    file.close()
    (tmp_path / "1.kv").write_bytes((tmp_path / "1.kv").read_bytes()[:-100] + b"x" * 100)  # behind some page
    file = slot_file(tmp_path, LARGE - 100)
    assert file.verify([0], dirty.tolist()) == [0]
    one = file.write([3], Pages(LARGE - 100, 1).fill().sources())
    other = file.write([3], Pages(LARGE - 100, 1, beside=16).fill().sources())
    assert one == other
    file.close()
    data = (tmp_path / "1.kv").read_bytes()[SUPERBLOCK_BYTES + 3 * LARGE :][:LARGE]
    assert data[-100:] == bytes(100)


def test_a_job_is_one_system_call_for_each_run_of_slots(tmp_path, monkeypatch):
    calls: list[int] = []
    pwritev, preadv = os.pwritev, os.preadv

    def counted(call: Callable[..., int]) -> Callable[..., int]:
        def counting(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
            calls.append(len(views))
            return call(descriptor, views, offset)

        return counting

    file = slot_file(tmp_path, LARGE)
    pages = Pages(LARGE, len(SLOTS)).fill()
    monkeypatch.setattr(os, "pwritev", counted(pwritev))
    monkeypatch.setattr(os, "preadv", counted(preadv))
    checks = file.write(SLOTS, pages.sources())
    assert calls == [3, 1, 2]
    file.read_into(SLOTS, checks.tolist(), pages.rooms)
    assert calls == [3, 1, 2] * 2
    file.close()


def test_what_the_disk_takes_and_gives_in_parts_is_whole(tmp_path, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv

    def some(views: Sequence[memoryview], most: int) -> list[memoryview]:
        taken = []
        for view in views:
            taken.append(memoryview(view)[:most])
            most -= len(taken[-1])
            if not most:
                break
        return taken

    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: pwritev(fd, some(views, 4 * ALIGNMENT), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, some(views, 5 * ALIGNMENT), offset))
    file = slot_file(tmp_path, LARGE)
    pages, found = Pages(LARGE, len(SLOTS)).fill(), Pages(LARGE, len(SLOTS))
    checks = file.write(SLOTS, pages.sources())
    file.read_into(SLOTS, checks.tolist(), found.rooms)
    assert found.read() == pages.read()
    file.close()


@pytest.mark.parametrize("beside", [0, 16])
def test_damage_is_told_by_slot_and_the_others_are_read(tmp_path, beside):
    file = slot_file(tmp_path, LARGE)
    pages = Pages(LARGE, SLOTS_A_JOB).fill()
    slots = list(range(SLOTS_A_JOB))
    checks = file.write(slots, pages.sources()).tolist()
    file.sync()
    with (tmp_path / "1.kv").open("r+b") as raw:
        for slot in (2, 7):
            raw.seek(SUPERBLOCK_BYTES + slot * LARGE + 100)
            byte = raw.read(1)[0]
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte ^ 1]))
    with pytest.raises(Damaged) as error:
        file.read_into(slots, checks, Pages(LARGE, SLOTS_A_JOB, beside).rooms)
    assert error.value.slots == (2, 7)
    assert file.verify(slots, checks) == [2, 7]
    file.close()
    os.truncate(tmp_path / "1.kv", SUPERBLOCK_BYTES + 12 * LARGE)
    file = SlotFile(tmp_path / "1.kv", LARGE)
    with pytest.raises(Damaged) as error:
        file.read_into(slots, checks, Pages(LARGE, SLOTS_A_JOB, beside).rooms)
    assert error.value.slots == (2, 7, 12, 13, 14, 15)
    file.close()


def test_a_slot_that_the_disk_cannot_read_is_damaged_alone(tmp_path, monkeypatch):
    preadv = os.preadv

    def failing(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        bad = SUPERBLOCK_BYTES + 5 * LARGE
        if offset <= bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, "a bad block")
        return preadv(descriptor, views, offset)

    file = slot_file(tmp_path, LARGE)
    pages, found = Pages(LARGE, len(SLOTS)).fill(), Pages(LARGE, len(SLOTS))
    checks = file.write(SLOTS, pages.sources()).tolist()
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(Damaged) as error:
        file.read_into(SLOTS, checks, found.rooms)
    assert error.value.slots == (5,)
    assert [page for place, page in enumerate(found.read()) if place != 1] == [
        page for place, page in enumerate(pages.read()) if place != 1
    ]
    file.close()


def test_a_full_page_that_is_cut_and_overwritten_while_it_is_written_has_no_slot():
    """The page is summed where it lies: the sum and what the disk got may be of different entries."""
    columns = Columns("page_columns", 4, 4)
    on_disk = PageSlots(columns)
    pages, fills = np.arange(3, dtype=np.int32), np.array([32, 32, 20], np.int8)
    generations = on_disk.begin_write(pages, fills)
    columns["num_written"][1] = 30  # as the core does it
    columns["num_written"][2] = 10  # of a tail a copy was written: its first entries are right
    slots, checks = np.array([5, 6, 7], np.int32), np.zeros(3, np.uint64)
    assert on_disk.end_write(pages, generations, fills, slots, checks).tolist() == [True, False, True]
    assert on_disk.kept[:3].tolist() == [32, 0, 10]
