"""No call looks at all pages: each looks at as much in a pool of ten million as in one of ten thousand."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvfs.facts import du
from kvfs.pages.accounts import NO_LIMITS, AccountLimits
from kvfs.pages.free_list import FreeList
from libsym.abi import PAGE_ENTRIES, Advice
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from tests.scheduler.bench import ME
from tests.scheduler.kept_bench import KeptBench
from tests.work import Work, counted

SMALL = {"num_pages": 1000, "num_on_disk": 10_000}
LOOSE = ("prefill", "pred", "several", "sync", "du", "books", "victims", "advise COLD")
"""Work of others that is under way counts here as well: the bound is a thousandth of the pages."""
LARGE = {"num_pages": 1_000_000, "num_on_disk": 10_000_000}


async def branch(bench: KeptBench, work: Work, found: dict[str, int]) -> None:
    """A program forks, computes, gives advice, cuts, and closes; how much each call looks at."""
    fs, base = bench.fs, bench.fs.kv_create(ME, "base.kv", 0o600)
    with counted(work, found, "prefill"):
        await bench.submit(base, [1 + each % 200 for each in range(9 * PAGE_ENTRIES + 9)]).wait()
    with counted(work, found, "fork"):
        fork = fs.kv_fork(ME, base, "fork.kv")
    with counted(work, found, "pred"):
        await bench.submit(fork, [5]).wait()
    with counted(work, found, "several"):
        await bench.submit(fork, [6] * 5 * PAGE_ENTRIES).wait()
    with counted(work, found, "stat"):
        fs.kv_stat_open(fork)
    with counted(work, found, "victims"):
        assert bench.pager.departures.victims(np.empty(0, np.int32), 4).size == 4
    for advice in (Advice.PIN, Advice.UNPIN, Advice.WILLNEED, Advice.COLD):
        with counted(work, found, f"advise {advice.name}"):
            fs.kv_advise_open(ME, fork, [(advice, 0)])
    with counted(work, found, "sync"):
        await fs.sync(fork)
    with counted(work, found, "truncate"):
        fs.kv_truncate(fork, 3 * PAGE_ENTRIES + 5)
    with counted(work, found, "remove"):
        fs.kv_remove(ME, "fork.kv")
    with counted(work, found, "close"):
        fs.kv_close(fork)
    fs.kv_remove(ME, "base.kv")
    fs.kv_close(base)


async def figures(bench: KeptBench, work: Work, found: dict[str, int], shown: Control) -> None:
    """An operator looks at figures and books, and a directory changes hands; how much each looks at."""
    fs, accounts, file = bench.fs, bench.fs.pool.accounts, bench.fs.kv_create(ME, "a.kv", 0o600)
    await bench.submit(file, [7] * 3 * PAGE_ENTRIES).wait()
    with counted(work, found, "metrics"):
        shown.metrics()
    with counted(work, found, "statistics"):
        assert fs.statfs()
        assert bench.pager.statistics()
        assert bench.keeper.statistics()
    with counted(work, found, "space"):
        fs.volume.space_around(bench.tree.root)
    with counted(work, found, "books"):
        fs.audit()
    with counted(work, found, "du"):
        await du.total(fs.pool, bench.tree.root, "/", ME)
    domain = accounts.new_domain(accounts.of(1001), NO_LIMITS, str)
    with counted(work, found, "adoption"):
        accounts.of(1002).adopt(domain)
    domain.close()
    fs.kv_remove(ME, "a.kv")
    fs.kv_close(file)


def work_of_calls(directory: Path, monkeypatch: pytest.MonkeyPatch, capacity: dict[str, int]) -> dict[str, int]:
    """Calls look at so much, the least of some rounds, in a pool that is hardly used; the first makes rooms."""
    rounds: list[dict[str, int]] = [{} for _ in range(4)]
    bench = KeptBench(directory, num_pages=capacity["num_pages"], num_on_disk=capacity["num_on_disk"])
    shown = Control(bench.fs, bench.batches, bench.gate, bench.programs, bench.text, HeldTimes())
    for slots in bench.keeper.slots.values():
        slots._grow(capacity["num_on_disk"])
    bench.fs.pool.accounts.of(ME.uid).limits = AccountLimits(num_bytes=1 << 40)

    async def main() -> None:
        with monkeypatch.context() as patches:
            work = Work(patches)
            for found in rounds:
                num_arrays = work.watch(bench.fs, bench.keeper, bench.batches, bench.gate)
                assert num_arrays > 20 or found is not rounds[0]
                await branch(bench, work, found)
                await figures(bench, work, found, shown)
                await bench.keeper.sync_all()

    bench.run_test(main)
    return {what: min(each[what] for each in rounds[1:]) for what in rounds[0]}


@pytest.mark.slow
def test_each_call_looks_at_as_much_at_ten_thousand_pages_as_at_ten_million(tmp_path, monkeypatch):
    small = work_of_calls(tmp_path / "small", monkeypatch, SMALL)
    large = work_of_calls(tmp_path / "large", monkeypatch, LARGE)
    for what in LOOSE:
        assert large.pop(what) < 2 * small.pop(what) + SMALL["num_on_disk"], what
    assert large == small


class Pages:
    """Example of watched work: an array, and a list of free pages."""

    def __init__(self) -> None:
        self.array = np.zeros(5000, np.int32)
        self.free = FreeList(5000)


Pages.__module__ = "kvfs.pages"

WAYS: dict[str, Callable[[Pages], object]] = {
    "a function": lambda pages: np.count_nonzero(pages.array),
    "a method": lambda pages: pages.array.argmax(),
    "an operator": lambda pages: pages.array > 1,
    "a reduction": lambda pages: np.add.reduce(pages.array),
    "a slice's": lambda pages: pages.array[1000:].sum() + pages.array[:1000].max(),
    "a mask": lambda pages: pages.array[np.zeros(5000, np.bool_)],
    "a copy": lambda pages: pages.array.copy(),
    "a value for all": lambda pages: pages.array.__setitem__(slice(None), 1),
    "numbers": lambda pages: pages.array[np.arange(5000)],
    "several arrays": lambda pages: np.concatenate([np.zeros(1, np.int32), pages.array]),
    "a loop": lambda pages: sum(each > 1 for each in pages.array),
    "in place": lambda pages: pages.array.__iadd__(1),
    "a new array": lambda _pages: np.full(5000, 7),
    "memory of zeros, then all of it": lambda _pages: np.zeros(5000).any(),
    "the free pages": lambda pages: pages.free.bitmap(),
}


@pytest.mark.parametrize("way", WAYS)
def test_work_is_counted_whatever_way_an_array_is_looked_at(way, monkeypatch):
    with monkeypatch.context() as patches:
        pages, work, found = Pages(), Work(patches), dict[str, int]()
        work.watch(pages)
        with counted(work, found, "some"):
            pages.array[7] += pages.array[5:9].sum()
            pages.free.take(3)
        with counted(work, found, "all"):
            WAYS[way](pages)
    assert found["some"] < 1000
    assert found["all"] >= 5000
