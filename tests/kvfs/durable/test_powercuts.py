"""Whenever the power goes, what comes back is a state that was promised."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from libsym.errors import SymError
from tests.disk import recorder
from tests.disk.powercut import State, materialize, states
from tests.disk.recorder import Disk
from tests.kvfs.durable.damage import sql
from tests.kvfs.durable.house import ROOT, House, running
from tests.kvfs.durable.powercuts import READY, in_a_process, judge, judge_now, killed_life, recorded_life
from tests.kvfs.durable.workload import PlainWorkload

pytestmark = pytest.mark.skipif(bool(recorder.available()), reason=recorder.available())


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(prefix="powercuts-", dir=memory if memory.is_dir() else tmp_path)
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_power_cut_leaves_was_promised(seed: int, fast: Path) -> None:
    with Disk(fast) as disk:
        model = recorded_life(disk.path / "state", disk, seed, 150)
        log = disk.log()
    for state in states(log, seed, 20, after=READY):
        materialize(state, fast / "after")
        judge(model, state, fast / "after" / "state")


@pytest.mark.parametrize("seed", range(4))
def test_what_a_power_cut_leaves_of_a_disk_that_failed_now_and_then_was_promised(seed: int, fast: Path) -> None:
    with Disk(fast) as disk:
        model = recorded_life(disk.path / "state", disk, seed, 120, has_faults=True)
        log = disk.log()
    for state in states(log, seed, 15, after=READY):
        materialize(state, fast / "after")
        judge(model, state, fast / "after" / "state")


@pytest.mark.parametrize("seed", range(4))
def test_what_a_killed_daemon_left_stays_after_a_power_cut(seed: int, fast: Path) -> None:
    with Disk(fast) as disk:
        before = killed_life(disk.path / "state", seed, 80)
        model = recorded_life(disk.path / "state", disk, seed + 100, 30, before)
        log = disk.log()
    for state in states(log, seed, 10, after=READY):
        materialize(state, fast / "after")
        judge(model, state, fast / "after" / "state")


@pytest.mark.parametrize("has_faults", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_power_cut_leaves_a_plain_file_with_a_checksum_of_other_bytes(
    seed: int, has_faults: bool, fast: Path
) -> None:
    num_sums = 0
    with Disk(fast) as disk:
        model = recorded_life(disk.path / "state", disk, seed, 200, has_faults=has_faults, kind=PlainWorkload)
        log = disk.log()
    for state in states(log, seed, 20, after=READY):
        materialize(state, fast / "after")
        judge(model, state, fast / "after" / "state")
        num_sums += len(sql(fast / "after/state", "SELECT number FROM sums"))
    assert num_sums, "there was nothing to judge"


def test_no_kill_leaves_a_plain_file_with_a_checksum_of_other_bytes(fast: Path) -> None:
    num_sums = 0
    for seed in range(3):
        directory = fast / f"state{seed}"
        before = killed_life(directory, seed, 150, PlainWorkload)
        num_sums += len(sql(directory, "SELECT number FROM sums"))
        trio.run(judge_now, before, directory)
    assert num_sums, "there was nothing to judge"


def test_what_was_written_before_a_daemon_was_killed_is_on_disk_when_the_next_one_shows_it(fast: Path) -> None:
    """The first daemon is killed after its commit reached the index's log and before that log was synced."""
    with Disk(fast) as disk:
        directory = disk.path / "state"

        async def first() -> None:
            async with running(House(directory)) as house:
                house.create("a.kv", range(40))
                disk.fail("fsync", "index.db-wal")
                with pytest.raises(SymError):
                    await house.sync("a.kv")
                os._exit(0)

        in_a_process(first)

        async def second() -> None:
            async with running(House(directory)) as house:
                assert house.names() == ["/a.kv"]
                await house.sync("a.kv")
                disk.mark("synced")

        trio.run(second)
        log = disk.log()
    materialize(State(log, log.place_of("synced"), 0, "none"), fast / "after")
    house = House(fast / "after/state")
    assert house.fs.kv_stat(ROOT, "a.kv").tokens == 40
    house.keeper.close()


def test_bytes_of_a_plain_file_that_a_killed_daemon_left_are_synced_by_the_next_one(fast: Path) -> None:
    with Disk(fast) as disk:
        directory = disk.path / "state"

        async def first() -> None:
            async with running(House(directory)) as house:
                inode = house.volume.make_plain(house.tree.root, b"a.txt", 0o600, 0, 0)
                house.write(inode, b"before")
                await house.sync("a.txt")
                async with house.changing(inode, 0, 6):
                    house.write(inode, b"behind")
                os._exit(0)

        in_a_process(first)

        async def second() -> None:
            async with running(House(directory)) as house:
                assert house.read(house.fs.find(ROOT, "a.txt")) == b"behind"
                await house.sync("a.txt")
                disk.mark("synced")

        trio.run(second)
        log = disk.log()
    materialize(State(log, log.place_of("synced"), 0, "none"), fast / "after")
    house = House(fast / "after/state")
    assert house.read(house.fs.find(ROOT, "a.txt")) == b"behind"
    house.keeper.close()


def test_what_was_written_while_a_sync_was_about_to_fail_is_written_once_more(fast: Path) -> None:
    """No later sync covers it."""
    with Disk(fast) as disk:

        async def work() -> None:
            async with running(House(disk.path / "state")) as house, trio.open_nursery() as nursery:
                one, two = house.create("one.kv", range(40)), house.create("two.kv", range(100, 140))
                file = house.keeper.pages_out.file
                sync, is_reached, go_on = file.sync, trio.Event(), threading.Event()

                def sync_late() -> None:
                    trio.from_thread.run_sync(is_reached.set)
                    go_on.wait()
                    sync()

                async def sync_one() -> None:
                    with pytest.raises(SymError):
                        await house.keeper.sync(one.inode)

                file.sync = sync_late  # type: ignore[method-assign]
                disk.fail("fsync", "1.kv")
                nursery.start_soon(sync_one)
                await is_reached.wait()
                try:
                    await house.keeper.pages_out.write(two.content, 40)
                finally:
                    go_on.set()
                    file.sync = sync  # type: ignore[method-assign]
                await house.keeper.sync(two.inode)
                disk.mark("synced")

        trio.run(work)
        log = disk.log()
    materialize(State(log, log.place_of("synced"), 0, "none"), fast / "after")

    async def after() -> None:
        async with running(House(fast / "after/state")) as house:
            file = await house.open("two.kv")
            assert house.tokens(file) == list(range(100, 140))
            assert house.is_right(file)

    trio.run(after)
