"""Residents: when files come back, and who goes before whom."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.candidates import candidates, in_order
from kvfs.tiers.departures import least_recent
from kvfs.tiers.residents import Residents
from tests.kvfs.fakes import FakeFacts, FakeStore


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def used(residents: Residents, clock: Clock, row: int, gaps_s: Sequence[float]) -> None:
    """A file is used with these gaps between, and then not any more."""
    for gap_s in gaps_s:
        clock.now_s += gap_s
        residents.begin_use(row)
        residents.end_use(row)


def new() -> tuple[Residents, Clock, int]:
    clock = Clock()
    pool = PagePool(FakeStore(FakeFacts(), 4))
    residents = Residents(pool, clock)
    return residents, clock, residents.add(PageTable(pool, 0))


@pytest.mark.parametrize(
    ("gaps_s", "next_s"),
    [
        pytest.param([2.0, 2.5, 2.2, 2.4], (2.0, 2.5), id="regular"),
        pytest.param([0.1, 2.0, 2.5, 2.2, 2.4], (2.0, 2.5), id="one unlike the others"),
        pytest.param([5.0, 90.0, 20.0, 700.0, 45.0], None, id="people"),
    ],
)
def test_regular_gaps_foretell_the_next_use(gaps_s: list[float], next_s: tuple[float, float] | None) -> None:
    residents, clock, row = new()
    used(residents, clock, row, gaps_s)
    expected = residents.expected_s(row)
    assert (expected is None) == (next_s is None)
    if expected is not None and next_s is not None:
        np.testing.assert_allclose(np.array(expected) - clock.now_s, next_s)


def test_a_file_with_few_gaps_is_taken_to_be_like_all_others_if_those_are_alike() -> None:
    residents, clock, row = new()
    table = residents.table_of(row)
    assert table is not None
    other = residents.add(PageTable(table.pool, 0))
    assert residents.expected_s(row) is None
    used(residents, clock, other, [1.0, 1.1] * 10)
    residents.end_use(row)
    expected = residents.expected_s(row)
    assert expected is not None
    assert 0.7 < expected[0] - clock.now_s <= expected[1] - clock.now_s < 1.5
    used(residents, clock, other, [30.0] * 10)
    residents.end_use(row)
    assert residents.expected_s(row) is None


def test_what_is_about_to_be_needed_goes_last_and_what_is_cold_first() -> None:
    clock = Clock()
    pool = PagePool(FakeStore(FakeFacts(), 8))
    residents = Residents(pool, clock)
    tables = []
    for _ in range(4):
        table = PageTable(pool, 0)
        residents.add(table)
        reservation = table.reserve(range(32), range(32))
        reservation.ready()
        reservation.commit_first(reservation.tokens)
        residents.end_use(table.row)
        tables.append(table)
        clock.now_s += 1
    wanted, plain, low, cold = tables
    residents.wanted_until_s[wanted.row] = clock.now_s + 5
    residents.priority[low.row] = -1
    residents.is_cold[cold.row] = True

    def order(num_wanted: int | None = None) -> list[int]:
        found = in_order(
            pool, residents, candidates(pool), least_recent, clock.now_s, 1e-3, lambda pages: pages, 0, num_wanted
        )
        return [int(page) for page in found]

    assert order() == [int(table.pages[0]) for table in (cold, low, plain, wanted)]
    assert order(2) == [int(table.pages[0]) for table in (cold, low)]
    clock.now_s += 10
    assert order() == [int(table.pages[0]) for table in (cold, low, wanted, plain)], "for so long only"
