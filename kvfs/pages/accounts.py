"""Accounts pay for pages, other bytes and files, and an account may have a limit.

An account has a number: a uid for everything outside domains, `FIRST_DOMAIN | n` for a domain. An account pays once for
each distinct page that its tables, readers and imports refer to, and once for each inode and each further hard link.
Other bytes are those of plain files, of attributes, and of the paths in symbolic links. A plain file is charged its
size. Holes count, as they do in `st_blocks`. The first CORE_FREE_NAMES names are free, and each further name takes
NAME_BYTES, whatever its length. So a rename moves no charge, and a small quota that was chosen for a number of pages
has room for that many pages.

A charge to a domain is also a charge to its parent: the domain around it, or else the uid that owns the domain's
directory. So a domain is a part of its owner's quota, never a way out of it.

Owned by the daemon's trio thread. Limits are checked before anything changes.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs._pages import ffi, lib
from kvfs.pages.counts import Counts, PageSizes
from kvfs.pages.free_list import IntArray
from kvfs.pages.holdings import Holdings, Kind
from kvfs.pages.weights import DEFAULT_WEIGHT
from libsym.errors import OverQuota, SymError

FIRST_DOMAIN = 1 << 32
"""Account numbers from here on are domains. Uids are smaller."""

NAME_BYTES = int(lib.CORE_NAME_BYTES)
"""Charge for a name in bytes: the longest name, and its rows in the index. An account's first names are free."""

_SWEEP_AT = 64
"""Idle accounts are removed when there are at least this many accounts, and twice as many as after the last removal."""


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """Limits of an account. None: no limit."""

    num_bytes: int | None = None
    """Limit of all bytes together: pages, names, and other bytes."""
    num_files: int | None = None
    memory_bytes: int | None = None
    """Limit of the daemon's own memory that is used for a user: see `kvfs.pages.holdings`."""


NO_LIMITS = AccountLimits()


class StillCharged(OverQuota):
    """Error for an account that is full now, but will have room once the kernel forgets files that were removed."""

    def __init__(self, message: str, account: Account) -> None:
        super().__init__(message)
        self.account = account


class Account:
    """Account of a uid or a domain. An account's charges count to its parents as well."""

    def __init__(
        self,
        number: int,
        limits: AccountLimits,
        parent: Account | None,
        describe: Callable[[], str],
        num_pages: int,
        sizes: PageSizes,
        total: Any,
    ) -> None:
        """`total` is the `core_total` that all accounts share."""
        self.number = number
        self.core = ffi.new("core_account *", {"number": number})
        """Charges and limits, as the core has them."""
        self._holdings = Holdings(describe)
        """Holdings of the user, if the account is a uid's."""
        self.core.holdings, self.core.sizes, self.core.total = self._holdings.core, sizes.core, total
        self.limits = limits
        self.parent = parent
        self.describe = describe
        """The account's name for messages."""
        self.pages = Counts(num_pages, self.core, "pages")
        """References on pages by the account's tables, readers and imports."""
        self.sizes = sizes
        self.num_domains = 0
        """Open domains in the account. A domain's own account counts itself."""
        self.num_lingering = self.lingering_bytes = 0
        """Removed files, and their other bytes, that stay charged until the kernel forgets the files."""
        self.waiting: deque[Callable[[], None]] = deque()
        """Queue of functions. Each time that the kernel forgets a removed file, the first function is called."""
        self.patient_at_s = 0.0
        """Time when calls of the uid may again wait as long as at first: see `kvfs.volume.patience`."""
        self.weight = DEFAULT_WEIGHT
        """Weight of the account among the uids, or among the domains of one account. The account's share of the steps
        is proportional to its weight.
        """
        self._watchers: tuple[Callable[[], None], ...] = ()

    @property
    def limits(self) -> AccountLimits:
        """The account's own limits, without those of its parents."""
        return self._limits

    @limits.setter
    def limits(self, limits: AccountLimits) -> None:
        self._limits = limits
        self.core.most_bytes = -1 if limits.num_bytes is None else limits.num_bytes
        self.core.most_files = -1 if limits.num_files is None else limits.num_files
        self._holdings.limit_bytes = limits.memory_bytes

    @property
    def parent(self) -> Account | None:
        """The domain around the account, or else the uid that owns the domain's directory. None: the account is a
        uid's.
        """
        return self._parent

    @parent.setter
    def parent(self, parent: Account | None) -> None:
        self._parent = parent
        self.core.parent = ffi.NULL if parent is None else parent.core

    @property
    def other_bytes(self) -> int:
        """Bytes of plain files, attributes, and targets of symbolic links."""
        return int(self.core.other_bytes)

    @property
    def num_files(self) -> int:
        """Number of inodes, and of further names of inodes."""
        return int(self.core.num_files)

    @property
    def is_domain(self) -> bool:
        """Whether the account is a domain's. Otherwise it is a uid's."""
        return self.number >= FIRST_DOMAIN

    @property
    def is_idle(self) -> bool:
        """Whether nothing is charged to the account, and it has no state worth keeping."""
        charged = self.pages.num_above or self.core.num_tables or self.other_bytes or self.num_files
        kept = charged or self._watchers or any(self._holdings.core.num_of)
        return not (kept or self.patient_at_s or (self.is_domain and not self.core.is_ended))

    @property
    def num_bytes(self) -> int:
        """Bytes of the account's distinct pages, names, and other bytes."""
        return int(self.core.page_bytes) + self.other_bytes + names_bytes(self.num_files)

    @property
    def holdings(self) -> Holdings:
        """Holdings of the user who pays in the end: the owner of the outermost domain."""
        return self._holdings if self.parent is None else self.parent.holdings

    @property
    def num_free_bytes(self) -> int | None:
        """Bytes that are left within the limits of the account and its parents. None: there is no limit."""
        limits = [(each.limits.num_bytes, each.num_bytes) for each in self.chain()]
        return min((max(0, limit - used) for limit, used in limits if limit is not None), default=None)

    def chain(self) -> Iterator[Account]:
        """Return the account and its parents, the innermost first."""
        account: Account | None = self
        while account is not None:
            yield account
            account = account.parent

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the account and its parents, from the uid inwards. The account's own number is the last."""
        return tuple(each.number for each in self.chain())[::-1]

    # Checks of room: they raise OverQuota, and change nothing.

    def require_bytes(self, other_bytes: int) -> None:
        """Raise OverQuota unless there is room for `other_bytes` more bytes that are not in pages."""
        if not lib.core_has_room(self.core, 1, other_bytes):
            raise self.refusal()
        if not lib.core_may_count(self.core, other_bytes):
            raise SymError("a user's plain files may have 64 PiB together, holes included", errno.EFBIG)

    def require_files(self, count: int = 1, other_bytes: int = 0) -> None:
        """Raise OverQuota unless there is room for `count` more files, directories or links, and their other bytes."""
        if lib.core_has_room_for_files(self.core, count, other_bytes):
            return
        if not (self.core.total.wanted_bytes or self.core.total.wanted_files):
            self.holdings.require(Kind.FILE, count)
        raise self.refusal()

    def refusal(self) -> OverQuota:
        """Return the error for the core's last refusal. This account, or one of its parents, lacked room."""
        total = self.core.total
        account = next(each for each in self.chain() if each.number == total.refused)
        if not total.wanted_bytes:
            limit, wanted = account.core.most_files, account.num_files + total.wanted_files
            is_passing = wanted - account.num_lingering <= limit
            message = f"{limit} files: it has {account.num_files}; remove some, or have the quota raised"
        else:
            limit, wanted = account.core.most_bytes, account.num_bytes + total.wanted_bytes
            lingering = names_bytes(account.num_files) - names_bytes(account.num_files - account.num_lingering)
            is_passing = wanted - account.lingering_bytes - lingering <= limit
            quota = "--quota" if account.parent is None else "user.kv.quota"
            message = (
                f"{limit} bytes: {account.num_bytes} are used ({account.pages.num_above} pages, "
                f"{account.num_bytes - account.core.page_bytes} bytes of names, plain files and attributes), "
                f"{total.wanted_bytes} more are wanted; remove files or forks (`symphony du` shows them), or have "
                f"{quota} raised"
            )
        message = f"{account.describe()} is at its quota of {message}"
        return StillCharged(message, account) if is_passing else OverQuota(message)

    # Charges

    def charge_bytes(self, num_bytes: int) -> None:
        """Charge bytes that are not in pages; a negative number refunds bytes."""
        outcome = lib.core_charge_bytes(self.core, num_bytes)
        assert outcome == lib.CORE_DONE, f"{self.describe()} gives back bytes that it does not have"
        self.tell_watchers()

    def close(self) -> None:
        """End a domain. The domain's account is removed after the last page and file of the domain are gone."""
        self.core.is_ended = True
        self.charge_domains(-1)

    def charge_domains(self, count: int) -> None:
        """Charge domains that were made in the account. A domain's own account counts itself. A negative number refunds
        domains.
        """
        for account in self.chain():
            account.num_domains += count
        self.holdings.charge(Kind.DOMAIN, count, count * self.pages.all.nbytes)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after each charge or refund. The account is still being changed then, so a watcher may change
        nothing.
        """
        self._watchers += (watcher,)
        self.core.is_watched = True

    def watch_no_more(self, watcher: Callable[[], None]) -> None:
        """End a watch."""
        self._watchers = tuple(each for each in self._watchers if each != watcher)
        self.core.is_watched = bool(self._watchers)

    def tell(self) -> None:
        """Call the watchers if the core has charged or refunded anything."""
        if self.core.has_news:
            self.core.has_news = False
            for watcher in self._watchers:
                watcher()

    def tell_watchers(self) -> None:
        """Call the watchers of the account and of its parents."""
        for account in self.chain():
            account.tell()

    def charge_files(self, count: int = 1) -> None:
        """Charge files and their names; a negative number refunds files."""
        outcome = lib.core_charge_files(self.core, count)
        assert outcome == lib.CORE_DONE, f"{self.describe()} gives back files that it does not have"
        self.tell_watchers()

    def linger(self, num_bytes: int, num_files: int = 1) -> None:
        """Count removed files that stay charged until the kernel forgets the files, and count their other bytes."""
        for account in self.chain():
            account.num_lingering += num_files
            account.lingering_bytes += num_bytes

    def forgotten(self, num_bytes: int) -> None:
        """Note that the kernel has forgotten a removed file, and call the next waiting function."""
        self.linger(-num_bytes, -1)
        for account in self.chain():
            if account.waiting:
                account.waiting.popleft()()

    def adopt(self, domain: Account) -> None:
        """Become the parent of a domain in place of its present parent, or raise OverQuota and change nothing."""
        self.require_files(domain.num_files)
        is_used = domain.pages.used > 0
        for account in self.chain():
            num_bytes = domain.other_bytes + self.sizes.total(is_used & (account.pages.all[: is_used.size] == 0))
            if not lib.core_may_have(account.core, num_bytes, domain.num_files):
                raise self.refusal()
        old, domain.parent = domain.parent, self
        assert old is not None
        for account, sign in ((old, -1), (self, 1)):
            account.charge_all(domain, sign)
        for account in (old, self):  # after the first charge alone, the accounts would seem to have room
            account.tell_watchers()

    def charge_all(self, domain: Account, sign: int) -> None:
        """Charge everything that a domain is charged (`sign` 1), or refund it (-1). Watchers are not told."""
        for account in self.chain():
            account.pages.combine(np.add if sign > 0 else np.subtract, domain.pages)
            account.core.page_bytes = account.sizes.total(account.pages.used)
        self.linger(sign * domain.lingering_bytes, sign * domain.num_lingering)
        self.charge_domains(sign * domain.num_domains)
        outcomes = lib.core_charge_bytes(self.core, sign * domain.other_bytes)
        outcomes |= lib.core_charge_files(self.core, sign * domain.num_files)
        assert outcomes == lib.CORE_DONE, f"{self.describe()} gives back what it does not have"


class Accounts:
    """Every account of one pool. `default` limits each uid that is not exempt. A domain has limits of its own."""

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        default: AccountLimits = NO_LIMITS,
        exempt: Iterable[int] = (0,),
        weights: Mapping[int, float] = MappingProxyType({}),
        weighed: Callable[[Account], None] = lambda _account: None,
    ) -> None:
        """`weights` has the weights of uids; other uids have `DEFAULT_WEIGHT`. `weighed` is called when an account's
        weight changes.
        """
        self.num_pages = num_pages
        self._default = default
        self._exempt = frozenset(exempt)
        self._weights = dict(weights)
        self._accounts: dict[int, Account] = {}
        self._next_domain = FIRST_DOMAIN
        self.total = ffi.new("core_total *")
        """Files and other bytes of all accounts."""
        self._sweep_at = _SWEEP_AT
        self.sizes = PageSizes(page_bytes)
        self._weighed = weighed

    @property
    def bytes_beside_pages(self) -> int:
        """Bytes of names and of everything else that is not a page."""
        return int(self.total.other_bytes) + names_bytes(self.total.num_files)

    def __iter__(self) -> Iterator[Account]:
        return iter(tuple(self._accounts.values()))

    def of(self, number: int) -> Account:
        """Return the account of a uid, or of a domain that exists."""
        account = self._accounts.get(number)
        if account is None:
            assert number < FIRST_DOMAIN, f"domain {number} was forgotten while somebody held pages of it"
            limits = NO_LIMITS if number in self._exempt else self._default
            account = self._new(number, limits, None, lambda: f"uid {number}")
            account.weight = self._weights.get(number, DEFAULT_WEIGHT)
        return account

    def holds(self, number: int, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return which pages an account holds. Any thread may ask. The answer stays true only on the owning thread."""
        account = self._accounts.get(number)  # unlike `of`, this makes no account
        return np.zeros(pages.size, np.bool_) if account is None else account.pages.all[pages] > 0

    def is_within(self, number: int, domain: Account) -> bool:
        """Whether an account is that of a domain, or of a domain within it. An account that is forgotten is not."""
        account = self._accounts.get(number)
        return account is not None and domain in account.chain()

    def is_exempt(self, uid: int) -> bool:
        """Whether a user is exempt from default limits."""
        return uid in self._exempt

    def limit(self, default: AccountLimits) -> None:
        """Change the limits of each uid that is not exempt. An account above its new limits keeps its content."""
        self._default = default
        for account in self:
            if not account.is_domain and account.number not in self._exempt:
                account.limits = default

    def tell(self, told: Any) -> None:
        """Call the watchers of accounts that the core has charged. `told` is the first `core_account` of their list."""
        while told:
            told.is_told = False
            self._accounts[told.number].tell()
            told = told.next_told

    def weigh_uids(self, weights: Mapping[int, float]) -> None:
        """Change the weights of uids. Uids that are not named get `DEFAULT_WEIGHT`."""
        self._weights = dict(weights)
        for account in self:
            if not account.is_domain:
                self.weigh(account, self._weights.get(account.number, DEFAULT_WEIGHT))

    def new_domain(self, parent: Account, limits: AccountLimits, describe: Callable[[], str]) -> Account:
        """Return the account of a new domain. Until the domain is closed, its charges are also charged to `parent`."""
        number = self._next_domain
        self._next_domain += 1  # never reused: frames remember whose bytes they hold
        domain = self._new(number, limits, parent, describe)
        domain.charge_domains(1)
        return domain

    def weigh(self, account: Account, weight: float) -> None:
        """Change an account's weight."""
        account.weight = weight
        self._weighed(account)

    def _new(self, number: int, limits: AccountLimits, parent: Account | None, describe: Callable[[], str]) -> Account:
        if len(self._accounts) >= self._sweep_at:
            self._accounts = {each.number: each for each in self if not each.is_idle}
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._accounts))
        account = Account(number, limits, parent, describe, self.num_pages, self.sizes, self.total)
        self._accounts[number] = account
        return account

    # The audit

    def check_pages(self, held: Iterable[tuple[int, IntArray]]) -> None:
        """Raise AssertionError unless the charges agree with `held`: pairs of an account number and the pages that the
        account holds.
        """
        pages_of: dict[int, list[IntArray]] = {}
        for number, pages in held:
            for account in self.of(number).chain():
                pages_of.setdefault(account.number, []).append(pages)
        for account in self:
            mentions, charged = np.concatenate(pages_of.get(account.number, [_NO_PAGES])), account.pages
            counted = np.bincount(mentions, minlength=charged.top)
            wrong = np.flatnonzero(charged.all[: counted.size] != counted)[:8]
            if wrong.size:
                raise AssertionError(
                    f"{account.describe()} is charged {charged.all[wrong]} references to pages {wrong}, holds "
                    f"{counted[wrong]}"
                )
            charged.check(f"charged to {account.describe()}")
            if account.core.page_bytes != (num_bytes := self.sizes.total(counted)):
                raise AssertionError(
                    f"{account.describe()} is charged {account.core.page_bytes} bytes of pages, holds {num_bytes}"
                )

    def check(self, name: str, charged: Iterable[tuple[Account, int]]) -> None:
        """Raise AssertionError unless attribute `name` of each account is the sum of the charges to the account and its
        descendants. `charged` lists these charges.
        """
        sums = Counter[Account]()
        for each, num in charged:
            for account in each.chain():
                sums[account] += num
        for account in self:
            if (num := getattr(account, name)) != sums[account]:
                raise AssertionError(f"{account.describe()} is charged {name} {num}, has {sums[account]}")

    def check_users(self) -> None:
        """Raise AssertionError unless the holdings of each user, and the totals of all users, equal the accounts'
        charges.
        """
        self.check("num_domains", ((each, 1) for each in self if each.is_domain and not each.core.is_ended))
        users = [account for account in self if account.parent is None]
        for user in users:
            held = user.holdings.core.num_of
            if (held[Kind.FILE], held[Kind.DOMAIN]) != (user.num_files, user.num_domains):
                has = f"{user.num_files} files, {user.num_domains} domains"
                raise AssertionError(f"{user.describe()} holds {user.holdings.facts()}, has {has}")
        sums = [sum(each.other_bytes for each in users), sum(each.num_files for each in users)]
        if [self.total.other_bytes, self.total.num_files] != sums:
            raise AssertionError(f"accounts have {sums} bytes and files, all together {self.bytes_beside_pages} bytes")


def names_bytes(num_files: int) -> int:
    """Return the bytes that `num_files` names are charged."""
    return int(lib.core_names_bytes(num_files))


_NO_PAGES = np.empty(0, np.int32)
