"""Finds pages that an account holds already, so that what was copied out and in again is shared again.

Twins are full pages with the same bytes, tokens and positions, whose bytes are the account's alone. Nothing is ever
shared between accounts by content, for that would show one of them what the other has.
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
"""In place of a page's twin."""

Digests = npt.NDArray[np.uint8]
"""[pages, DIGEST_BYTES]"""


@dataclass(frozen=True, slots=True)
class Entries:
    """Tokens and positions, which tell full pages apart beside their bytes: [pages, 32] each."""

    tokens: IntArray
    positions: IntArray

    @classmethod
    def of(cls, pool: PagePool, pages: IntArray) -> Self:
        """Return the entries of pages in the pool."""
        return cls(pool.tokens[pages], pool.positions[pages])


def find_twins(pool: PagePool, owner: int, entries: Entries, digests: Digests) -> IntArray:
    """For each page that would hold these one that is likely its twin, or -1.

    For worker threads: the pool changes meanwhile, so the answer is a guess for `true_twins` to test. Only pages
    whose digest is known are found: those that were imported, or read as an image since they were filled.
    """
    twins = np.full(len(digests), _ALONE, np.int32)
    if not twins.size:
        return twins
    # Of a copy: flatnonzero counts, and then looks again; what has changed between leaves numbers that are none.
    known = np.flatnonzero(pool.has_digest[: pool.top].copy()).astype(np.int32)
    known = known[pool.owners_of(known) == owner]
    known = known[pool.accounts.holds(owner, known)]
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
    """Tell for each twin whether `find_twins` was right: on the thread that owns the pool the answer stays true."""
    true: npt.NDArray[np.bool_] = (
        (twins != _ALONE)
        & pool.has_digest[twins]
        & (pool.fill[twins] == PAGE_ENTRIES)
        & (pool.owners_of(twins) == owner)
        & pool.accounts.holds(owner, twins)
    )
    # The rest is compared for those alone that passed: it is most of the work.
    candidates = np.flatnonzero(true)
    its = twins[candidates]
    true[candidates] = (
        (pool.digests[its] == digests[candidates]).all(axis=1)
        & (pool.tokens[its] == entries.tokens[candidates]).all(axis=1)
        & (pool.positions[its] == entries.positions[candidates]).all(axis=1)
    )
    return true


def _keys(digests: Digests) -> npt.NDArray[np.uint64]:
    """The first eight bytes of each digest: enough to sort by."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]
