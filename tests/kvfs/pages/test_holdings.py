"""Things that the daemon keeps for users are weighed, bounded together, and taken back."""

import pytest

from kvfs._pages import lib
from kvfs.pages.accounts import AccountLimits, Accounts
from kvfs.pages.holdings import WEIGHTS, Holdings, Kind
from libsym.errors import OverQuota

HANDLES_PART = lib.CORE_HANDLES_PART
ROOT, ANN, BOB = 0, 1001, 1002


def test_kinds_share_one_bound_and_the_error_names_the_heaviest_first():
    holdings = Holdings(lambda: "uid 7", WEIGHTS[Kind.HANDLE] + WEIGHTS[Kind.TEXT])
    holdings.hold(Kind.HANDLE)
    holdings.hold(Kind.TEXT)
    with pytest.raises(OverQuota, match=r"uid 7 is at its quota of .*: it has 1 texts, 1 handles; close"):
        holdings.hold(Kind.VERSION)
    assert holdings.facts() == {"texts": 1, "handles": 1}
    holdings.let_go(Kind.HANDLE)
    holdings.hold(Kind.VERSION)


def test_bytes_count_beside_the_weight_and_a_larger_thing_may_shrink_beyond_the_bound():
    holdings = Holdings(limit_bytes=2000)
    holdings.hold(Kind.MESSAGE, num_bytes=2000 - WEIGHTS[Kind.MESSAGE])
    holdings.limit_bytes = 0
    assert holdings.limit_bytes == 0, "and not without a bound"
    holdings.hold(Kind.MESSAGE, 0, -100)
    assert holdings.num_bytes == 1900
    holdings.let_go(Kind.MESSAGE, num_bytes=1900 - WEIGHTS[Kind.MESSAGE])
    assert (holdings.num_bytes, holdings.facts()) == (0, {})


def test_who_is_full_of_files_can_still_open_a_directory_to_remove_them():
    accounts = Accounts(4, 1, AccountLimits(memory_bytes=HANDLES_PART * WEIGHTS[Kind.FILE]))
    ann = accounts.of(ANN)
    ann.charge_files(HANDLES_PART - 1)
    with pytest.raises(OverQuota):
        ann.require_files()
    ann.holdings.hold(Kind.OPEN)
    ann.holdings.let_go(Kind.OPEN)
    ann.charge_files(-ann.num_files)
    assert ann.is_idle


def test_who_has_more_files_than_a_smaller_bound_can_still_open_what_leads_to_them():
    accounts = Accounts(4, 1)
    ann = accounts.of(ANN)
    ann.charge_files(1000)
    accounts.limit(AccountLimits(memory_bytes=2 * HANDLES_PART * WEIGHTS[Kind.OPEN]))
    for _ in range(2):
        ann.holdings.hold(Kind.OPEN)
    with pytest.raises(OverQuota):
        ann.holdings.hold(Kind.OPEN)
    with pytest.raises(OverQuota):
        ann.require_files()


def test_what_lies_in_a_domain_weighs_on_its_owner_and_moves_with_it():
    accounts = Accounts(4, 1, AccountLimits(memory_bytes=1 << 20))
    ann, bob = accounts.of(ANN), accounts.of(BOB)
    outer = accounts.new_domain(ann, AccountLimits(), lambda: "outer")
    inner = accounts.new_domain(outer, AccountLimits(), lambda: "inner")
    inner.charge_files(3)
    assert ann.holdings.facts() == {"files": 3, "domains": 2}
    bob.adopt(outer)
    assert (ann.holdings.facts(), bob.holdings.facts()) == ({}, {"files": 3, "domains": 2})
    accounts.check_users()
    bob.holdings.charge(Kind.DOMAIN)
    with pytest.raises(AssertionError, match="uid 1002 holds"):
        accounts.check_users()
    bob.holdings.let_go(Kind.DOMAIN)
    inner.charge_files(-3)
    inner.close()
    outer.close()
    assert bob.is_idle
    assert bob.holdings.num_bytes == 0


def test_root_has_no_bound_and_a_reload_changes_that_of_others():
    accounts = Accounts(4, 1, AccountLimits(memory_bytes=1 << 20))
    root, ann = accounts.of(ROOT).holdings, accounts.of(ANN).holdings
    root.hold(Kind.TEXT, 1000)
    accounts.limit(AccountLimits(memory_bytes=1))
    with pytest.raises(OverQuota):
        ann.hold(Kind.CALL)
    accounts.limit(AccountLimits())
    ann.hold(Kind.CALL, 1000)


def test_an_account_is_remembered_while_something_is_held_for_it():
    accounts = Accounts(4, 1)
    ann = accounts.of(ANN)
    ann.holdings.charge(Kind.CONNECTION)
    for uid in range(2000, 2200):
        accounts.of(uid)
    assert accounts.of(ANN) is ann
    with pytest.raises(AssertionError, match="uid 1001 gives back handles that it does not have"):
        ann.holdings.let_go(Kind.HANDLE)
