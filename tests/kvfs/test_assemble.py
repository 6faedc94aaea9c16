"""Extracts and merges: pages that they share and copy, calls that are refused. Random programs: see test_books.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvfs.pages.assemble import Assembly, SourceRanges, ranges_within
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.abi import RANGE_END
from libsym.errors import Invalid, NoSpace
from tests.kvfs.fakes import FakeDecoder, assemble

OWNER, OTHER = 1000, 1001


@pytest.fixture
def source(pool: PagePool, decoder: FakeDecoder) -> Iterator[PageTable]:
    """100 entries: three full pages and four entries more."""
    table = PageTable(pool, OWNER)
    decoder.append(table, range(100, 200))
    yield table
    if not table.closed:
        table.close()
    pool.check()
    assert pool.num_free == pool.num_pages, "the test leaks pages"


def picked(pool: PagePool, table: PageTable, *ranges: tuple[int, int], rebase: bool, owner: int = OTHER) -> PageTable:
    pieces = [SourceRanges(table, np.array(ranges, np.int64).reshape(-1, 2))]
    return assemble(pool, owner, pieces, rebase=rebase, max_positions=1000)


def test_what_begins_the_file_is_shared_whole_and_the_tail_as_in_a_fork(
    pool: PagePool, decoder: FakeDecoder, source: PageTable
) -> None:
    free = pool.num_free
    made = picked(pool, source, (0, 98), rebase=True)
    assert pool.num_free == free
    assert made.pages.tolist() == source.pages.tolist()
    decoder.append(made, [7])
    assert pool.num_free == free - 1, "the tail that both end in was copied before the append"
    assert source.read()[0].tolist() == list(range(100, 200))
    made.close()


@pytest.mark.parametrize(("rebase", "num_copied"), [(False, 0), (True, 2)])
def test_aligned_pages_are_shared_where_their_positions_stay(
    pool: PagePool, source: PageTable, rebase: bool, num_copied: int
) -> None:
    free = pool.num_free
    made = picked(pool, source, (64, 100), rebase=rebase)
    assert pool.num_free == free - num_copied
    assert made.read()[1].tolist() == (list(range(36)) if rebase else list(range(64, 100)))
    made.close()


def test_entries_that_go_on_in_their_places_share_the_pages_after_a_gap_too(pool: PagePool, source: PageTable) -> None:
    """32 entries are left out of the middle, then 64 to 96 have an aligned page of their own."""
    free = pool.num_free
    made = picked(pool, source, (0, 32), (64, 96), (10, 12), rebase=False)
    assert pool.num_free == free - 1
    assert made.pages[:2].tolist() == source.pages[[0, 2]].tolist()
    assert made.read()[0].tolist() == [*range(100, 132), *range(164, 196), 110, 111]
    made.close()


def test_a_page_that_is_picked_twice_is_mentioned_once(pool: PagePool, source: PageTable) -> None:
    made = picked(pool, source, (0, 32), (0, 32), (0, 8), rebase=False)
    assert len(set(made.pages.tolist())) == len(made.pages) == 3
    assert made.exclusive_pages == 2
    assert made.read()[0].tolist() == [*range(100, 132), *range(100, 132), *range(100, 108)]
    made.close()


def test_picking_nothing_makes_an_empty_file(pool: PagePool, source: PageTable) -> None:
    for ranges in ([], [(5, 5)]):
        made = picked(pool, source, *ranges, rebase=True)
        assert (made.length, len(made.pages), made.owner) == (0, 0, OTHER)
        made.close()
    merged = assemble(pool, OWNER, [], rebase=True, max_positions=1000)
    assert merged.length == 0
    merged.close()


def test_a_full_pool_changes_nothing(pool: PagePool, source: PageTable) -> None:
    hog = pool.allocate(pool.num_free - 2, OWNER)
    with pytest.raises(NoSpace):
        picked(pool, source, (1, 100), rebase=True)
    assert pool.num_free == 2
    with pytest.raises(NoSpace, match="whole page pool"):
        picked(pool, source, *[(0, 100)] * 6, rebase=False)  # 600 entries; the pool holds 512
    made = picked(pool, source, (1, 65), rebase=True)
    assert pool.num_free == 0
    made.close()
    pool.release(hog, OWNER)


def test_more_entries_than_the_models_context_can_not_be_rebased(pool: PagePool, source: PageTable) -> None:
    ranges = np.array([[0, 100]] * 2)
    with pytest.raises(Invalid, match="rebase=False"):
        Assembly(pool, OWNER, [SourceRanges(source, ranges)], rebase=True, max_positions=199)
    made = assemble(pool, OWNER, [SourceRanges(source, ranges)], rebase=False, max_positions=199)
    assert made.read()[1].tolist() == [*range(100)] * 2
    made.close()


def test_whoever_stops_a_long_one_gets_everything_back(pool: PagePool, source: PageTable) -> None:
    free = pool.num_free
    assembly = Assembly(pool, OWNER, [SourceRanges(source, np.array([[1, 100]]))], rebase=True, max_positions=1000)
    assembly.plan()
    assembly.reserve()
    filled = []

    def checkpoint() -> None:
        filled.append(1)
        if len(filled) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        assembly.fill(checkpoint)
    pool.check([source], assembly.sources, [assembly])
    assembly.abandon()
    assert pool.num_free == free


def test_the_sources_may_go_meanwhile(pool: PagePool, decoder: FakeDecoder, source: PageTable) -> None:
    assembly = Assembly(pool, OTHER, [SourceRanges(source, np.array([[3, 100]]))], rebase=False, max_positions=1000)
    source.close()
    hog = pool.allocate(pool.num_free - 4, OTHER)  # nothing that the sources held is free
    assembly.plan()
    assembly.reserve()
    assembly.fill()
    made = assembly.finish()
    pool.release(hog, OTHER)
    assert made.read()[0].tolist() == list(range(103, 200))
    assert decoder.entries(made.pages, 97).size == 97
    made.close()


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([(0, 100), (100, 100), (7, 7)], [(0, 100), (100, 100), (7, 7)]),
        ([(-4, RANGE_END), (-100, -99)], [(96, 100), (0, 1)]),
        ([], []),
    ],
)
def test_ranges_count_from_the_end_as_in_python(ranges: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
    assert ranges_within(np.array(ranges, np.int64).reshape(-1, 2), 100, "a.kv").tolist() == [*map(list, found)]


@pytest.mark.parametrize("wrong", [(0, 101), (5, 4), (-101, 3), (101, 101), (-(1 << 63), 0), (0, (1 << 63) - 2)])
def test_ranges_outside_of_the_file_are_invalid_and_named(wrong: tuple[int, int]) -> None:
    with pytest.raises(Invalid, match=r"a\.kv: it has 100 entries") as caught:
        ranges_within(np.array([(0, 5), wrong, (0, 1000)]), 100, "a.kv")
    assert str(wrong[0]) in str(caught.value)
