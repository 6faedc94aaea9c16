"""Hides the entries of a page from some one on, in whatever layout the page is: what another model's arena would do.

A layout says how the numbers of K and of V lie, from the outermost axis in: `k=dim/2,entry,2 v=entry/2,dim,2`. An axis
that is divided has its rest as an axis of that number.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvfs.images.format import ITEM_BYTES
from kvfs.images.model_facts import ModelFacts
from libsym.abi import PAGE_ENTRIES


def masked(data: memoryview, facts: ModelFacts, num_entries: int) -> bytes:
    """A copy of a page's bytes in which every entry from `num_entries` on reads as zero."""
    layers, _, heads, width = facts.page_shape
    numbers = np.frombuffer(data, f"<u{ITEM_BYTES[facts.dtype]}").reshape(layers, 2, heads, width).copy()
    for place, part in enumerate(facts.identity["layout"].split()):
        entries = _entries(part.partition("=")[2], width // PAGE_ENTRIES)
        numbers[:, place, :, entries >= num_entries] = 0
    return numbers.tobytes()


@lru_cache(maxsize=16)
def _entries(axes: str, dim: int) -> npt.NDArray[np.intp]:
    """Of each number of a block, in order, which entry it belongs to."""
    names = axes.split(",")
    divisor = next((int(name) for name in names if name.isdigit()), 1)
    sizes = {"dim": dim, "entry": PAGE_ENTRIES, f"dim/{divisor}": dim // divisor}
    sizes |= {f"entry/{divisor}": PAGE_ENTRIES // divisor, str(divisor): divisor}
    grid = np.indices([sizes[name] for name in names]).reshape(len(names), -1)
    found: npt.NDArray[np.intp]
    if "entry" in names:
        found = grid[names.index("entry")]
    else:
        found = grid[names.index(f"entry/{divisor}")] * divisor + grid[names.index(str(divisor))]
    return found
