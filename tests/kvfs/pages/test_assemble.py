"""Extracts and merges: pages that they share and copy, calls that are refused. Random ones: durable/test_storm.py."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvfs.pages.accounts import AccountLimits
from kvfs.pages.assemble import Assembly, SourceRanges, ranges_within
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.abi import RANGE_END
from libsym.errors import Invalid, NoSpace, OverQuota
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


def picked(pool: PagePool, table: PageTable, *ranges: tuple[int, int], rebase: bool, most: int = 1000) -> PageTable:
    pieces = [SourceRanges(table, np.array(ranges, np.int64).reshape(-1, 2))]
    return assemble(pool, OTHER, pieces, rebase=rebase, max_positions=most)


@pytest.mark.parametrize(
    ("ranges", "rebase", "num_new", "shared"),
    [
        pytest.param([(0, 98)], True, 0, {0: 0, 1: 1, 2: 2, 3: 3}, id="what begins the file, and its tail"),
        pytest.param([(64, 100)], False, 0, {0: 2, 1: 3}, id="aligned pages whose positions stay"),
        pytest.param([(64, 100)], True, 2, {}, id="aligned pages whose positions change"),
        pytest.param([(0, 32), (64, 96), (10, 12)], False, 1, {0: 0, 1: 2}, id="an aligned page after a gap"),
        pytest.param([(0, 32), (0, 32), (0, 8)], False, 2, {0: 0}, id="a page that is picked twice"),
        pytest.param([], True, 0, {}, id="nothing"),
        pytest.param([(5, 5)], True, 0, {}, id="no entry"),
    ],
)
def test_pages_are_shared_where_entries_keep_their_places_and_positions(
    pool: PagePool, source: PageTable, ranges: list[tuple[int, int]], rebase: bool, num_new: int, shared: dict[int, int]
) -> None:
    free = pool.num_free
    made = picked(pool, source, *ranges, rebase=rebase)
    assert (pool.num_free, made.owner) == (free - num_new, OTHER)
    assert {place: int(made.pages[place]) for place in shared} == {
        at: int(source.pages[of]) for at, of in shared.items()
    }
    picks = [at for first, stop in ranges for at in range(first, stop)]
    assert made.read()[0].tolist() == [100 + at for at in picks]
    assert made.read()[1].tolist() == (list(range(len(picks))) if rebase else picks)
    made.close()


def test_what_can_not_be_made_is_refused_in_words(pool: PagePool, source: PageTable) -> None:
    with pytest.raises(NoSpace, match="whole page pool"):
        picked(pool, source, *[(0, 100)] * 6, rebase=False)  # 600 entries; the pool holds 512
    with pytest.raises(Invalid, match="rebase=False"):
        picked(pool, source, (0, 100), (0, 100), rebase=True, most=199)
    picked(pool, source, (0, 100), (0, 100), rebase=False, most=199).close()
    merged = assemble(pool, OWNER, [], rebase=True, max_positions=1000)
    assert merged.length == 0
    merged.close()


def test_whoever_has_no_room_for_what_would_be_shared_is_charged_for_nothing(pool: PagePool, source: PageTable) -> None:
    free, pool.accounts.of(OTHER).limits = pool.num_free, AccountLimits(num_bytes=3 * pool.page_bytes)
    with pytest.raises(OverQuota):
        picked(pool, source, (0, 96), (1, 33), rebase=False)  # three pages that are there, and a new one
    assert pool.num_free == free


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


def test_ranges_count_from_the_end_as_in_python() -> None:
    ranges = [(0, 100), (100, 100), (7, 7), (-4, RANGE_END), (-100, -99)]
    found = [[0, 100], [100, 100], [7, 7], [96, 100], [0, 1]]
    assert ranges_within(np.array(ranges), 100, "a.kv").tolist() == found
    assert ranges_within(np.empty((0, 2), np.int64), 100, "a.kv").size == 0


def test_ranges_outside_of_the_file_are_invalid_and_named() -> None:
    for wrong in ((0, 101), (5, 4), (-101, 3), (101, 101), (-(1 << 63), 0), (0, (1 << 63) - 2)):
        with pytest.raises(Invalid, match=r"a\.kv: it has 100 entries") as caught:
            ranges_within(np.array([(0, 5), wrong, (0, 1000)]), 100, "a.kv")
        assert str(wrong[0]) in str(caught.value)
