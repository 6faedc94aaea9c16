"""Whenever the power goes, what comes back is a state that was promised."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from libsym.errors import SymError
from tests.disk import recorder
from tests.disk.powercut import State, materialize, states
from tests.disk.recorder import Disk
from tests.kvfs.durable.damage import sql
from tests.kvfs.durable.house import ROOT, House, held, running
from tests.kvfs.durable.model import Model
from tests.kvfs.durable.powercuts import NUM_PAGES, READY, in_a_process, judge, killed_life, recorded_life
from tests.kvfs.durable.workload import STEPS_ON_PLAIN, Workload

pytestmark = pytest.mark.skipif(bool(recorder.available()), reason=recorder.available())


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(prefix="powercuts-", dir=memory if memory.is_dir() else tmp_path)
    yield Path(directory)
    shutil.rmtree(directory)


LIVES: dict[str, tuple[int, dict[str, Any]]] = {
    "a sound disk": (2, {"num_steps": 150}),
    "a disk that fails now and then": (2, {"num_steps": 120, "has_faults": True}),
    "a daemon was killed before": (2, {"num_steps": 30}),
    "plain files": (2, {"num_steps": 200, "steps": STEPS_ON_PLAIN}),
    "plain files on a disk that fails": (2, {"num_steps": 200, "steps": STEPS_ON_PLAIN, "has_faults": True}),
}
"""Lives on a disk that is recorded, each with a number of seeds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("life", "seed"), [(life, seed) for life, (num_seeds, _) in LIVES.items() for seed in range(num_seeds)]
)
def test_what_a_power_cut_leaves_was_promised(life, seed, fast):
    """Checksums of plain files, too, are of the bytes that are there."""
    _, how = LIVES[life]
    with Disk(fast) as disk:
        before = killed_life(disk.path / "state", seed, 80) if "killed" in life else None
        model = recorded_life(disk.path / "state", disk, seed + 100 * bool(before), before=before, **how)
        log = disk.log()
    num_sums = 0
    for state in states(log, seed, 15, after=READY):
        materialize(state, fast / "after")
        judge(model, state, fast / "after" / "state")
        num_sums += len(sql(fast / "after/state", "SELECT number FROM sums"))
    assert num_sums or "steps" not in how, "there was nothing to judge"


def charges(house: House) -> dict[str, tuple[int, int]]:
    """All but pages: files that share a page in memory may have a slot each."""
    found = {each.describe(): (each.num_files, each.other_bytes) for each in house.fs.pool.accounts}
    return {name: held for name, held in found.items() if any(held)}


@pytest.mark.slow
@pytest.mark.parametrize("is_synced", [True, False])
@pytest.mark.parametrize("seed", range(8))
async def test_what_a_daemon_leaves_that_ends_was_promised_and_who_synced_is_charged_as_before(seed, is_synced, fast):
    cuts, ends_at = (2, 3) if seed % 2 else (), sys.maxsize if is_synced else Random(seed).randrange(100, 300)
    async with running(House(fast, num_pages=NUM_PAGES, a_cut=cuts)) as house:
        await house.keeper.sync(house.tree.root)
        with trio.CancelScope() as scope:
            model = Model(house, lambda moment: scope.cancel() if moment == ends_at else None)
            await Workload(house, model, Random(seed)).run(150)
        if is_synced:
            with model.syncing():
                await house.keeper.sync_all()
        before = charges(house)
    async with running(House(fast, num_pages=NUM_PAGES)) as house:
        await model.judge(house)
        assert not is_synced or charges(house) == before


def after_a_cut(disk: Disk, directory: Path) -> House:
    """A house on what the disk has when the power goes behind the mark `synced`, and keeps no more than it must."""
    log = disk.log()
    materialize(State(log, log.place_of("synced"), 0, "none"), directory)
    return House(directory / "state")


@pytest.mark.slow
def test_what_was_written_before_a_daemon_was_killed_is_on_disk_when_the_next_one_shows_it(fast):
    """The first daemon is killed after its commit reached the index's log and before that log was synced."""
    with Disk(fast) as disk:

        async def first() -> None:
            async with running(House(disk.path / "state")) as house:
                house.create("a.kv", range(40))
                disk.fail("fsync", "index.db-wal")
                with pytest.raises(SymError):
                    await house.sync("a.kv")
                os._exit(0)

        async def second() -> None:
            async with running(House(disk.path / "state")) as house:
                assert house.names() == ["/a.kv"]
                await house.sync("a.kv")
                disk.mark("synced")

        in_a_process(first)
        trio.run(second)
        house = after_a_cut(disk, fast / "after")
    assert house.fs.kv_stat(ROOT, "a.kv").tokens == 40
    house.keeper.close()


async def test_what_was_written_while_a_sync_was_about_to_fail_is_written_once_more(fast, monkeypatch):
    """No later sync covers it."""
    with Disk(fast) as disk:
        async with running(House(disk.path / "state")) as house, trio.open_nursery() as nursery:
            one, two = house.create("one.kv", range(40)), house.create("two.kv", range(100, 140))

            async def sync_one() -> None:
                with pytest.raises(SymError):
                    await house.keeper.sync(one.inode)

            with held(monkeypatch, house.keeper.pages_out.file, "sync") as may_go_on:
                disk.fail("fsync", "1.kv")
                nursery.start_soon(sync_one)
                await trio.to_thread.run_sync(may_go_on.reached.wait)
                await house.keeper.pages_out.write(two.content, 40)
            await house.keeper.sync(two.inode)
            disk.mark("synced")
        async with running(after_a_cut(disk, fast / "after")) as house:
            await house.require("two.kv", range(100, 140))
