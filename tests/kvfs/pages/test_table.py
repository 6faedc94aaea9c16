"""Page tables: what no walk reaches. Walks: core/test_core.py; the bytes in the pages: durable/test_storm.py."""

import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import Invalid
from tests.kvfs.fakes import FakeDecoder, FakeStore, commit_all

ANN, BOB = 1001, 1002


@pytest.fixture
def table(pool: PagePool) -> PageTable:
    return PageTable(pool, ANN)


def test_truncating_to_a_length_that_is_not_there_says_so(table: PageTable, decoder: FakeDecoder):
    decoder.append(table, [1, 2, 3])
    for length in (-1, 4):
        with pytest.raises(Invalid, match=f"can't truncate to {length} entries: the file has 3"):
            table.truncate(length)


def test_a_table_and_its_one_reservation_end_once(table: PageTable, pool: PagePool):
    first = table.reserve([1], [0])
    acts: list[Callable[[], object]] = [lambda: table.reserve([2], [1]), lambda: table.truncate(0), table.close]
    for act in acts:
        with pytest.raises(AssertionError):
            act()
    first.abort()
    second = table.reserve([2], [0])
    second.ready()
    first.unpin()
    assert second.pinned is not None, "a reservation that is over takes nothing from the next one"
    acts = [first.ready, first.forget_frames, lambda: first.extend(1), first.abort, lambda: commit_all(first)]
    for act in acts:
        with pytest.raises(AssertionError):
            act()
    commit_all(second)
    with pytest.raises(AssertionError):
        second.abort()
    table.close()
    first.unpin()
    acts = [table.close, table.fork, lambda: table.change_owner(BOB), lambda: table.truncate(0)]
    for act in acts:
        with pytest.raises(AssertionError):
            act()
    pool.check([])


def test_the_check_finds_a_table_longer_than_its_pages(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2, 3])
    table.core.length = 4
    with pytest.raises(AssertionError, match="4 entries"):
        pool.check([table])


def test_nothing_is_committed_while_pages_hold_bytes_of_others(pool: PagePool, decoder: FakeDecoder):
    bobs, mine = PageTable(pool, BOB), PageTable(pool, ANN)
    decoder.append(bobs, range(33))
    bobs.close()
    reservation = mine.reserve(range(33), range(33))
    assert len(reservation.pages_to_zero(32)) == 1
    with pytest.raises(AssertionError, match="not zeroed"):
        commit_all(reservation)


class FailingFiles:
    """Slot files of which a page can't be taken."""

    def disown(self, pages: object, slots: object) -> NoReturn:
        raise OSError("the index is broken")


def test_a_table_is_closed_though_the_disk_fails_and_its_place_is_another_tables(
    store: FakeStore, decoder: FakeDecoder
):
    pool = PagePool(store, num_on_disk=16, slot_files=FailingFiles)
    table = PageTable(pool, ANN)
    decoder.append(table, [1, 2])
    pool.on_disk.restore(table.pages, np.array([5]), np.array([7], np.uint64), np.array([2], np.int8))
    with pytest.raises(OSError, match="the index is broken"):
        table.close()
    assert table.closed
    other = PageTable(pool, BOB)
    decoder.append(other, [3])
    assert (table.length, table.pages.size) == (0, 0)
    pool.check([other])
    other.close()


def test_page_seconds_are_the_pages_times_how_long_it_had_them(table: PageTable, decoder: FakeDecoder):
    began_s = time.monotonic()
    time.sleep(0.01)
    assert table.page_seconds == 0
    decoder.append(table, range(40))  # two pages
    had_s = time.monotonic()
    time.sleep(0.02)
    fork = table.fork()
    assert 2 * (time.monotonic() - had_s) <= table.page_seconds <= 2 * (time.monotonic() - began_s)
    assert fork.page_seconds < table.page_seconds
    table.truncate(10)
    cut_s = time.monotonic()
    cut = table.page_seconds
    reservation = table.reserve([1] * 64, range(64))
    time.sleep(0.02)
    gained, passed_s = table.page_seconds - cut, time.monotonic() - cut_s
    assert 0.02 <= gained <= passed_s, "what is not committed is not had"
    reservation.abort()
    had = table.page_seconds
    table.close()
    assert had <= table.page_seconds <= had + time.monotonic() - cut_s, "and what is closed has what it had"
    other = PageTable(table.pool, ANN)
    assert other.page_seconds == 0, "what is made in its place has had none"
    other.close()
    fork.close()
