"""Charges of pages and files, and what happens at a limit."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvfs._pages import ffi, lib
from kvfs.images.format import ImageFormat
from kvfs.images.header import parse_header
from kvfs.images.importer import ImageImport
from kvfs.images.snapshot import Snapshot
from kvfs.pages.accounts import FIRST_DOMAIN, AccountLimits, Accounts
from kvfs.pages.free_list import pointer
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import NoSpace, OverQuota, SymError
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, FakeStore, commit_all

ROOT, ANN, BOB = 0, 1001, 1002
MOST_PAGES = 4
"""Pages that each user may hold."""


@pytest.fixture
def accounts(store: FakeStore) -> Accounts:
    limits = AccountLimits(num_bytes=MOST_PAGES * store.page_bytes + 1, num_files=3)  # the byte over buys no page
    return Accounts(store.num_pages, store.page_bytes, limits)


@pytest.fixture
def pool(store: FakeStore, accounts: Accounts) -> Iterator[PagePool]:
    pool = PagePool(store, accounts)
    yield pool
    pool.check()
    assert pool.num_free == pool.num_pages, "the test leaks pages"
    assert not any(account.num_bytes for account in accounts)


def image_of(table: PageTable, image_format: ImageFormat) -> bytes:
    snapshot = Snapshot(table, image_format)
    data = bytes(snapshot.read(0, snapshot.size))
    snapshot.close()
    return data


def test_page_counts_agree_with_plain_python_over_many_random_moves() -> None:
    rng = random.Random(1)
    pool = PagePool(FakeStore(FakeFacts(), num_pages=20))
    others = pool.allocate(20, BOB)
    counts, model = pool.accounts.of(ANN).pages, dict.fromkeys(range(20), 0)
    core = ffi.addressof(pool.accounts.of(ANN).core, "pages")
    held: list[list[int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            mentions = held.pop(rng.randrange(len(held)))
            pool.release(np.array(mentions, np.int32), ANN)
            step = -1
        else:
            mentions = rng.choices(range(20), k=rng.randrange(6))
            held.append(mentions)
            new = {page for page in mentions if not model[page]}
            assert lib.counts_num_new(core, pointer(np.array(mentions, np.int32)), len(mentions)) == len(new)
            pool.retain(np.array(mentions, np.int32), ANN)
            step = 1
        for page in mentions:
            model[page] += step
        assert counts.all[others].tolist() == list(model.values())
        assert counts.num_above == sum(value > 0 for value in model.values())


def test_an_account_pays_once_for_each_page_however_many_forks_share_it(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    table = PageTable(pool, ANN)
    decoder.append(table, range(70))
    forks = [table.fork() for _ in range(10)]
    assert accounts.of(ANN).pages.num_above == 3
    decoder.append(forks[0], [1])  # in place: it is at the frontier
    decoder.append(forks[1], [2])  # a copy of the tail
    assert accounts.of(ANN).pages.num_above == 4
    table.close()
    for fork in forks[1:]:
        fork.close()
    assert accounts.of(ANN).pages.num_above == 3
    pool.check([forks[0]])
    forks[0].close()


def test_each_of_two_accounts_pays_for_pages_that_they_share(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    anns = PageTable(pool, ANN)
    decoder.append(anns, range(64))
    bobs = anns.fork(BOB)
    assert [accounts.of(each).pages.num_above for each in (ANN, BOB)] == [2, 2]
    anns.close()
    assert [accounts.of(each).pages.num_above for each in (ANN, BOB)] == [0, 2]
    pool.check([bobs])
    bobs.close()


def test_at_its_limit_an_account_gets_no_page_more_and_nothing_changes(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    table, other = PageTable(pool, ANN), PageTable(pool, BOB)
    decoder.append(table, range(100))
    with pytest.raises(OverQuota, match=r"uid 1001 .* are used \(4 pages, .*, \d+ more are wanted"):
        table.reserve(range(29), range(100, 129))
    assert table.reservation is None
    decoder.append(table, range(28))  # what is left of the page
    with pytest.raises(OverQuota):
        table.reserve([1], [128])
    fork = table.fork()  # shares what is paid for
    fork.truncate(100)
    with pytest.raises(OverQuota):  # the shared tail would have to be copied
        fork.reserve([1], [100])
    decoder.append(other, range(32))
    pool.check([table, fork, other])
    fork.close()
    table.truncate(96)
    decoder.append(table, range(32))
    for each in (table, other):
        each.close()


def test_root_has_no_limit_but_the_pools(pool: PagePool) -> None:
    table = PageTable(pool, ROOT)
    with pytest.raises(NoSpace):
        table.reserve(range(17 * 32), range(17 * 32))
    commit_all(table.reserve(range(16 * 32), range(16 * 32)))
    pool.check([table])
    table.close()


def test_an_aborted_reservation_costs_nothing(pool: PagePool, accounts: Accounts, decoder: FakeDecoder) -> None:
    table = PageTable(pool, ANN)
    decoder.append(table, range(10))
    fork = table.fork()
    decoder.append(table, range(5))
    reservation = fork.reserve(range(60), range(60))
    assert accounts.of(ANN).pages.num_above == 4
    pool.check([table, fork])
    reservation.abort()
    assert accounts.of(ANN).pages.num_above == 1
    for each in (table, fork):
        each.close()


def test_a_fork_of_somebody_elses_file_needs_room_for_all_its_pages(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    roots, bobs = PageTable(pool, ROOT), PageTable(pool, BOB)
    decoder.append(roots, range(5 * 32))
    with pytest.raises(OverQuota, match="uid 1002"):
        roots.fork(BOB)
    roots.truncate(4 * 32)
    decoder.append(bobs, [1])
    with pytest.raises(OverQuota):
        roots.fork(BOB)
    bobs.close()
    fork = roots.fork(BOB)
    fork.fork().close()
    pool.check([roots, fork])
    for each in (roots, fork):
        each.close()


def test_a_file_that_changes_hands_takes_its_charge_along(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder, image_format: ImageFormat
) -> None:
    table, bobs = PageTable(pool, ANN), PageTable(pool, BOB)
    decoder.append(table, range(40))
    reader = Snapshot(table, image_format)
    table.reserve(range(60), range(60))
    decoder.append(bobs, [1])
    with pytest.raises(OverQuota, match="uid 1002"):
        table.change_owner(BOB)
    assert (table.owner, accounts.of(ANN).pages.num_above, accounts.of(BOB).pages.num_above) == (ANN, 4, 1)
    bobs.close()
    table.change_owner(BOB)
    assert accounts.of(BOB).pages.num_above == 4
    assert accounts.of(ANN).pages.num_above == 2, "ann's reader still holds what she opened"
    pool.check([table], [reader])
    table.reservation.abort()
    reader.close()
    assert (accounts.of(BOB).pages.num_above, accounts.of(ANN).pages.num_above) == (2, 0)
    table.close()


def test_a_table_handed_over_to_who_has_no_room_is_closed(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    bobs, table = PageTable(pool, BOB), PageTable(pool, ANN)
    decoder.append(bobs, range(3 * 32))
    decoder.append(table, range(2 * 32))
    with pytest.raises(OverQuota):
        table.hand_over(BOB)
    pool.check([bobs])
    bobs.truncate(64)
    other = PageTable(pool, ANN)
    decoder.append(other, range(2 * 32))
    assert other.hand_over(BOB).owner == BOB
    assert accounts.of(BOB).pages.num_above == 4
    for each in (bobs, other):
        each.close()


def test_readers_and_imports_are_charged_while_they_last(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder, image_format: ImageFormat
) -> None:
    table = PageTable(pool, ANN)
    decoder.append(table, range(70))
    reader = Snapshot(table, image_format)
    data = BytesSource(image_of(table, image_format))
    table.close()
    assert accounts.of(ANN).pages.num_above == 3
    incoming = ImageImport(pool, parse_header(image_format, data), BOB)
    assert accounts.of(BOB).pages.num_above == 3
    with pytest.raises(OverQuota):
        ImageImport(pool, parse_header(image_format, data), BOB)
    pool.check([reader], [incoming])
    incoming.abandon()
    reader.close()


def test_a_domain_is_charged_together_with_everything_above_it(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    outer = accounts.new_domain(accounts.of(ANN), AccountLimits(num_bytes=3 * pool.page_bytes), lambda: "outer")
    inner = accounts.new_domain(outer, AccountLimits(), lambda: "inner")
    assert inner.number > outer.number >= FIRST_DOMAIN
    own, one, two = (PageTable(pool, each) for each in (ANN, outer.number, inner.number))
    decoder.append(own, range(64))
    decoder.append(one, range(32))
    with pytest.raises(OverQuota, match="uid 1001"):
        two.reserve(range(64), range(64))
    own.truncate(0)
    decoder.append(two, range(64))
    assert [each.pages.num_above for each in (inner, outer, accounts.of(ANN))] == [2, 3, 3]
    with pytest.raises(OverQuota, match="outer"):
        two.reserve([1], [64])
    fork = two.fork(outer.number)
    assert [each.pages.num_above for each in (inner, outer, accounts.of(ANN))] == [2, 3, 3]
    pool.check([own, one, two, fork])
    for each in (own, one, two, fork):
        each.close()


def test_accounts_that_hold_nothing_are_forgotten_and_others_never(
    pool: PagePool, accounts: Accounts, decoder: FakeDecoder
) -> None:
    table = PageTable(pool, ANN)
    decoder.append(table, [1])
    domain = accounts.new_domain(accounts.of(BOB), AccountLimits(), lambda: "domain")
    for uid in range(10_000, 20_000):
        accounts.of(uid).charge_files()
        accounts.of(uid).charge_files(-1)
    assert len([*accounts]) < 100
    assert accounts.of(domain.number) is domain
    pool.check([table])
    table.close()


def test_the_check_finds_a_wrong_charge(pool: PagePool, accounts: Accounts, decoder: FakeDecoder) -> None:
    table = PageTable(pool, ANN)
    decoder.append(table, [1])
    assert lib.core_charge(accounts.of(BOB).core, pointer(table.pages), 1) == lib.CORE_DONE
    with pytest.raises(AssertionError, match="uid 1002 is charged"):
        pool.check([table])
    assert lib.core_refund(accounts.of(BOB).core, pointer(table.pages), 1) == lib.CORE_DONE
    table.close()


def test_more_bytes_than_can_be_counted_are_refused_and_hold_up_no_other_user() -> None:
    accounts = Accounts(4, 1)
    domain = accounts.new_domain(accounts.of(ANN), AccountLimits(num_bytes=100), lambda: "a domain")
    domain.charge_bytes(3)
    for account in (accounts.of(ANN), accounts.of(BOB)):
        with pytest.raises(SymError) as refused:
            account.require_bytes((1 << 63) - 1)
        assert refused.value.errno == errno.EFBIG
    accounts.of(ANN).require_bytes((1 << 56) - 3)
    accounts.of(ANN).charge_bytes((1 << 56) - 3)
    with pytest.raises(SymError):
        accounts.of(ANN).require_bytes(1)
    with pytest.raises(OverQuota):
        domain.require_bytes(98)
    accounts.of(BOB).require_bytes(1 << 56)
    accounts.of(BOB).adopt(domain)
    assert [account.num_bytes for account in accounts] == [(1 << 56) - 3, 3, 3]


def test_each_uid_has_the_weight_that_it_was_given_also_after_it_was_forgotten() -> None:
    accounts = Accounts(1, 4096, weights={1000: 2.5})
    assert [accounts.of(uid).weight for uid in (1000, 1001)] == [2.5, 1.0]
    for uid in range(2000, 2200):
        accounts.of(uid)
    assert 1000 not in {account.number for account in accounts}
    assert accounts.of(1000).weight == 2.5
    assert accounts.new_domain(accounts.of(1000), AccountLimits(), lambda: "d").weight == 1.0
