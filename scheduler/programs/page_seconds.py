"""Page-seconds of a program (pages of its open files, times seconds), for GETRUSAGE and `.symphony/proc`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import trio

from kvfs.pages.free_list import IntArray
from kvfs.pages.table import PageTable

FILES_A_TURN = 500
"""Number of files that are counted before other tasks may run. The count takes some 0.3 ms."""


class Branches(Protocol):
    """Branches of a connection that exist in the core alone."""

    def page_seconds(self) -> tuple[float, int]:
        """Return the page-seconds of present and past branches, and the number of pages of present branches."""
        ...

    def branch_pages(self) -> IntArray:
        """Return the pages of the present branches. Shared pages are repeated."""
        ...


@dataclass(slots=True)
class _Held:
    """Table that the program has open."""

    num_handles: int
    began: float
    """Page-seconds of the table when its first handle was opened."""


@dataclass(slots=True)
class PageSeconds:
    """Pages of the files that a program has or had open, times seconds. A file opened twice counts once.

    A page that several files share counts once for each file: the result is a charge, not an amount of memory.
    """

    _before: float = 0.0
    """Page-seconds of tables that the program no longer has open."""
    _held: dict[PageTable, _Held] = field(default_factory=dict)
    num_pages_lately: int = 0
    """Value of `num_pages` at the last call of `total_in_slices`."""
    _branches: list[Branches] = field(default_factory=list)
    """Branches of the program's connections."""

    def has(self, branches: Branches) -> None:
        """Count the branches of one more connection."""
        self._branches.append(branches)

    def has_no_more(self, branches: Branches) -> None:
        """Stop counting the branches of a connection that has closed all its handles."""
        self._before += branches.page_seconds()[0]
        self._branches.remove(branches)

    def opened(self, table: PageTable) -> None:
        """Count a newly opened handle on a table."""
        held = self._held.get(table)
        if held is None:
            self._held[table] = _Held(1, table.page_seconds)
        else:
            held.num_handles += 1

    def closed(self, table: PageTable) -> None:
        """Stop counting a handle that was closed."""
        held = self._held[table]
        held.num_handles -= 1
        if not held.num_handles:
            del self._held[table]
            self._before += table.page_seconds - held.began

    @property
    def num_tables(self) -> int:
        return len(self._held)

    def total(self) -> float:
        """Return the page-seconds until now."""
        of_branches = sum(each.page_seconds()[0] for each in self._branches)
        return self._before + of_branches + sum(table.page_seconds - held.began for table, held in self._held.items())

    @property
    def num_pages(self) -> int:
        """Number of the program's pages now. A page that several files share counts once for each file."""
        return sum(len(table.pages) for table in self._held) + sum(each.page_seconds()[1] for each in self._branches)

    def num_distinct_pages(self) -> int:
        """Number of the program's pages now. A page that several files share counts once."""
        tables = [table.pages for table in self._held] + [each.branch_pages() for each in self._branches]
        return int(np.unique(np.concatenate(tables)).size) if tables else 0

    async def total_in_slices(self) -> float:
        """Return `total`, and let other tasks run in between."""
        of_branches = [each.page_seconds() for each in self._branches]
        found = self._before + sum(each for each, _ in of_branches)
        num_pages = sum(each for _, each in of_branches)
        for index, (table, held) in enumerate(list(self._held.items())):
            if index % FILES_A_TURN == FILES_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            found += table.page_seconds - held.began
            num_pages += len(table.pages)
        self.num_pages_lately = num_pages
        return found
