"""Zeroes the last entries of a page, in any layout of pages. The daemon needs this for pages of models that have no
arena here.

A layout gives the axes of K and of V, from the outermost to the innermost: `k=dim/2,entry,2 v=entry/2,dim,2`. An axis
`dim/2` is divided by 2, and the axis named `2` has the remainder.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvfs.images.format import ITEM_BYTES
from kvfs.images.model_facts import ModelFacts
from libsym.abi import PAGE_ENTRIES


def masked(data: memoryview, facts: ModelFacts, num_entries: int) -> bytes:
    """Return a copy of a page's bytes with zeros in every entry from `num_entries` on."""
    layers, _, heads, width = facts.page_shape
    numbers = np.frombuffer(data, f"<u{ITEM_BYTES[facts.dtype]}").reshape(layers, 2, heads, width).copy()
    for place, part in enumerate(facts.identity["layout"].split()):
        entries = _entries(part.partition("=")[2], width // PAGE_ENTRIES)
        numbers[:, place, :, entries >= num_entries] = 0
    return numbers.tobytes()


@lru_cache(maxsize=16)
def _entries(axes: str, dim: int) -> npt.NDArray[np.intp]:
    """Return, for each number in a block, the entry that the number belongs to, in the order of the numbers."""
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
