"""Random work on a house that is synced in part, crashes and starts again: the model says what may come back."""

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from trio.testing import wait_all_tasks_blocked

from kvfs.names.content import KvFile
from tests.kvfs.durable.house import House
from tests.kvfs.durable.model import Model
from tests.kvfs.durable.workload import STEPS, Workload

NUM_PAGES = 256
SEEDS = st.integers(0, 10**6)


class Restarts(RuleBasedStateMachine):
    """The storage works only while a step waits for it, so that the same steps do the same."""

    a_cut: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="restarts-", dir=memory if memory.is_dir() else None))
        self.begin()
        self.wait_for(lambda: self.house.keeper.sync(self.house.tree.root))
        self.note_all()

    def begin(self) -> None:
        self.house = House(self.directory, num_pages=NUM_PAGES, a_cut=self.a_cut)

    def note_all(self) -> None:
        self.model = Model(self.house)
        self.work = Workload(self.house, self.model, Random(0))

    def wait_for(self, work: Callable[[], Awaitable[object]]) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.house.keeper.run)
                with trio.fail_after(60):
                    await work()
                    await wait_all_tasks_blocked()  # a job that is due soon is under way then
                    while self.house.keeper.jobs.num_under_way:
                        await self.house.keeper.jobs.idle()
                        await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

        trio.run(main)

    def teardown(self) -> None:
        try:
            self.restart()
        finally:
            self.house.keeper.close()
            shutil.rmtree(self.directory)

    @invariant()
    def balances(self) -> None:
        self.house.fs.check()

    @rule(name=st.sampled_from([name for name, weight in STEPS.items() for _ in range(weight)]), seed=SEEDS)
    def step(self, name: str, seed: int) -> None:
        self.work.random = Random(seed)

        async def take() -> None:
            async with trio.open_nursery() as nursery:
                await self.work.step(name, nursery)

        self.wait_for(take)

    @rule(seed=SEEDS)
    def write_pages(self, seed: int) -> None:
        """Entries are on their way, and nobody has asked for a commit yet."""
        contents = [inode.content for inode in self.house.tree if isinstance(inode.content, KvFile) and inode.names]
        if contents:
            content = contents[seed % len(contents)]
            self.wait_for(lambda: self.house.keeper.pages_out.write(content, content.table.length))

    @rule(others=st.integers(0, 3))
    def commit(self, others: int) -> None:
        """Commit all changes that can be, and of some other inodes the part that is on disk."""
        self.wait_for(lambda: self.house.keeper._commit(lambda: 0, others=others))

    @rule()
    def crash(self) -> None:
        self.house.keeper.close()
        self.begin()
        self.wait_for(lambda: self.model.judge(self.house))
        self.note_all()

    @rule()
    def restart(self) -> None:
        """An orderly end loses nothing, and everybody is charged as before for names and attributes."""
        for handle in self.work.handles:
            self.house.fs.kv_close(handle)
        self.model.note(self.house)
        self.wait_for(self.house.keeper.sync_all)
        before = self.sizes(), self.charges()
        self.crash()
        assert (self.sizes(), self.charges()) == before

    def sizes(self) -> dict[tuple[int, bytes], int]:
        tree, size_of = self.house.tree, self.house.volume.size_of
        return {(each.number, name): size_of(inode) for each in tree for name, inode in each.entries.items()}

    def charges(self) -> dict[str, tuple[int, int]]:
        """All but pages: files that share a page in memory may have a slot each."""
        found = {each.describe(): (each.num_files, each.other_bytes) for each in self.house.fs.pool.accounts}
        return {name: held for name, held in found.items() if any(held)}


class SlicedRestarts(Restarts):
    """Cuts take few operations at a time, so that nearly every sync depends on more."""

    a_cut = (2, 3)


def cases(machine: type[Restarts], max_examples: int, step_count: int) -> type:
    case: type = machine.TestCase
    how = settings(
        max_examples=max_examples, stateful_step_count=step_count, deadline=None, database=None, derandomize=True
    )
    return type(case.__name__, (case,), {"settings": how})


TestRestarts = pytest.mark.slow(cases(Restarts, 15, 40))
TestSlicedRestarts = pytest.mark.slow(cases(SlicedRestarts, 15, 40))
