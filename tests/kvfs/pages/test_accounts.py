"""Accounts: refusals in words, and accounts that come and go. Charges of pages, at random: core/test_core.py."""

import errno
from collections.abc import Iterator

import pytest

from kvfs._pages import lib
from kvfs.pages.accounts import AccountLimits, Accounts
from kvfs.pages.free_list import pointer
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import OverQuota, SymError
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore, commit_all

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
    assert lib.core_charge(accounts.of(BOB).core, 0, pointer(table.pages), 1) == lib.CORE_DONE
    with pytest.raises(AssertionError, match="uid 1002 is charged"):
        pool.check([table])
    assert lib.core_refund(accounts.of(BOB).core, 0, pointer(table.pages), 1) == lib.CORE_DONE
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


@pytest.fixture
def two_pools() -> Iterator[tuple[PagePool, PagePool]]:
    """Pools of two models, whose pages have 4 and 8 KiB, over the same accounts. A user may hold 20 KiB and a byte."""
    small, large = FakeStore(FakeFacts(), 16), FakeStore(FakeFacts(head_dim=8), 8)
    accounts = Accounts(24, small.page_bytes, AccountLimits(num_bytes=5 * small.page_bytes + 1))
    yield PagePool(small, accounts), PagePool(large, accounts, base=16)
    assert not any(account.num_bytes for account in accounts)


def test_an_account_pays_for_the_pages_of_several_pools_each_by_its_size(two_pools: tuple[PagePool, PagePool]) -> None:
    small, large = two_pools
    accounts = small.accounts
    one, other = PageTable(small, ANN), PageTable(large, ANN)
    commit_all(one.reserve(range(32), None))
    commit_all(other.reserve(range(64), None))
    assert one.pages.tolist() == [0]
    assert other.pages.tolist() == [0, 1]
    assert accounts.of(ANN).num_bytes == 4096 + 2 * 8192
    with pytest.raises(OverQuota, match="8192 more are wanted"):
        other.reserve(range(32), None)
    fork = other.fork(ANN)  # takes no page
    with pytest.raises(OverQuota):
        PageTable(small, ANN).reserve(range(33), None)
    accounts.check_pages(small.held([one]) + large.held([other, fork]))
    with pytest.raises(AssertionError, match="uid 1001 is charged"):
        accounts.check_pages(small.held([one]))
    for each in (one, other, fork):
        each.close()
    accounts.check_pages(small.held() + large.held())


def test_a_domain_moves_to_another_user_with_pages_of_several_sizes(two_pools: tuple[PagePool, PagePool]) -> None:
    small, large = two_pools
    accounts = small.accounts
    domain = accounts.new_domain(accounts.of(ANN), AccountLimits(), lambda: "a domain")
    one, other, bobs = PageTable(small, domain.number), PageTable(large, domain.number), PageTable(small, BOB)
    commit_all(one.reserve(range(32), None))
    commit_all(other.reserve(range(64), None))
    commit_all(bobs.reserve(range(1), None))
    with pytest.raises(OverQuota, match="20480 more are wanted"):
        accounts.of(BOB).adopt(domain)
    assert [accounts.of(uid).num_bytes for uid in (ANN, BOB)] == [20480, 4096]
    bobs.close()
    accounts.of(BOB).adopt(domain)
    assert [accounts.of(uid).num_bytes for uid in (ANN, BOB)] == [0, 20480]
    accounts.check_pages(small.held([one]) + large.held([other]))
    for each in (one, other):
        each.close()
