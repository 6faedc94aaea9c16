"""Readers, imports and assemblies while pages go to disk and come back by the real pager."""

from collections.abc import Sequence

import numpy as np
import pytest
import trio

from kvfs.fs import OpenKv
from kvfs.images.header import parse_header
from kvfs.names.inode import Inode
from kvfs.pages.assemble import Assembly
from kvfs.pages.frames import NOWHERE
from libsym.abi import PAGE_ENTRIES as PAGE
from libsym.errors import NoSpace
from tests.kvfs.durable.house import ROOT, House, plain_of, running
from tests.kvfs.durable.test_tiers import small


async def a_file(house: House, name: str, num_pages: int, first: int = 0) -> OpenKv:
    file = house.create(name)
    await house.compute(file, [(first + each) % 900 for each in range(num_pages * PAGE)])
    return file


def places(house: House, *files: OpenKv) -> list[bool]:
    """Return which of the pages of these files are in memory."""
    return [bool(each) for file in files for each in house.fs.pool.store.of[file.table.pages] != NOWHERE]


async def imported(house: House, inode: Inode) -> None:
    """Import an image, as a close on the mount does."""
    content = plain_of(inode)
    plan = parse_header(house.volume.image_format, content)
    frames = await house.volume.room_for_import(plan, inode)
    incoming = house.volume.begin_import(plan, inode, frames=frames)
    try:
        await trio.to_thread.run_sync(incoming.load, content, trio.from_thread.check_cancelled)
    except BaseException:
        house.volume.abandon_import(incoming, inode)
        raise
    house.volume.finish_import(incoming, inode)


def extract(house: House, source: OpenKv, ranges: Sequence[tuple[int, int]], path: str) -> Assembly:
    return house.fs.begin_extract(ROOT, source, np.array(ranges), path, 0o600, rebase=True)


async def test_an_import_waits_until_others_have_made_room(tmp_path):
    async with small(tmp_path) as house:
        source = await a_file(house, "source.kv", 10)
        data = await house.image(source.content)
        house.fs.kv_remove(ROOT, "source.kv")
        house.fs.kv_close(source)
        inode = house.make_plain("copy.kv", data)
        others = [await a_file(house, f"{number}.kv", 7, number) for number in range(2)]
        assert house.fs.pool.num_free_frames < 10
        await imported(house, inode)
        assert not all(places(house, *others))
        await house.require("copy.kv", [each % 900 for each in range(10 * PAGE)])


async def test_an_import_larger_than_memory_is_refused_and_takes_nothing(tmp_path):
    async with running(House(tmp_path / "large", num_pages=32)) as house:
        data = await house.image((await a_file(house, "source.kv", 20)).content)
    async with small(tmp_path / "small") as house:
        other = await a_file(house, "other.kv", 10)
        with pytest.raises(NoSpace, match="20 pages are needed in memory at once, and there is room for 16"):
            await imported(house, house.make_plain("copy.kv", data))
        assert places(house, other) == [True] * 10


async def test_an_import_that_is_given_up_while_it_waits_leaves_nothing(tmp_path):
    async with small(tmp_path) as house:
        source = await a_file(house, "source.kv", 10)
        inode = house.make_plain("copy.kv", await house.image(source.content))
        async with house.volume.pager.hold([source.table]):  # nothing of it may go
            with trio.move_on_after(0.2) as waited:
                await imported(house, inode)
            assert waited.cancelled_caught
            assert house.fs.pool.core.num_coming == 0
        await imported(house, inode)
        assert house.is_right(await house.open("copy.kv"))


async def test_an_extract_brings_what_it_reads_and_nothing_else(tmp_path):
    async with small(tmp_path) as house:
        source = await a_file(house, "source.kv", 10)
        await house.volume.pager.put_on_disk(source.table)
        made = await house.assemble(extract(house, source, [(0, 3 * PAGE), (7 * PAGE + 5, 8 * PAGE)], "x.kv"), "x.kv")
        assert places(house, source) == [number == 7 for number in range(10)]
        assert places(house, made) == [False] * 3 + [True]
        assert house.tokens(made) == [*range(3 * PAGE), *range(7 * PAGE + 5, 8 * PAGE)]
        await house.volume.pager.put_in_memory(made.table)
        frames = house.fs.pool.store.frames_of(made.table.pages)
        values, moved = house.decoder.moved_entries(frames, made.table.length)
        await house.volume.pager.put_in_memory(source.table)
        whole = house.decoder.entries(house.fs.pool.store.frames_of(source.table.pages), 10 * PAGE)
        assert values.tolist() == [*whole[: 3 * PAGE], *whole[7 * PAGE + 5 : 8 * PAGE]]
        assert moved.tolist() == [0] * 3 * PAGE + [3 * PAGE - 7 * PAGE - 5] * (PAGE - 5)


async def test_a_file_that_is_synced_while_it_goes_down_is_written_once(tmp_path):
    """Whichever of the two comes to a page first."""
    async with running(House(tmp_path, num_pages=120, num_on_disk=1000)) as house:
        pager = house.volume.pager
        for number in range(4):
            file = await a_file(house, f"{number}.kv", 100, number)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(house.sync, f"{number}.kv")
                nursery.start_soon(pager.put_on_disk, file.table)
            assert not house.fs.pool.num_pinned
            assert places(house, file) == [False] * 100
            assert sum(slots.num_used for slots in house.keeper.slots.values()) == 100 * (number + 1)
            await pager.put_in_memory(file.table)
            assert house.is_right(file)
            await pager.put_on_disk(file.table)


async def test_a_file_that_no_call_has_used_goes_down_by_advice_and_not_before_those_that_rest(tmp_path):
    """An import, or a file that was put together, was used just then."""
    async with small(tmp_path) as house:
        gone = await a_file(house, "gone.kv", 4, 500)
        inode = house.make_plain("imported.kv", await house.image(gone.content))
        house.fs.kv_remove(ROOT, "gone.kv")
        house.fs.kv_close(gone)
        source = await a_file(house, "source.kv", 4)
        await imported(house, inode)
        made = await house.assemble(extract(house, source, [(1, 4 * PAGE)], "made.kv"), "made.kv")
        copy = house.fs.kv_open(ROOT, "imported.kv", write=False)
        await a_file(house, "other.kv", 5)
        assert not all(places(house, source))
        assert places(house, copy, made) == [True] * 8
        for file in (copy, made):
            house.volume.pager.demote(file.table)
        await house.keeper.sync_all()
        for file in (copy, made):
            await house.volume.pager.put_on_disk(file.table)
            house.fs.kv_close(file)


async def test_advice_takes_a_file_out_of_memory_that_was_brought_and_not_used(tmp_path):
    async with small(tmp_path) as house:
        source = await a_file(house, "source.kv", 4)
        made = await house.assemble(extract(house, source, [(1, 4 * PAGE)], "made.kv"), "made.kv")
        await house.sync("made.kv")
        house.volume.pager.demote(made.table)
        assert places(house, made) == [False] * 4
