"""Every slot that a file needs is read while the daemon serves; damage is told by file, and mended where it can be."""

import logging
import time
from typing import Any, cast

import pytest
import trio

from kvfs.durable.fsck import fsck
from kvfs.durable.scrub import ScrubReport, scrub
from kvfs.pages.frames import NOWHERE
from kvfs.pages.table import Reservation
from libsym.errors import SymError
from tests.kvfs.durable.damage import SHARED, TOKENS, copy_of, flip, own_slots, slot_at
from tests.kvfs.durable.house import ROOT, House, held, is_clean, running


async def scrubbed(house: House, **how: Any) -> ScrubReport:
    return await scrub(house.volume, house.keeper, **how)


async def test_a_sound_state_is_read_whole_each_page_once_although_files_share_it(state):
    async with running(House(state)) as house:
        told = list[tuple[int, int]]()
        found = await scrubbed(house, progress=lambda done, total: told.append((done, total)))
        assert found.findings == ()
        assert found.num_pages == 2 + 10 + 3 + 1 + 1
        assert found.num_bytes == found.num_pages * house.store.page_bytes
        assert told[-1] == (found.num_bytes, found.num_bytes)


async def test_damage_is_told_with_every_file_that_it_touches_and_changes_nothing(state, caplog):
    flip(own_slots(state), slot_at(5) + 1)
    flip(state / "slots/1.kv", slot_at(1) + 1)
    async with running(House(state)) as house:
        found = await scrubbed(house)
        assert {path for finding in found.findings for path in finding.paths} == {*SHARED, "/other.kv"}
        assert "it keeps 160 of 300 entries" in {finding.repair for finding in found.findings}
        assert house.fs.kv_stat(ROOT, "a.kv").tokens == 300
    assert all(path in caplog.text for path in (*SHARED, "/other.kv"))


async def test_a_repair_cuts_files_before_what_is_on_disk_alone_and_damaged(state):
    flip(own_slots(state), slot_at(5) + 1)
    async with running(House(state)) as house:
        found = await scrubbed(house, repair=True)
        assert len(found.findings) == 2
        left = [(each.kind, each.paths, each.is_damage) for each in (await scrubbed(house)).findings]
        assert left == [("lost", (path,), False) for path in SHARED]
        for path in SHARED:
            await house.require(path[1:], TOKENS[path][:160])
            assert house.fs.kv_stat(ROOT, path[1:]).lost_tokens == len(TOKENS[path]) - 160
    assert is_clean(fsck(state))


async def test_a_repair_writes_anew_what_is_in_memory(state):
    async with running(House(state)) as house:
        files = [await house.open(path[1:]) for path in SHARED]
        flip(own_slots(state), slot_at(5) + 1)
        found = await scrubbed(house, repair=True)
        assert {finding.repair for finding in found.findings} == {"it is written anew, from memory"}
        assert (await scrubbed(house)).findings == ()
        assert all(house.is_right(file) for file in files)
        copy_of(state, state.parent / "killed")
    assert is_clean(fsck(state.parent / "killed"))
    async with running(House(state.parent / "killed")) as house:
        for path in SHARED:
            await house.require(path[1:], TOKENS[path])


async def test_a_page_that_is_damaged_on_disk_stays_in_memory_until_it_is_mended(state):
    """Memory is short meanwhile: what is on disk as it is loses its frame."""
    async with running(House(state)) as house:
        files = [await house.open(path[1:]) for path in SHARED]
        flip(own_slots(state), slot_at(5) + 1)
        pool, pages = house.fs.pool, files[0].table.pages

        def others_need_room(done: int, total: int) -> None:
            here = pages[pool.store.of[pages] != NOWHERE]
            if done == total:  # all that is damaged is known
                pool.drop_frames(here[pool.pins[here] == 0])

        found = await scrubbed(house, repair=True, progress=others_need_room)
        assert (pool.store.of[pages] == NOWHERE).any()
        assert {finding.repair for finding in found.findings} == {"it is written anew, from memory"}
        assert not pool.num_pinned
        assert (await scrubbed(house)).findings == ()
        for path in SHARED:
            assert house.is_right(await house.open(path[1:]))


async def test_a_file_that_somebody_appends_to_is_left_as_it_is(state):
    flip(own_slots(state), slot_at(5) + 1)
    async with running(House(state)) as house:
        # Its pages are not in memory, so no step could; but the rule has to hold by itself.
        table = house.kv("a.kv").table
        table.reservation = cast(Reservation, object())
        found = await scrubbed(house, repair=True)
        table.reservation = None
        told = {finding.paths[0]: finding.repair for finding in found.findings}
        assert told["/a.kv"].startswith("not possible now")
        assert told["/dir/fork.kv"] == "it keeps 160 of 302 entries"
        assert house.fs.kv_stat(ROOT, "a.kv").tokens == 300


@pytest.mark.slow
async def test_files_come_and_go_meanwhile(tmp_path, caplog):
    """A slot that was freed, and is a hole by now, or another page's, is nobody's damage."""
    async with running(House(tmp_path, num_pages=600)) as house:
        for number in range(40):
            house.create(f"{number}.kv", range(number, number + 300))
        await house.keeper.sync_all()
        async with trio.open_nursery() as nursery:

            async def churn() -> None:
                for number in range(40):
                    house.fs.kv_remove(ROOT, f"{number}.kv")
                    house.create(f"new-{number}.kv", range(number, number + 100))
                    await house.sync(f"new-{number}.kv")

            nursery.start_soon(churn)
            for _ in range(5):
                assert (await scrubbed(house, rate=8 << 20)).findings == ()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
async def test_a_rate_is_kept(state):
    async with running(House(state)) as house:
        began_s = time.monotonic()
        found = await scrubbed(house, rate=256 << 10)
        assert time.monotonic() - began_s >= found.num_bytes / (256 << 10)


@pytest.mark.slow
async def test_the_thread_is_never_held_for_long(tmp_path):
    async with running(House(tmp_path, num_pages=500)) as house:
        for number in range(400):
            house.create(f"{number}.kv", [number])
        await house.keeper.sync_all()
        is_over = trio.Event()
        longest_s = 0.0

        async def measure() -> None:
            nonlocal longest_s
            while not is_over.is_set():
                now_s = time.thread_time()
                await trio.lowlevel.checkpoint()
                longest_s = max(longest_s, time.thread_time() - now_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure)
            assert (await scrubbed(house)).num_pages == 400
            is_over.set()
        assert longest_s < 0.005, "a millisecond, on a machine that does nothing else"


async def test_a_disk_that_does_not_answer_ends_it(state, monkeypatch):
    async with running(House(state, deadline_s=0.05)) as house:
        with held(monkeypatch, house.keeper.pages_in._own, "verify"), pytest.raises(SymError, match="has not answered"):
            await scrubbed(house)
