"""Accounts pay for pages, other bytes and files, and an account may have a limit.

An account is a number: a uid for what lies outside of any domain, `FIRST_DOMAIN | n` for a domain. It is charged once
for each distinct page that its tables, readers and imports refer to, and once for each inode and each further hard
link. Other bytes are those of plain files (by size: a hole counts, as it does in `st_blocks`), of attributes, and of
the paths in symbolic links. Names beyond the first FREE_NAMES take NAME_BYTES each, whatever their length: so a rename
moves no charge, and a small quota that was meant for so many pages holds as many.

What a domain is charged its parent is charged as well: the domain around it, or else the uid that owns its directory.
So a domain is a part of its owner's quota, never a way out of it.

Owned by the daemon's trio thread; limits are checked before anything changes.
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
from kvfs.pages.free_list import IntArray, pointer
from kvfs.pages.holdings import Holdings, Kind
from kvfs.pages.weights import DEFAULT_WEIGHT
from libsym.errors import OverQuota, SymError

FIRST_DOMAIN = 1 << 32
"""Account numbers from here on are domains; a uid is less."""

NAME_BYTES, FREE_NAMES = int(lib.CORE_NAME_BYTES), int(lib.CORE_FREE_NAMES)
"""Bytes of a name: the longest one, and its rows in the index. The first names of an account take nothing."""

_SWEEP_AT = 64
"""Accounts that hold nothing are forgotten when there are more than this, and twice what was left the last time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an account; None: as much as there is."""

    num_bytes: int | None = None
    """Of pages, names and all else together."""
    num_files: int | None = None
    memory_bytes: int | None = None
    """Of the daemon's own memory, for what it keeps for a user: see `kvfs.pages.holdings`."""


NO_LIMITS = Limits()


class StillCharged(OverQuota):
    """An account lacks room that it has as soon as the kernel forgets files which were removed."""

    def __init__(self, message: str, account: Account) -> None:
        super().__init__(message)
        self.account = account


class Account:
    """Account of a uid or a domain. Charges count to its parents as well."""

    def __init__(
        self,
        number: int,
        limits: Limits,
        parent: Account | None,
        describe: Callable[[], str],
        num_pages: int,
        sizes: PageSizes,
        total: Any,
    ) -> None:
        """`total`: the core's, of all accounts."""
        self.number = number
        self.core = ffi.new("core_account *", {"number": number})
        """Charges and limits, as the core keeps them."""
        self._holdings = Holdings(describe)
        """Of a uid."""
        self.core.holdings, self.core.sizes, self.core.total = self._holdings.core, sizes.core, total
        self.limits = limits
        self.parent = parent
        self.describe = describe
        """The account's name for messages."""
        self.pages = Counts(num_pages, self.core, "pages")
        """References of its tables, readers and imports."""
        self.sizes = sizes
        self.num_domains = 0
        """Domains that are open in it, itself included."""
        self.num_lingering = self.lingering_bytes = 0
        """Files, and other bytes of theirs, that are charged until the kernel forgets them: nothing else has them."""
        self.waiting: deque[Callable[[], None]] = deque()
        """Functions that are called one by one, at each file that the kernel has forgotten."""
        self.patient_at_s = 0.0
        """Of a uid: when its calls have all their patience again, see `kvfs.patience`."""
        self.weight = DEFAULT_WEIGHT
        """Of its share of the steps, among the uids, or among the domains of one account."""
        self._watchers: tuple[Callable[[], None], ...] = ()

    @property
    def limits(self) -> Limits:
        """Limits of the account, those that its parents have aside."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self.core.most_bytes = -1 if limits.num_bytes is None else limits.num_bytes
        self.core.most_files = -1 if limits.num_files is None else limits.num_files
        self._holdings.limit_bytes = limits.memory_bytes

    @property
    def parent(self) -> Account | None:
        """The domain around it, or else the uid that owns its directory: charged with it. None: it is a uid's."""
        return self._parent

    @parent.setter
    def parent(self, parent: Account | None) -> None:
        self._parent = parent
        self.core.parent = ffi.NULL if parent is None else parent.core

    @property
    def other_bytes(self) -> int:
        """Bytes of plain files, attributes, and what symbolic links lead to."""
        return int(self.core.other_bytes)

    @property
    def num_files(self) -> int:
        """Inodes, and each further name of one."""
        return int(self.core.num_files)

    @property
    def is_domain(self) -> bool:
        """Whether the account is a domain's, and no uid's."""
        return self.number >= FIRST_DOMAIN

    @property
    def is_idle(self) -> bool:
        """Whether nothing is charged to it, and nothing needs to be remembered of it."""
        charged = self.pages.num_above or self.core.num_tables or self.other_bytes or self.num_files
        kept = charged or self._watchers or any(self._holdings.core.num_of)
        return not (kept or self.patient_at_s or (self.is_domain and not self.core.is_ended))

    @property
    def num_bytes(self) -> int:
        """Bytes of its distinct pages, its names and all else."""
        return int(self.core.page_bytes) + self.other_bytes + names_bytes(self.num_files)

    @property
    def holdings(self) -> Holdings:
        """Things that the daemon keeps for the user who pays in the end, the owner of the outermost domain."""
        return self._holdings if self.parent is None else self.parent.holdings

    @property
    def num_free_bytes(self) -> int | None:
        """Bytes left of all limits that hold for it; None without any."""
        limits = [(each.limits.num_bytes, each.num_bytes) for each in self.chain()]
        return min((max(0, limit - used) for limit, used in limits if limit is not None), default=None)

    def chain(self) -> Iterator[Account]:
        """The account and those that are charged with it."""
        account: Account | None = self
        while account is not None:
            yield account
            account = account.parent

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the accounts that are charged with it, from the uid inwards; its own is the last."""
        return tuple(each.number for each in self.chain())[::-1]

    # Room: raises OverQuota, and changes nothing

    def require_bytes(self, other_bytes: int) -> None:
        """Raise OverQuota unless what is no page may grow by so much."""
        if not lib.core_has_room(self.core, 1, other_bytes):
            raise self.refusal()
        if not lib.core_may_count(self.core, other_bytes):
            raise SymError("64 PiB of plain files are counted for a user, holes included, and no more", errno.EFBIG)

    def require_files(self, count: int = 1, other_bytes: int = 0) -> None:
        """Raise OverQuota unless there is room for so many more files, directories, links, …, and bytes in them."""
        if lib.core_has_room_for_files(self.core, count, other_bytes):
            return
        if not (self.core.total.wanted_bytes or self.core.total.wanted_files):
            self.holdings.require(Kind.FILE, count)
        raise self.refusal()

    def refusal(self) -> OverQuota:
        """Return the error of the last call of the core that found no room in the account, or around it."""
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
        """Charge the growth of what is no page, or take back (below 0) what it has lost."""
        outcome = lib.core_charge_bytes(self.core, num_bytes)
        assert outcome == lib.CORE_DONE, f"{self.describe()} gives back bytes that it does not have"
        self.tell_watchers()

    def close(self) -> None:
        """End a domain: it goes when its last page and file have gone."""
        self.core.is_ended = True
        self.charge_domains(-1)

    def charge_domains(self, count: int) -> None:
        """Charge domains that were made in it, or that it is, or take them back (below 0)."""
        for account in self.chain():
            account.num_domains += count
        self.holdings.charge(Kind.DOMAIN, count, count * self.pages.all.nbytes)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Tell whenever something was charged or taken back. A watcher is told in the middle of that: it may change
        nothing.
        """
        self._watchers += (watcher,)
        self.core.is_watched = True

    def watch_no_more(self, watcher: Callable[[], None]) -> None:
        """End a watch."""
        self._watchers = tuple(each for each in self._watchers if each != watcher)
        self.core.is_watched = bool(self._watchers)

    def tell(self) -> None:
        """Tell the watchers of what the core has charged."""
        if self.core.has_news:
            self.core.has_news = False
            for watcher in self._watchers:
                watcher()

    def tell_watchers(self) -> None:
        """Tell the watchers of the account, and of all that are charged with it."""
        for account in self.chain():
            account.tell()

    def charge_files(self, count: int = 1) -> None:
        """Charge files, and their names; or take back (below 0) those that are gone."""
        outcome = lib.core_charge_files(self.core, count)
        assert outcome == lib.CORE_DONE, f"{self.describe()} gives back files that it does not have"
        self.tell_watchers()

    def linger(self, num_bytes: int, num_files: int = 1) -> None:
        """Count files, with so many other bytes, that are charged until the kernel forgets them."""
        for account in self.chain():
            account.num_lingering += num_files
            account.lingering_bytes += num_bytes

    def forgotten(self, num_bytes: int) -> None:
        """Count a file no more that lingered: the kernel has forgotten it."""
        self.linger(-num_bytes, -1)
        for account in self.chain():
            if account.waiting:
                account.waiting.popleft()()

    def adopt(self, domain: Account) -> None:
        """Become the parent of a domain instead of the one that it has, or raise OverQuota and change nothing."""
        self.require_files(domain.num_files)
        pages = np.flatnonzero(domain.pages.used).astype(np.int32)
        if not lib.core_has_room_for(self.core, pointer(pages), pages.size, domain.other_bytes, domain.num_files):
            raise self.refusal()
        old, domain.parent = domain.parent, self
        assert old is not None
        for account, sign in ((old, -1), (self, 1)):
            account.charge_all(domain, sign)
        for account in (old, self):  # in between it would look as if there were room
            account.tell_watchers()

    def charge_all(self, domain: Account, sign: int) -> None:
        """Charge all that a domain is charged, or take it back (`sign` below 0). Watchers are not told."""
        for account in self.chain():
            account.pages.combine(np.add if sign > 0 else np.subtract, domain.pages)
            account.core.page_bytes = account.sizes.total(account.pages.used)
        self.linger(sign * domain.lingering_bytes, sign * domain.num_lingering)
        self.charge_domains(sign * domain.num_domains)
        outcomes = lib.core_charge_bytes(self.core, sign * domain.other_bytes)
        outcomes |= lib.core_charge_files(self.core, sign * domain.num_files)
        assert outcomes == lib.CORE_DONE, f"{self.describe()} gives back what it does not have"


class Accounts:
    """Every account of one pool. `default` limits each uid that is not exempt; a domain has the limits it was given."""

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        default: Limits = NO_LIMITS,
        exempt: Iterable[int] = (0,),
        weights: Mapping[int, float] = MappingProxyType({}),
        weighed: Callable[[Account], None] = lambda _account: None,
    ) -> None:
        """`weights`: of uids; the others have `DEFAULT_WEIGHT`. `weighed` is told of an account with another weight."""
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
        """Bytes of names and of all else that is no page."""
        return int(self.total.other_bytes) + names_bytes(self.total.num_files)

    def __iter__(self) -> Iterator[Account]:
        return iter(tuple(self._accounts.values()))

    def of(self, number: int) -> Account:
        """The account of a uid, or of a domain that there is."""
        account = self._accounts.get(number)
        if account is None:
            assert number < FIRST_DOMAIN, f"domain {number} was forgotten while somebody held pages of it"
            limits = NO_LIMITS if number in self._exempt else self._default
            account = self._new(number, limits, None, lambda: f"uid {number}")
            account.weight = self._weights.get(number, DEFAULT_WEIGHT)
        return account

    def holds(self, number: int, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Give which pages an account holds. Any thread may ask; the answer stays true on the owner's thread alone."""
        account = self._accounts.get(number)  # none is made
        return np.zeros(pages.size, np.bool_) if account is None else account.pages.all[pages] > 0

    def grow(self, num_pages: int) -> None:
        """Count more pages. Each domain counts all of them, so domains take more of the daemon's memory."""
        self.num_pages = num_pages
        for account in self:
            before = account.pages.all.nbytes
            account.pages.grow(num_pages)
            if account.parent is None:
                more = account.num_domains * (account.pages.all.nbytes - before)
                account.holdings.charge(Kind.DOMAIN, 0, more)

    def is_exempt(self, uid: int) -> bool:
        """Whether no default limit holds for a user."""
        return uid in self._exempt

    def limit(self, default: Limits) -> None:
        """Give each uid that is not exempt other limits. An account that has more keeps it, and gets nothing more."""
        self._default = default
        for account in self:
            if not account.is_domain and account.number not in self._exempt:
                account.limits = default

    def tell(self, told: Any) -> None:
        """Tell watchers of accounts that the core has charged: a `core_account`, and those behind it."""
        while told:
            told.is_told = False
            self._accounts[told.number].tell()
            told = told.next_told

    def weigh_uids(self, weights: Mapping[int, float]) -> None:
        """Give uids other weights; those that are not named have `DEFAULT_WEIGHT`."""
        self._weights = dict(weights)
        for account in self:
            if not account.is_domain:
                self.weigh(account, self._weights.get(account.number, DEFAULT_WEIGHT))

    def new_domain(self, parent: Account, limits: Limits, describe: Callable[[], str]) -> Account:
        """A new account whose charges are also its parent's, until it is closed."""
        number = self._next_domain
        self._next_domain += 1  # never used again: pages remember whose bytes they hold
        domain = self._new(number, limits, parent, describe)
        domain.charge_domains(1)
        return domain

    def weigh(self, account: Account, weight: float) -> None:
        """Change an account's weight."""
        account.weight = weight
        self._weighed(account)

    def _new(self, number: int, limits: Limits, parent: Account | None, describe: Callable[[], str]) -> Account:
        if len(self._accounts) >= self._sweep_at:
            self._accounts = {each.number: each for each in self if not each.is_idle}
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._accounts))
        account = Account(number, limits, parent, describe, self.num_pages, self.sizes, self.total)
        self._accounts[number] = account
        return account

    # The books

    def check_pages(self, held: Iterable[tuple[int, IntArray]]) -> None:
        """Raise AssertionError unless these (account number, pages held) are what was charged."""
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
        """Raise AssertionError unless an attribute of accounts is the sum of these, and of what lies in them."""
        sums = Counter[Account]()
        for each, num in charged:
            for account in each.chain():
                sums[account] += num
        for account in self:
            if (num := getattr(account, name)) != sums[account]:
                raise AssertionError(f"{account.describe()} is charged {name} {num}, has {sums[account]}")

    def check_users(self) -> None:
        """Raise AssertionError unless what each user holds, and all together, is what is charged to accounts."""
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
    """Return the bytes that so many names are charged."""
    return int(lib.core_names_bytes(num_files))


_NO_PAGES = np.empty(0, np.int32)
