"""Page tables: append, fork, truncate, take back; and who has to copy a shared tail."""

from __future__ import annotations

import time
from typing import NoReturn

import numpy as np
import pytest

from kvfs.images.format import ImageFormat
from kvfs.images.snapshot import Snapshot
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import Invalid, NoSpace
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore, commit_all, entry_values

ANN, BOB = 1001, 1002


@pytest.fixture
def table(pool: PagePool) -> PageTable:
    return PageTable(pool, ANN)


def books(pool: PagePool) -> tuple[bytes, ...]:
    num = pool.num_pages
    return (pool.refcount[:num].tobytes(), pool.fill[:num].tobytes(), pool._free.bitmap().tobytes())


def assert_holds(decoder: FakeDecoder, table: PageTable, tokens: list[int], positions: list[int] | None = None) -> None:
    """The table's tokens, positions and KV are those of a file that was made of these tokens in one go."""
    positions = list(range(len(tokens))) if positions is None else positions
    got_tokens, got_positions = table.read()
    assert got_tokens.tolist() == tokens
    assert got_positions.tolist() == positions
    assert decoder.entries(table.pages, table.length).tolist() == entry_values(
        list(zip(tokens, positions, strict=True))
    )


def tokens_for(length: int, seed: int = 0) -> list[int]:
    return [(seed * 101 + 7 * index) % 1000 for index in range(length)]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 100])
def test_entries_appended_at_once_read_back(table: PageTable, decoder: FakeDecoder, pool: PagePool, length: int):
    decoder.append(table, tokens_for(length))
    assert_holds(decoder, table, tokens_for(length))
    assert table.next_position == length
    pool.check([table])


def test_entries_appended_one_by_one_across_page_ends_read_back(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    tokens = tokens_for(70)
    for length, token in enumerate(tokens, 1):
        decoder.append(table, [token])
        assert table.length == length
        assert len(table.pages) == (length + 31) // 32
        assert_holds(decoder, table, tokens[:length])
        pool.check([table])


@pytest.mark.parametrize("first", [1, 31, 32, 33])
@pytest.mark.parametrize("second", [1, 31, 32, 33, 64])
def test_appends_of_every_alignment_join(
    table: PageTable, decoder: FakeDecoder, pool: PagePool, first: int, second: int
):
    tokens = tokens_for(first + second)
    decoder.append(table, tokens[:first])
    decoder.append(table, tokens[first:])
    assert_holds(decoder, table, tokens)
    pool.check([table])


def test_positions_are_the_callers(table: PageTable, decoder: FakeDecoder):
    decoder.append(table, [1, 2], position=40)
    decoder.append(table, [3], position=7)
    assert_holds(decoder, table, [1, 2, 3], [40, 41, 7])
    assert table.next_position == 8


def test_an_empty_table_starts_at_position_zero_and_holds_nothing(table: PageTable, pool: PagePool):
    assert table.next_position == 0
    assert [array.tolist() for array in table.read()] == [[], []]
    pool.check([table])
    assert pool.num_free == pool.num_pages


def test_a_large_append_gets_consecutive_pages(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    one, two = PageTable(pool, ANN), PageTable(pool, ANN)
    for small in (one, two):
        decoder.append(small, [1])
    one.close()  # a hole of one page, below
    decoder.append(table, tokens_for(100))
    assert np.diff(table.pages).tolist() == [1, 1, 1]


def test_nobody_sees_a_reservation_before_its_commit(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, tokens_for(30))
    reservation = table.reserve([5, 6, 7], [30, 31, 32])
    assert (reservation.start, reservation.pages.tolist(), reservation.copies) == (30, [0, 1], ())
    assert table.length == 30
    assert table.pages.tolist() == [0]
    pool.check([table])
    decoder.step(reservation)
    commit_all(reservation)
    assert_holds(decoder, table, [*tokens_for(30), 5, 6, 7])
    pool.check([table])


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("count", [1, 31, 32, 33])
def test_an_abort_restores_everything(table: PageTable, decoder: FakeDecoder, pool: PagePool, length: int, count: int):
    if length:
        decoder.append(table, tokens_for(length))
    before = books(pool)
    reservation = table.reserve([9] * count, range(count))
    assert books(pool) != before
    decoder.step(reservation)
    reservation.abort()
    assert books(pool) == before
    pool.check([table])
    decoder.append(table, [4])
    assert_holds(decoder, table, [*tokens_for(length), 4])


@pytest.mark.parametrize("length", [0, 1, 30, 31, 32, 33])
@pytest.mark.parametrize("forked", [False, True])
def test_a_reservation_for_later_is_committed_piece_by_piece_and_the_rest_given_back(
    table: PageTable, decoder: FakeDecoder, pool: PagePool, length: int, *, forked: bool
):
    if length:
        decoder.append(table, tokens_for(length))
    fork = table.fork() if forked else None
    if fork is not None:
        decoder.append(fork, [77])  # the first at the frontier: the table has to copy its tail
    whole = table.reserve([0] * 70, range(length, length + 70))
    found: list[int] = []
    for count in (1, 2, 30, 1, 5):
        found += tokens_for(count, seed=len(found))
        start = whole.start
        decoder.step(whole)  # the KV of tokens that are not known yet; the last step is the one that counts
        whole.commit_first(np.array(tokens_for(count, seed=len(found) - count), np.int32))
        assert (table.length, whole.start) == (length + len(found), start + count)
        assert len(table.pages) == (table.length + 31) // 32
        assert table.read()[0].tolist() == tokens_for(length) + found
        assert table.read()[1].tolist() == list(range(table.length))
        pool.check([table, fork] if fork else [table])
    whole.abort()
    pool.check([table, fork] if fork else [table])
    assert len(pool.digests_of(table.pages[:1])) > 0
    decoder.append(table, [4])
    assert table.read()[0].tolist() == [*tokens_for(length), *found, 4]
    if fork is not None:
        assert_holds(decoder, fork, [*tokens_for(length), 77])
        fork.close()
    table.close()
    pool.check([])


def test_a_reservation_whose_entries_are_all_committed_piece_by_piece_is_over(table: PageTable, pool: PagePool):
    reservation = table.reserve([0] * 40, range(40))
    reservation.commit_first(np.arange(39, dtype=np.int32))
    assert table.reservation is reservation
    reservation.commit_first(np.array([39], np.int32))
    assert table.reservation is None
    assert table.read()[0].tolist() == list(range(40))
    pool.check([table])


def test_pages_of_others_that_were_reserved_ahead_stay_dirty_until_they_are_zeroed(
    pool: PagePool, decoder: FakeDecoder
):
    bobs, mine = PageTable(pool, BOB), PageTable(pool, ANN)
    decoder.append(bobs, range(14 * 32))
    bobs.close()
    reservation = mine.reserve(range(90), range(90))
    first, second, third = reservation.needed().tolist()
    assert reservation.pages_to_zero(40) == [first, second]
    reservation.commit_first(np.arange(35, dtype=np.int32))
    assert pool.owners_of(np.array([first, second])).tolist() == [ANN, ANN]
    assert reservation.pages_to_zero(55) == [third]
    reservation.commit_first(np.arange(1, dtype=np.int32))
    reservation.abort()
    assert pool.owners_of(np.array([third])) != ANN
    pool.check([mine])


def test_an_abort_leaves_the_frontier_to_a_fork(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2, 3])
    reservation = table.reserve([4], [3])
    fork = table.fork()
    reservation.abort()
    decoder.append(fork, [5])
    assert fork.pages.tolist() == table.pages.tolist()
    assert_holds(decoder, fork, [1, 2, 3, 5])
    assert_holds(decoder, table, [1, 2, 3])


def test_an_abort_of_a_copied_tail_keeps_the_old_one(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2, 3])
    fork = table.fork()
    decoder.append(fork, [4])
    before = books(pool)
    reservation = table.reserve([5], [3])
    assert reservation.copies == ((0, 1),)
    decoder.step(reservation)
    reservation.abort()
    assert books(pool) == before
    assert_holds(decoder, table, [1, 2, 3])
    assert_holds(decoder, fork, [1, 2, 3, 4])


def test_a_dry_pool_changes_nothing(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, tokens_for(15 * 32 + 3))
    before = books(pool)
    with pytest.raises(NoSpace):
        table.reserve([1] * 100, range(100))
    assert books(pool) == before
    decoder.append(table, [1] * 29)  # what is left of the last page
    assert_holds(decoder, table, [*tokens_for(15 * 32 + 3), *[1] * 29], [*range(15 * 32 + 32)])


def test_a_dry_pool_refuses_the_copy_of_a_tail(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, tokens_for(15 * 32 + 3))
    fork = table.fork()
    decoder.append(fork, [1])
    before = books(pool)
    with pytest.raises(NoSpace):
        table.reserve([2], [0])
    assert books(pool) == before
    fork.close()
    decoder.append(table, [2])
    assert_holds(decoder, table, [*tokens_for(15 * 32 + 3), 2])
    pool.check([table])


def test_a_fork_shares_every_page_and_owns_none(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, tokens_for(70))
    assert table.exclusive_pages == 3
    fork = table.fork(BOB)
    assert fork.owner == BOB
    assert pool.num_pages - pool.num_free == 3
    assert [t.exclusive_pages for t in (table, fork)] == [0, 0]
    assert_holds(decoder, fork, tokens_for(70))
    pool.check([table, fork])


@pytest.mark.parametrize("kept", [0, 32])
def test_a_fork_keeps_its_pages_when_its_source_is_cut_and_grows_again(
    table: PageTable, decoder: FakeDecoder, pool: PagePool, kept: int
):
    decoder.append(table, tokens_for(70))
    fork = table.fork()
    table.truncate(kept)  # at a page's end: nothing to copy, the new pages take the old ones' places in the table
    decoder.append(table, tokens_for(70, seed=4))
    assert_holds(decoder, fork, tokens_for(70))
    pool.check([table, fork])


def test_closed_forks_give_back_what_they_alone_had(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, tokens_for(40))
    free = pool.num_free
    for seed in range(20):  # far more pages in all than the pool has
        fork = table.fork()
        decoder.append(fork, tokens_for(90, seed))
        fork.close()
        assert pool.num_free == free
    pool.check([table])
    assert_holds(decoder, table, tokens_for(40))
    table.close()
    pool.check()
    assert pool.num_free == pool.num_pages


def test_of_two_at_the_frontier_the_first_goes_on_in_place_and_the_second_copies(
    table: PageTable, decoder: FakeDecoder, pool: PagePool
):
    decoder.append(table, [1, 2, 3])
    fork = table.fork()
    decoder.append(table, [4])
    assert table.pages.tolist() == [0]
    reservation = fork.reserve([5], [3])
    assert reservation.copies == ((0, 1),)
    decoder.step(reservation)
    commit_all(reservation)
    assert_holds(decoder, table, [1, 2, 3, 4])
    assert_holds(decoder, fork, [1, 2, 3, 5])
    assert (table.exclusive_pages, fork.exclusive_pages) == (1, 1)
    pool.check([table, fork])


def test_a_full_tail_is_shared_without_a_copy(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, tokens_for(32))
    fork = table.fork()
    for one, token in ((table, 1), (fork, 2)):
        reservation = one.reserve([token], [32])
        assert reservation.copies == ()
        decoder.step(reservation)
        commit_all(reservation)
    assert_holds(decoder, table, [*tokens_for(32), 1])
    assert_holds(decoder, fork, [*tokens_for(32), 2])
    assert table.pages[0] == fork.pages[0]


def test_a_page_with_one_user_left_is_appended_to_in_place(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2, 3])
    fork = table.fork()
    decoder.append(fork, [4, 5, 6])
    fork.close()
    assert table.reserve([7], [3]).copies == ()
    table.reservation.abort()
    decoder.append(table, [7])
    assert_holds(decoder, table, [1, 2, 3, 7])
    assert pool.num_pages - pool.num_free == 1


def test_the_source_of_a_copy_outlives_its_other_users_until_the_step_is_over(
    table: PageTable, decoder: FakeDecoder, pool: PagePool
):
    decoder.append(table, [1, 2, 3])
    fork = table.fork()
    decoder.append(table, [4])
    reservation = fork.reserve([5], [3])
    table.close()
    stranger = PageTable(pool, BOB)  # takes whatever is free while the step has not begun
    decoder.append(stranger, tokens_for(32 * 14))
    pool.check([fork, stranger])
    decoder.step(reservation)
    commit_all(reservation)
    assert_holds(decoder, fork, [1, 2, 3, 5])
    pool.check([fork, stranger])
    assert pool.num_pages - pool.num_free == 15


def test_a_fork_during_a_reservation_has_the_committed_entries(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2])
    reservation = table.reserve([3, 4], [2, 3])
    fork = table.fork()
    decoder.append(fork, [9])  # behind the frontier that the reservation moved
    decoder.step(reservation)
    commit_all(reservation)
    assert_holds(decoder, table, [1, 2, 3, 4])
    assert_holds(decoder, fork, [1, 2, 9])
    pool.check([table, fork])


def test_a_fork_during_the_copy_of_a_tail_has_the_old_tail(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2, 3])
    ahead = table.fork()
    decoder.append(ahead, [4])
    reservation = table.reserve([5], [3])
    fork = table.fork()
    assert fork.pages.tolist() == [0]
    decoder.step(reservation)
    commit_all(reservation)
    decoder.append(fork, [6])
    assert_holds(decoder, ahead, [1, 2, 3, 4])
    assert_holds(decoder, table, [1, 2, 3, 5])
    assert_holds(decoder, fork, [1, 2, 3, 6])
    pool.check([table, ahead, fork])


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, 63, 64, 65, 70])
def test_a_truncated_table_keeps_its_head_and_frees_the_rest(
    table: PageTable, decoder: FakeDecoder, pool: PagePool, kept: int
):
    tokens = tokens_for(70)
    decoder.append(table, tokens)
    table.truncate(kept)
    assert_holds(decoder, table, tokens[:kept])
    assert pool.num_pages - pool.num_free == (kept + 31) // 32
    decoder.append(table, [1, 2])
    assert_holds(decoder, table, [*tokens[:kept], 1, 2])
    pool.check([table])


@pytest.mark.parametrize("kept", [1, 31, 33])
def test_truncating_and_appending_in_a_shared_tail_copies_it(
    table: PageTable, decoder: FakeDecoder, pool: PagePool, kept: int
):
    tokens = tokens_for(40)
    decoder.append(table, tokens)
    fork = table.fork()
    fork.truncate(kept)
    reservation = fork.reserve([1], [kept])
    assert len(reservation.copies) == 1
    decoder.step(reservation)
    commit_all(reservation)
    assert_holds(decoder, fork, [*tokens[:kept], 1])
    assert_holds(decoder, table, tokens)
    pool.check([table, fork])


@pytest.mark.parametrize("length", [-1, 4])
def test_truncating_to_a_length_that_is_not_there_says_so(table: PageTable, decoder: FakeDecoder, length: int):
    decoder.append(table, [1, 2, 3])
    with pytest.raises(Invalid, match=f"can't truncate to {length} entries: the file has 3"):
        table.truncate(length)
    assert_holds(decoder, table, [1, 2, 3])


def test_a_full_page_that_is_cut_and_rewritten_gets_a_new_digest(
    table: PageTable, decoder: FakeDecoder, pool: PagePool, image_format: ImageFormat
):
    decoder.append(table, tokens_for(32))
    snapshot = Snapshot(table, image_format)
    snapshot.prepare()
    old = pool.digests_of(table.pages)
    snapshot.close()
    table.truncate(16)
    decoder.append(table, tokens_for(16, seed=3))
    assert table.pages.tolist() == [0]  # in place
    assert pool.digests_of(table.pages) != old
    pool.check([table])


def test_a_table_ends_once(table: PageTable):
    table.close()
    with pytest.raises(AssertionError):
        table.close()
    with pytest.raises(AssertionError):
        table.fork()


def test_a_table_has_one_reservation_at_a_time_which_ends_once(table: PageTable):
    reservation = table.reserve([1], [0])
    with pytest.raises(AssertionError):
        table.reserve([2], [1])
    with pytest.raises(AssertionError):
        table.truncate(0)
    with pytest.raises(AssertionError):
        table.close()
    commit_all(reservation)
    with pytest.raises(AssertionError):
        reservation.abort()


def test_the_check_finds_a_table_longer_than_its_pages(table: PageTable, decoder: FakeDecoder, pool: PagePool):
    decoder.append(table, [1, 2, 3])
    table.core.length = 4
    with pytest.raises(AssertionError, match="4 entries"):
        pool.check([table])


class NoBytesStore(FakeStore):
    """A store that refuses to move or show a byte."""

    def refuse(self, *_: object) -> NoReturn:
        raise AssertionError("a page's bytes were touched")

    view = copy = zero = head = refuse


def test_forking_a_gibibyte_touches_no_page():
    facts = FakeFacts(layers=4, kv_heads=4, head_dim=8)
    store = NoBytesStore(facts, num_pages=33_000)
    assert store.page_bytes == 32 << 10
    pool = PagePool(store)
    table = PageTable(pool, ANN)
    commit_all(table.reserve(np.zeros(1 << 20, np.int32), np.arange(1 << 20)))
    assert len(table.pages) == 32_768
    free = pool.num_free
    forks = [table.fork() for _ in range(10)]
    assert pool.num_free == free
    assert all((fork.pages == table.pages).all() for fork in forks)
    pool.check([table, *forks])
    for fork in forks:
        fork.close()
    pool.check([table])


def test_pages_of_others_are_zeroed_by_the_step_piece_by_piece_each_once(pool: PagePool, decoder: FakeDecoder):
    bobs, mine = PageTable(pool, BOB), PageTable(pool, ANN)
    decoder.append(mine, range(10))
    decoder.append(bobs, range(14 * 32))
    bobs.close()
    reservation = mine.reserve(range(100), range(10, 110))  # entries 10 to 109: the tail, and pages 1, 2 and 3
    _, first, second, third = reservation.needed().tolist()
    assert [reservation.pages_to_zero(count) for count in (22, 23, 54, 55, 100, 100)] == [
        [],
        [first],
        [],
        [second],
        [third],
        [],
    ]
    reservation.abort()
    assert set(mine.reserve(range(40), range(10, 50)).needed()[1:].tolist()) <= {first, second, third}
    assert len(mine.reservation.pages_to_zero(40)) == 1, "nobody said that it was zeroed"
    commit_all(mine.reservation)
    mine.truncate(10)
    assert mine.reserve(range(40), range(10, 50)).pages_to_zero(40) == [], "it holds nothing but ann's bytes now"


def test_nothing_is_committed_while_pages_hold_bytes_of_others(pool: PagePool, decoder: FakeDecoder):
    bobs, mine = PageTable(pool, BOB), PageTable(pool, ANN)
    decoder.append(bobs, range(33))
    bobs.close()
    reservation = mine.reserve(range(33), range(33))
    assert len(reservation.pages_to_zero(32)) == 1
    with pytest.raises(AssertionError, match="not zeroed"):
        commit_all(reservation)


def test_the_target_of_a_copy_needs_no_zeroing(pool: PagePool, decoder: FakeDecoder, store: FakeStore):
    mine, bobs = PageTable(pool, ANN), PageTable(pool, BOB)
    decoder.append(mine, range(10))
    decoder.append(bobs, range(15 * 32))
    bobs.close()
    fork = mine.fork()
    decoder.append(mine, [1])
    decoder.append(fork, [2])
    assert store.num_zeroed == 0
    assert pool.owners_of(fork.pages).tolist() == [ANN]


def test_a_reservation_that_is_over_takes_nothing_from_the_next_one(table: PageTable, pool: PagePool):
    first = table.reserve([1], [0])
    first.abort()
    second = table.reserve([2], [0])
    second.ready()
    first.unpin()
    assert second.pinned is not None
    for act in (first.ready, first.forget_frames, lambda: first.extend(1), first.abort):
        with pytest.raises(AssertionError):
            act()
    second.abort()
    table.close()
    first.unpin()
    with pytest.raises(AssertionError):
        table.change_owner(BOB)
    pool.check([])


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
    decoder.append(table, tokens_for(40))  # two pages
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
