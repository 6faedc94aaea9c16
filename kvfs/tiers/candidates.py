"""Pages that may go down: those of the files that are worth least in memory, as a policy says, go first.

Files that are cold by advice go before all others, and those that are about to be needed go last. Among the rest it is
the policy's choice. Where that is one of a user's files, it is the one with the lowest priority that goes in its place:
so nobody gains by it but from himself.

A page is its file's that used it last: what forks share is worth what the fork is that was there just now. A page whose
last user is gone, and whose file nobody can tell, stands for itself.

Some passes over arrays, one place a frame that was ever used: a millisecond for 100,000 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.tiers.policy import Files, FloatArray, Rank
from kvfs.tiers.residents import Residents

ComputeS = Callable[[FloatArray], FloatArray]
"""A function of numbers of pages: the seconds that computing their entries would take, for each number."""


def candidates(pool: PagePool) -> IntArray:
    """Pages in memory that nothing needs there now, whoever may want to keep them."""
    pages = pool.store.held_pages()
    free: IntArray = pages[(pool.pins[pages] == 0) & (pool.computed(pages) > 0)]
    return free


def in_order(
    pool: PagePool,
    residents: Residents,
    pages: IntArray,
    rank: Rank,
    now_s: float,
    bring_s: float,
    compute_s: ComputeS,
    max_kept: int,
    num_wanted: int | None = None,
) -> IntArray:
    """Return these pages in the order in which they may go, without those that are pinned by advice. No more than are
    wanted: None, all.

    `bring_s`: what reading one page takes. `max_kept`: what pinned files have grown by stays only while so many pages
    are enough for all that is pinned.
    """
    pages = _not_pinned(pool, residents, pages, now_s, max_kept)
    if not pages.size:
        return pages
    groups = _Groups.of(pool, residents, pages)
    worth = rank(groups.files(pool, residents, now_s, bring_s, compute_s), residents.gaps)
    return groups.pages_by(_order(pool, residents, groups, worth, now_s), num_wanted)


def _not_pinned(pool: PagePool, residents: Residents, pages: IntArray, now_s: float, max_kept: int) -> IntArray:
    rows = pool.row_of[pages]
    stays = pool.kept.until[pages] > now_s
    has_row = rows != NO_ROW
    is_pinned = stays.copy()
    is_pinned[has_row] |= residents.pinned_until_s[rows[has_row]] > now_s
    if np.count_nonzero(is_pinned) <= max_kept:
        stays = is_pinned
    found: IntArray = pages[~stays]
    return found


@dataclass(frozen=True, slots=True)
class _Groups:
    """Pages by whose they are: a file's row, or a group of its own for what has no file."""

    pages: IntArray
    group: npt.NDArray[np.intp]
    """Of each page."""
    counts: npt.NDArray[np.intp]
    """Pages, by group."""
    found: npt.NDArray[np.intp]
    """The groups that have some."""
    of_file: npt.NDArray[np.bool_]
    """Groups of `found` that are files."""

    @classmethod
    def of(cls, pool: PagePool, residents: Residents, pages: IntArray) -> _Groups:
        rows, num_rows = pool.row_of[pages], residents.num_rows
        has_row = rows != NO_ROW
        group = np.where(has_row, rows, num_rows + np.cumsum(~has_row) - 1)
        counts = np.bincount(group, minlength=num_rows)
        found = np.flatnonzero(counts)
        return cls(pages, group, counts, found, found < num_rows)

    @property
    def rows(self) -> npt.NDArray[np.intp]:
        """Of the files."""
        return self.found[self.of_file]

    def column(self, values: npt.NDArray[Any], otherwise: float) -> FloatArray:
        """A number for each group: a file's, or what stands for it."""
        whole = np.empty(self.found.size)
        whole[self.of_file] = values[self.rows]
        whole[~self.of_file] = otherwise
        return whole

    def files(self, pool: PagePool, residents: Residents, now_s: float, bring_s: float, compute_s: ComputeS) -> Files:
        """Return the groups as a policy sees them."""
        num_pages = self.counts[self.found].astype(np.float64)
        used_s = self.column(residents.last_use_s, 0)
        used_s[~self.of_file] = pool.last_use[self.pages[self.group >= residents.num_rows]]
        num_uses = self.column(residents.num_uses, 1)
        return Files(
            num_pages=num_pages,
            idle_s=np.maximum(now_s - used_s, 0),
            num_uses=num_uses,
            gap_s=np.where(num_uses > 1, self.column(residents.gap_s, 0), np.nan),
            gap_spread_s=np.where(num_uses > 2, self.column(residents.gap_spread_s, 0), np.nan),
            bring_s=num_pages * bring_s,
            compute_s=compute_s(num_pages),
            is_open=self.column(residents.num_users, 0) > 0,
        )

    def pages_by(self, order: npt.NDArray[np.intp], num_wanted: int | None) -> IntArray:
        """The pages in the order of their groups, no more than are wanted: those of other groups are not sorted."""
        pages, group = self.pages, self.group
        if num_wanted is not None:
            order = order[: np.searchsorted(np.cumsum(self.counts[order]), num_wanted) + 1]
            goes = np.zeros(self.counts.size, np.bool_)
            goes[order] = True
            pages, group = pages[goes[group]], group[goes[group]]
        # Numbers of 16 bits sort faster.
        place = np.empty(self.counts.size, np.uint16 if order.size <= 1 << 16 else np.intp)
        place[order] = np.arange(order.size)
        ordered: IntArray = pages[np.argsort(place[group], kind="stable")]
        return ordered[:num_wanted]


def _order(
    pool: PagePool, residents: Residents, groups: _Groups, worth: FloatArray, now_s: float
) -> npt.NDArray[np.intp]:
    """The groups, what goes first first."""
    is_cold = groups.column(residents.is_cold, 0) > 0
    priority = groups.column(residents.priority, 0)
    is_wanted = groups.column(residents.wanted_until_s, 0) > now_s
    places = np.lexsort((worth, is_wanted, ~is_cold))
    if priority.any():
        owners = np.full(groups.found.size, -1, np.int64)
        owners[groups.of_file] = _users(pool, residents, groups.rows)
        places = _by_priority(places, owners, priority, is_wanted, is_cold)
    order: npt.NDArray[np.intp] = groups.found[places]
    return order


def _users(pool: PagePool, residents: Residents, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Return the user who pays for each file; -1: the file is gone."""
    tables = (residents.table_of(row) for row in rows.tolist())
    owners = np.array([-1 if table is None else table.owner for table in tables], np.int64)
    known, which = np.unique(owners, return_inverse=True)
    users = [-1 if owner < 0 else pool.accounts.of(owner).numbers[0] for owner in known.tolist()]
    return np.array(users, np.int64)[which]


def _by_priority(
    places: npt.NDArray[np.intp],
    owners: npt.NDArray[np.int64],
    priority: FloatArray,
    is_wanted: npt.NDArray[np.bool_],
    is_cold: npt.NDArray[np.bool_],
) -> npt.NDArray[np.intp]:
    """Files in their order, in which those of each user have changed places among themselves."""
    number, owner = np.arange(places.size), owners[places]
    as_it_is = np.lexsort((number, owner))
    wanted = np.lexsort((number, priority[places], is_wanted[places], ~is_cold[places], owner))
    found = np.empty_like(places)
    found[as_it_is] = places[wanted]
    return found
