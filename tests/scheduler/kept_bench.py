"""The scheduler over a memory that is too small for its files; the rest of them is on disk."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from decoder.cpu.arena import Arena
from decoder.image_facts import Facts
from decoder.model import load_model
from kvfs.durable.journal import Journal
from kvfs.durable.keeper import Keeper
from kvfs.durable.state import State
from kvfs.fs import FileSystem
from kvfs.pages.pool import PagePool
from scheduler.batch.policy import StepLimits
from tests.scheduler.bench import LIMITS, Bench

NUM_ON_DISK = 1000


class KeptBench(Bench):
    """`num_pages` fit into memory."""

    def __init__(
        self, directory: Path, *, num_pages: int, num_on_disk: int = NUM_ON_DISK, limits: StepLimits = LIMITS
    ) -> None:
        self.model = load_model("tiny")
        self.arena = Arena(self.model.config, num_pages)
        facts, journal = Facts(self.model, self.arena, "float32"), Journal(lambda: self.tree)
        self.state = State(directory / "state")
        kept = self.state.load()
        pool = PagePool(self.arena, num_on_disk=num_on_disk, slot_files=lambda: self.keeper)
        self.fs = FileSystem(
            pool, facts, self.state.files, 0, 0, changes=journal, bits="bench", engine=lambda: self.batches
        )
        self.tree = self.fs.volume.tree
        self.pager = self.fs.volume.pager
        self.keeper = Keeper(self.state, kept, self.fs.volume, journal)
        self._limits = limits

    def run_test(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run `scenario` beside the scheduler and the storage, then check the books."""

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.keeper.run)
                nursery.start_soon(self.batches.run)
                with trio.fail_after(30):
                    await scenario()
                self.fs.check()
                nursery.cancel_scope.cancel()
            await self.keeper.jobs.are_over()
            self.keeper.close()

        trio.run(main)
