"""Pages of the files that a program has open, and pages times seconds: what GETRUSAGE and `.symphony/proc` tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import trio

from kvfs.pages.free_list import IntArray
from kvfs.pages.table import PageTable

FILES_A_TURN = 500
"""Looked at before others get their turn: some 0.3 ms."""


class Branches(Protocol):
    """Branches of a connection that the core alone has."""

    def page_seconds(self) -> tuple[float, int]:
        """Pages times seconds, of those that were there, too; and the pages that they have now."""
        ...

    def branch_pages(self) -> IntArray:
        """Return those pages; shared ones more than once."""
        ...


@dataclass(slots=True)
class _Held:
    """A table that the program has open, with so many handles."""

    num_handles: int
    began: float
    """The table's own page-seconds when the first of them was opened."""


@dataclass(slots=True)
class PageSeconds:
    """Pages of the files that a program has or had open, times seconds. A file opened twice counts once.

    Files that share pages count them each: it is what having the files costs, not what the pool has room for.
    """

    _before: float = 0.0
    """Of tables that it has no longer."""
    _held: dict[PageTable, _Held] = field(default_factory=dict)
    num_pages_lately: int = 0
    """`num_pages` when `total_in_turns` looked last."""
    _branches: list[Branches] = field(default_factory=list)
    """Of its connections."""

    def has(self, branches: Branches) -> None:
        """Count branches of one more connection."""
        self._branches.append(branches)

    def has_no_more(self, branches: Branches) -> None:
        """A connection has closed all that it had."""
        self._before += branches.page_seconds()[0]
        self._branches.remove(branches)

    def opened(self, table: PageTable) -> None:
        """Count a handle on a table that was opened."""
        held = self._held.get(table)
        if held is None:
            self._held[table] = _Held(1, table.page_seconds)
        else:
            held.num_handles += 1

    def closed(self, table: PageTable) -> None:
        """Count a handle that was closed."""
        held = self._held[table]
        held.num_handles -= 1
        if not held.num_handles:
            del self._held[table]
            self._before += table.page_seconds - held.began

    @property
    def num_tables(self) -> int:
        return len(self._held)

    def total(self) -> float:
        """Until now."""
        of_branches = sum(each.page_seconds()[0] for each in self._branches)
        return self._before + of_branches + sum(table.page_seconds - held.began for table, held in self._held.items())

    @property
    def num_pages(self) -> int:
        """Number of pages that it has now; those that files share count for each."""
        return sum(len(table.pages) for table in self._held) + sum(each.page_seconds()[1] for each in self._branches)

    def num_distinct_pages(self) -> int:
        """Pages that tables share count once."""
        tables = [table.pages for table in self._held] + [each.branch_pages() for each in self._branches]
        return int(np.unique(np.concatenate(tables)).size) if tables else 0

    async def total_in_turns(self) -> float:
        """The same, of any number of files, without holding anybody up."""
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
