"""Lives of a house on a recording disk, and what is said of each state that a power cut may leave of it."""

import errno
import os
import pickle
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

import trio

from kvfs.names.content import KvFile
from tests.disk.powercut import State
from tests.disk.recorder import Disk
from tests.kvfs.durable.house import House, running
from tests.kvfs.durable.model import Model
from tests.kvfs.durable.workload import STEPS, Workload

NUM_PAGES = 512
READY = "ready"
"""The mark behind which the model knows what is done; the others are its moments."""


def in_a_process(life: Callable[[], Awaitable[None]]) -> None:
    """Run it in a child, which it ends itself: `os._exit(0)`."""
    child = os.fork()
    if not child:
        try:
            trio.run(life)
        except BaseException:  # noqa: BLE001 - said here, for nobody else can
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert not status, "the process ended otherwise"


def killed_life(directory: Path, seed: int, num_steps: int, steps: dict[str, int] = STEPS) -> Model:
    """A house in a process that ends in the middle of its work; what it did."""
    end = trio.Event()

    def mark(moment: int) -> None:
        if moment == num_steps:
            end.set()

    with tempfile.TemporaryFile() as said:

        async def life() -> None:
            async with running(House(directory, num_pages=NUM_PAGES)) as house, trio.open_nursery() as nursery:
                await house.keeper.sync(house.tree.root)
                model = Model(house, mark)
                nursery.start_soon(Workload(house, model, Random(seed), steps).run, 10 * num_steps)
                await end.wait()
                pickle.dump(model, said)
                said.flush()
                os._exit(0)

        in_a_process(life)
        said.seek(0)
        model: Model = pickle.load(said)
    return model


def recorded_life(
    directory: Path,
    disk: Disk,
    seed: int,
    num_steps: int,
    before: Model | None = None,
    *,
    has_faults: bool = False,
    steps: dict[str, int] = STEPS,
) -> Model:
    """A house in a directory of the disk, which is told of all that the model knows; `before` judges how it begins.

    Cuts of an odd seed take few operations, so that nearly every sync depends on more.

    `has_faults`: the disk fails now and then. When it is well again, every KV file can be synced.
    """

    async def work() -> Model:
        async with running(House(directory, num_pages=NUM_PAGES, a_cut=(2, 3) if seed % 2 else ())) as house:
            if before is not None:
                await before.judge(house)
            else:
                await house.keeper.sync(house.tree.root)
            disk.mark(READY)
            model = Model(house, lambda moment: disk.mark(str(moment)), has_bytes=before is None)
            workload = Workload(house, model, Random(seed), steps)
            async with trio.open_nursery() as nursery:
                if has_faults:
                    nursery.start_soon(partial(_fail_sometimes, disk, model, Random(seed), is_sliced=bool(seed % 2)))
                await workload.run(num_steps)
                nursery.cancel_scope.cancel()
            disk.heal()
            assert has_faults or not workload.num_failed
            for inode in house.tree:
                if isinstance(inode.content, KvFile):
                    with model.syncing(inode.number):
                        await house.keeper.sync(inode)
            return model

    return trio.run(work)


async def _fail_sometimes(disk: Disk, model: Model, random: Random, *, is_sliced: bool) -> None:
    code = random.choice((errno.EIO, errno.ENOSPC))
    while True:
        await trio.sleep(random.random() * 0.03)
        if code == errno.ENOSPC or is_sliced:
            model.note_full_disk()  # what can't be written is overtaken
        operation = random.choice(("any", "write", "fsync", "fsync", "allocate", "punch", "create", "unlink"))
        disk.fail(operation, after=random.randrange(6), times=random.choice((1, 2, 5, None)), errno=code)
        await trio.sleep(random.random() * 0.02)
        disk.heal()


def judge(model: Model, state: State, directory: Path) -> None:
    """Start on what a power cut left in a directory: AssertionError or SymError, if that was not promised."""
    now = max([int(mark) for mark in state.marks if mark.isdigit()], default=0)

    trio.run(judge_now, model, directory, now)


async def judge_now(model: Model, directory: Path, now: int | None = None) -> None:
    """Start on what is in a directory."""
    async with running(House(directory, num_pages=NUM_PAGES)) as house:
        await model.judge(house, now)
