"""A disk that fails, is full or hangs, at every place where it is written to: whoever waits is told, all else goes on.

The same small piece of work is done again and again on a new disk, and each time another of its operations fails.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from libsym.errors import SymError
from tests.disk.recorder import Disk, available
from tests.kvfs.durable.house import ROOT, House, failing, running

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

FIRST, SECOND, BYTES = list(range(1, 50)), list(range(100, 110)), b"bytes of a plain file"


class Work:
    """Operations on a house, and what was promised meanwhile."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.errors: list[SymError] = []
        self.promised: set[str] = set()

    async def do(self) -> None:
        house = self.house
        file = house.create("a.kv", FIRST)
        await self._sync("a.kv", lambda: house.keeper.sync(file.inode))
        house.fs.kv_fork(ROOT, file, "fork.kv")
        house.append(file, SECOND)
        plain = house.make_plain("plain")
        try:
            await trio.to_thread.run_sync(house.write, plain, BYTES, abandon_on_cancel=True)
        except SymError as error:
            self.errors.append(error)
        else:
            await self._sync("plain", lambda: house.keeper.sync(plain))
        house.create("gone.kv", FIRST)
        await self._sync("all", house.keeper.sync_all)
        house.fs.kv_remove(ROOT, "gone.kv")
        house.fs.kv_rename(ROOT, "fork.kv", "moved.kv")
        await self._sync("moved", house.keeper.sync_all)

    async def _sync(self, promise: str, sync: Callable) -> None:
        try:
            await sync()
        except SymError as error:
            self.errors.append(error)
        else:
            self.promised.add(promise)

    async def nothing_else_is_harmed(self) -> None:
        """The files that are in memory can be read and appended to."""
        house = self.house
        for name in ("a.kv", "moved.kv"):
            file = await house.open(name, write=True)
            assert house.tokens(file)[: len(FIRST)] == FIRST
            assert house.is_right(file)
            house.fs.kv_close(file)


async def what_was_promised_is_there(house: House, promised: set[str]) -> None:
    names = {*house.names()} - {"/kept.kv"}
    if promised:
        last = await house.open("a.kv")
        assert house.tokens(last)[: len(FIRST)] == FIRST
        assert house.is_right(last)
    if "plain" in promised:
        assert await trio.to_thread.run_sync(house.read, house.fs.find(ROOT, "plain")) == BYTES
    if {"all", "moved"} & promised:
        assert house.tokens(await house.open("a.kv")) == FIRST + SECOND
        (fork,) = names & {"/fork.kv", "/moved.kv"}
        assert house.tokens(await house.open(fork.removeprefix("/"))) == FIRST
    if "moved" in promised:
        assert names == {"/a.kv", "/moved.kv", "/plain"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path) as disk:
        yield disk


async def work_with(disk: Disk, directory: Path, operation: str, *, heals: bool, **how: Any) -> tuple[Work, int]:
    """Return the work on a disk that goes wrong, and how many disk operations there were from then on."""
    async with running(House(directory, num_pages=16)) as house:
        work, before = Work(house), disk.count("any")
        disk.fail(operation, **how)
        await work.do()
        num_operations = disk.count("any") - before
        disk.heal()
        await work.nothing_else_is_harmed()
        if heals:  # bytes that a failed sync may have lost are written anew by who has them
            plain = house.fs.find(ROOT, "plain")
            async with house.changing(plain, 0, len(BYTES)):
                await trio.to_thread.run_sync(house.write, plain, BYTES)
            await house.keeper.sync_all()
            work.promised |= {"a.kv", "all", "moved"}
    return work, num_operations


WAYS = [(code, heals) for code in (errno.EIO, errno.ENOSPC) for heals in (False, True)]


@pytest.mark.slow
async def test_an_operation_that_fails_is_told_to_who_waits_and_nothing_that_was_promised_is_missing(disk):
    """Operations of the disk fail in turn, with the next error each time; the house is killed then, or after a sync."""

    place, num_operations = 0, 1
    while place < num_operations:
        code, heals = WAYS[place // 2 % len(WAYS)]
        directory = disk.path / str(place)
        work, num_operations = await work_with(disk, directory, "any", heals=heals, after=place, errno=code)
        for error in work.errors:
            assert error.errno in {code, errno.EIO}, f"operation {place}: {error}"
        async with running(House(directory, num_pages=16)) as house:
            await what_was_promised_is_there(house, work.promised)
        place += 2
    assert place > 20, "the work writes at more places than that"


@pytest.mark.parametrize("op", ["write", "fsync", "allocate", "create"])
async def test_a_disk_that_fails_for_good_fails_every_sync_and_work_goes_on_in_memory(disk, op):
    work, _ = await work_with(disk, disk.path / "state", op, heals=True, times=None)
    if op in ("write", "fsync"):
        assert work.errors
    async with running(House(disk.path / "state", num_pages=16)) as house:
        await what_was_promised_is_there(house, work.promised)


@pytest.mark.slow
async def test_a_full_disk_is_told_and_what_is_removed_makes_room_again(disk, monkeypatch):
    async with running(House(disk.path / "state", num_pages=64)) as house:
        for number in range(50):
            house.create(f"{number}.kv", [number])
        await house.keeper.sync_all()
        disk.limit(disk.used())
        for number in range(50):
            house.fs.kv_remove(ROOT, f"{number}.kv")
        await house.keeper.sync_all()  # the index has room for that: else nothing could be freed any more
    disk.limit(None)
    monkeypatch.setattr("kvfs.durable.index.LOG_BYTES", 4096)  # the index is what has no room, soon
    async with running(House(disk.path / "state", num_pages=64)) as house:
        assert house.names() == []
        house.create("a.kv", FIRST)
        await house.keeper.sync_all()
        disk.limit(disk.used() + 4 * 4096)
        for number in range(60):
            house.create(f"{number}.kv", [number])
        with failing(errno.ENOSPC):
            await house.keeper.sync_all()
        assert house.keeper.statistics().error
        assert house.volume.space_around(house.tree.root).available_bytes == 0, "as df says"
        assert house.tokens(await house.open("59.kv")) == [59]
        for number in range(50):
            house.fs.kv_remove(ROOT, f"{number}.kv")
        disk.limit(None)
        await house.keeper.sync_all()
    async with running(House(disk.path / "state", num_pages=64)) as house:
        assert house.names() == sorted(["/a.kv", *(f"/{number}.kv" for number in range(50, 60))])


@pytest.mark.slow
async def test_a_disk_that_hangs_anywhere_fails_who_waits_and_when_it_answers_all_is_well(disk):
    """The disk hangs at one operation after the other."""

    place, num_hung = 0, 1
    while num_hung:
        directory = disk.path / str(place)
        async with running(House(directory, num_pages=32)) as house:
            kept = house.create("kept.kv", FIRST)
            await house.keeper.sync(kept.inode)
            house.keeper.jobs.deadline_s = 0.1  # not before: it is not much for a disk that others use
            work = Work(house)
            disk.hang("any", after=place, times=1)
            with trio.move_on_after(1):  # a write of a plain file waits in a worker, for the mount to give it up
                await work.do()
            assert {error.errno for error in work.errors} <= {errno.ETIMEDOUT}, f"operation {place}: {work.errors}"
            house.append(kept, SECOND)
            assert house.is_right(kept)
            num_hung = disk.resume()
            house.keeper.jobs.deadline_s = 30.0
            await house.keeper.jobs.idle()
            await house.keeper.sync_all()
            names = house.names()
        async with running(House(directory, num_pages=32)) as house:
            assert house.names() == names
            await what_was_promised_is_there(house, work.promised)
            assert house.tokens(await house.open("kept.kv")) == FIRST + SECOND
        place += 2
    assert place > 20, "the work writes at more places than that"
