"""The places of a directory's names: where readdir(2) goes on, without a copy of the names for each open directory.

Names are in the order in which they came, each with a number that stays its own while it is there. A reader keeps two
numbers: where it goes on, and where it ends, for names that come later are not its own. So a name that stays is seen
exactly once, and no name twice, whatever comes and goes meanwhile. A name that a rename replaces keeps its place.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

DOTS = ((0, b"."), (1, b".."))
"""Come before the names; no entry has them."""
FIRST_PLACE = len(DOTS)

_LEAST_DEAD = 64
"""Places of names that went are dropped when they are more than this, and more than a quarter of the names."""

Entry = TypeVar("Entry")


class NameOrder(Generic[Entry]):
    """The order of one directory's names. Made when the directory is read first, it takes 16 bytes a name."""

    __slots__ = ("_names", "_new", "_numbers", "end", "entries")

    def __init__(self, entries: Mapping[bytes, Entry]) -> None:
        """`entries`: of the directory, as they change."""
        self.entries = entries
        """The tree gives another table when that one has more room than it needs."""
        self._names = list(entries)
        self.end = FIRST_PLACE + len(entries)
        """The number that the next name gets."""
        self._numbers = array("q", range(FIRST_PLACE, self.end))
        """By place in `_names`, ascending."""
        self._new: dict[bytes, int] = {}
        """Numbers of names that may have an earlier place, too: of one that was there before."""

    def __len__(self) -> int:
        """Places that are kept, those of names that went too."""
        return len(self._names)

    def changed(self, name: bytes) -> None:
        """A name came or went."""
        if name in self.entries:
            self._names.append(name)
            self._numbers.append(self.end)
            self._new[name] = self.end
            self.end += 1
        else:
            self._new.pop(name, None)
            if len(self._names) - len(self.entries) > max(_LEAST_DEAD, len(self.entries) // 4):
                self._drop_dead()

    def between(self, start: int, end: int) -> Iterator[tuple[int, bytes, Entry]]:
        """Numbers, names and entries from a number on. No name may come or go meanwhile."""
        for place in range(bisect_left(self._numbers, start), bisect_left(self._numbers, end)):
            number, name = self._numbers[place], self._names[place]
            entry = self.entries.get(name)
            if entry is not None and self._new.get(name, number) == number:
                yield number, name, entry

    def _drop_dead(self) -> None:
        kept = [(number, name) for number, name, _entry in self.between(FIRST_PLACE, self.end)]
        self._numbers = array("q", (number for number, _name in kept))
        self._names = [name for _number, name in kept]
        self._new = {}
