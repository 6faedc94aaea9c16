"""Finds imported pages that an account holds already. Pages that were exported and imported again become shared again.

Twins are full pages with equal bytes, tokens and positions, which hold only bytes of one account. Accounts never share
pages because of equal content: that would show each account the content of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool
from libsym.abi import PAGE_ENTRIES

_ALONE = -1
"""Number that stands for the twin of a page without a twin."""

Digests = npt.NDArray[np.uint8]
"""[pages, DIGEST_BYTES]"""


@dataclass(frozen=True, slots=True)
class Entries:
    """Tokens and positions of full pages, which have to be equal for twins: [pages, 32] each."""

    tokens: IntArray
    positions: IntArray

    @classmethod
    def of(cls, pool: PagePool, pages: IntArray) -> Self:
        """Return the entries of pages in the pool."""
        return cls(pool.tokens[pages], pool.positions[pages])


def find_twins(pool: PagePool, owner: int, entries: Entries, digests: Digests) -> IntArray:
    """Return a likely twin for each page with these entries, or -1.

    For worker threads: the pool changes in the meantime, so the result is a guess, for `true_twins` to check. Only
    pages with a known digest are found: pages that were imported, or read as an image since they were filled.
    """
    twins = np.full(len(digests), _ALONE, np.int32)
    if not twins.size:
        return twins
    # A copy, because flatnonzero reads the array twice: a change between the two passes would give invalid numbers.
    known = np.flatnonzero(pool.has_digest[: pool.top].copy()).astype(np.int32)
    known = known[pool.owners_of(known) == owner]
    known = known[pool.accounts.holds(owner, pool.base + known)]
    if not known.size:
        return twins
    keys = _keys(pool.digests[known])
    order = np.argsort(keys, kind="stable")
    places = np.minimum(np.searchsorted(keys, _keys(digests), sorter=order), known.size - 1)
    likely = known[order[places]]
    return np.where(true_twins(pool, owner, entries, digests, likely), likely, twins)


def true_twins(
    pool: PagePool, owner: int, entries: Entries, digests: Digests, twins: IntArray
) -> npt.NDArray[np.bool_]:
    """Return for each likely twin whether it is a twin. On the thread that owns the pool the answer stays true."""
    true: npt.NDArray[np.bool_] = (
        (twins != _ALONE)
        & pool.has_digest[twins]
        & (pool.fill[twins] == PAGE_ENTRIES)
        & (pool.owners_of(twins) == owner)
        & pool.accounts.holds(owner, pool.base + twins)
    )
    # The remaining comparisons are most of the work, so they are done only for pages that passed.
    candidates = np.flatnonzero(true)
    its = twins[candidates]
    true[candidates] = (
        (pool.digests[its] == digests[candidates]).all(axis=1)
        & (pool.tokens[its] == entries.tokens[candidates]).all(axis=1)
        & (pool.positions[its] == entries.positions[candidates]).all(axis=1)
    )
    return true


def _keys(digests: Digests) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of each digest, by which pages are sorted."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]
