"""Which pages go down: those of the files that are worth least in memory, as a policy says.

Files that are cold by advice go before all others, and those that are about to be needed go last. Among the rest a
lower priority goes first, and only then is it the policy's choice.

A page is its file's that used it last: what forks share is worth what the fork is that was there just now. A page whose
last user is gone, and whose file nobody can tell, stands for itself.

Some passes over arrays, one place a frame: a millisecond for 100,000 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool
from kvfs.tiers.policy import Files, FloatArray, Rank
from kvfs.tiers.residents import Residents

ComputeS = Callable[[FloatArray], FloatArray]
"""What computing so many pages of entries would take, for each number."""


def candidates(pool: PagePool) -> IntArray:
    """Pages in memory that nothing needs there now, whoever may want to keep them."""
    pages = pool.store.page_of[pool.store.page_of != NOWHERE]
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
    """These pages, what may go first and soonest first; without those that are pinned by advice. No more than are
    wanted: None, all.

    `bring_s`: what reading one page takes. `max_kept`: what pinned files have grown by stays only while so many pages
    are enough for all that is pinned.
    """
    rows = pool.row_of[pages]
    stays = pool.keep_until[pages] > now_s
    has_row = rows != NO_ROW
    is_pinned = stays.copy()
    is_pinned[has_row] |= residents.pinned_until_s[rows[has_row]] > now_s
    if np.count_nonzero(is_pinned) <= max_kept:
        stays = is_pinned
    pages, rows, has_row = pages[~stays], rows[~stays], has_row[~stays]
    if not pages.size:
        return pages
    num_rows = residents.num_rows
    group = np.where(has_row, rows, num_rows + np.cumsum(~has_row) - 1)  # what has no file has a group of its own
    counts = np.bincount(group, minlength=num_rows)
    found = np.flatnonzero(counts)
    of_file = found < num_rows
    file_rows = found[of_file]
    num_pages = counts[found].astype(np.float64)

    def column(values: npt.NDArray[Any], otherwise: float) -> FloatArray:
        whole = np.empty(found.size)
        whole[of_file] = values[file_rows]
        whole[~of_file] = otherwise
        return whole

    used_s = np.empty(found.size)
    used_s[of_file], used_s[~of_file] = residents.last_use_s[file_rows], pool.last_use[pages[~has_row]]
    files = Files(
        num_pages=num_pages,
        idle_s=np.maximum(now_s - used_s, 0),
        num_uses=column(residents.num_uses, 1),
        gap_s=column(residents.gap_s, np.nan),
        gap_spread_s=column(residents.gap_spread_s, np.nan),
        bring_s=num_pages * bring_s,
        compute_s=compute_s(num_pages),
        is_open=column(residents.num_users, 0) > 0,
    )
    worth = rank(files, residents.gaps)
    is_cold = column(residents.is_cold, 0) > 0
    priority = column(residents.priority, 0)
    is_wanted = column(residents.wanted_until_s, 0) > now_s
    order = found[np.lexsort((worth, priority, is_wanted, ~is_cold))]
    if num_wanted is not None:  # a sort of the pages of those files alone
        order = order[: np.searchsorted(np.cumsum(counts[order]), num_wanted) + 1]
        goes = np.zeros(counts.size, np.bool_)
        goes[order] = True
        is_of_those = goes[group]
        pages, group = pages[is_of_those], group[is_of_those]
    place = np.empty(counts.size, np.uint16 if order.size <= 1 << 16 else np.intp)  # numbers of 16 bits sort faster
    place[order] = np.arange(order.size)
    ordered: IntArray = pages[np.argsort(place[group], kind="stable")]
    return ordered[:num_wanted]
