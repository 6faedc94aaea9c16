"""Pages that may be evicted, in order: the pages of the files that the policy values least are evicted first.

Files that advice calls cold are evicted before all others. Files that are about to be needed are evicted last. The
policy orders the other files. If the policy chooses a file, the same user's file with the lowest priority is evicted in
its place. So a priority gains memory only from files of the same user.

A page belongs to the file that used it last. So a shared page is worth as much as the fork that used it most recently.
If the last file that used a page is gone, the page counts as a file by itself.

The cost is a few passes over arrays of all frames that were ever used: a millisecond for 100,000 frames.
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
"""A function that gets an array of page counts. For each count, it gives the seconds that computing so many pages
takes.
"""


def candidates(pool: PagePool) -> IntArray:
    """Return the pages in memory that no call or job needs now. Pages that advice pins are among them."""
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
    """Return these pages in the order of eviction, without pages that advice pins. `num_wanted` limits their number.

    `bring_s` is the time to read one page. A pinned file may get more pages after its pin. These pages stay in memory
    only while all pinned pages together are not more than `max_kept`.
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
    """Pages grouped by file row. A page without a file is a group by itself."""

    pages: IntArray
    group: npt.NDArray[np.intp]
    """Group of each page."""
    counts: npt.NDArray[np.intp]
    """Number of pages, by group."""
    found: npt.NDArray[np.intp]
    """The groups that have pages."""
    of_file: npt.NDArray[np.bool_]
    """For each group in `found`, whether it is a file."""

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
        """Return the rows of the files."""
        return self.found[self.of_file]

    def column(self, values: npt.NDArray[Any], otherwise: float) -> FloatArray:
        """Return a number for each group in `found`: the file's value, or `otherwise` for a page without a file."""
        whole = np.empty(self.found.size)
        whole[self.of_file] = values[self.rows]
        whole[~self.of_file] = otherwise
        return whole

    def files(self, pool: PagePool, residents: Residents, now_s: float, bring_s: float, compute_s: ComputeS) -> Files:
        """Return the groups in the form that a policy takes."""
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
        """Return `num_wanted` pages in the order of their groups. Pages of later groups are not sorted."""
        pages, group = self.pages, self.group
        if num_wanted is not None:
            order = order[: np.searchsorted(np.cumsum(self.counts[order]), num_wanted) + 1]
            goes = np.zeros(self.counts.size, np.bool_)
            goes[order] = True
            pages, group = pages[goes[group]], group[goes[group]]
        # numpy sorts 16-bit numbers faster than longer numbers.
        place = np.empty(self.counts.size, np.uint16 if order.size <= 1 << 16 else np.intp)
        place[order] = np.arange(order.size)
        ordered: IntArray = pages[np.argsort(place[group], kind="stable")]
        return ordered[:num_wanted]


def _order(
    pool: PagePool, residents: Residents, groups: _Groups, worth: FloatArray, now_s: float
) -> npt.NDArray[np.intp]:
    """Return the groups in the order of eviction."""
    is_cold = groups.column(residents.is_cold, 0) > 0
    priority = groups.column(residents.priority, 0)
    is_wanted = groups.column(residents.wanted_until_s, 0) > now_s
    users = np.full(groups.found.size, -1, np.int64)
    if priority.any():
        users[groups.of_file] = _users(pool, residents, groups.rows)
    order: npt.NDArray[np.intp] = groups.found[files_in_order(worth, priority, users, is_wanted, is_cold)]
    return order


def _users(pool: PagePool, residents: Residents, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Return the user who pays for each file; -1: the file is gone."""
    tables = (residents.table_of(row) for row in rows.tolist())
    owners = np.array([-1 if table is None else table.owner for table in tables], np.int64)
    known, which = np.unique(owners, return_inverse=True)
    users = [-1 if owner < 0 else pool.accounts.of(owner).numbers[0] for owner in known.tolist()]
    return np.array(users, np.int64)[which]


def files_in_order(
    worth: FloatArray,
    priority: npt.NDArray[Any],
    users: npt.NDArray[np.int64],
    is_wanted: npt.NDArray[np.bool_],
    is_cold: npt.NDArray[np.bool_],
) -> npt.NDArray[np.intp]:
    """Return the places of files in the order of eviction. The replay of a trace calls this function, too.

    The places of one user's files are divided among these files by priority. The file with the lowest priority gets the
    first place.
    """
    places = np.lexsort((worth, is_wanted, ~is_cold))
    if not priority.any():
        return places
    number, user = np.arange(places.size), users[places]
    as_it_is = np.lexsort((number, user))
    wanted = np.lexsort((number, priority[places], is_wanted[places], ~is_cold[places], user))
    found = np.empty_like(places)
    found[as_it_is] = places[wanted]
    return found
