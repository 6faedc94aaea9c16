"""Places of a directory's names, by which readdir(2) continues a listing without a copy of all names for each open
directory.

Names are ordered by the time when they were made. As long as a name exists, it has a number, its place. A reader
keeps two numbers: the place at which it continues, and the place at which it ends, because it skips names made later.
So while names are made and removed, a reader sees no name twice, and sees each lasting name exactly once. A rename over
an existing name keeps that name's place.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

DOTS = ((0, b"."), (1, b".."))
"""Places of `.` and `..`, before all names. A directory's entries don't contain them."""
FIRST_PLACE = len(DOTS)

_LEAST_DEAD = 64
"""Places of removed names are dropped when there are more than this many, and more than a quarter of the existing
names.
"""

Entry = TypeVar("Entry")


class NameOrder(Generic[Entry]):
    """The order of one directory's names. The order is made at the first listing, and takes 16 bytes a name."""

    __slots__ = ("_names", "_new", "_numbers", "end", "entries")

    def __init__(self, entries: Mapping[bytes, Entry]) -> None:
        """`entries` are the directory's entries. Each later addition or removal must be reported to `changed`."""
        self.entries = entries
        """The directory's entries. The tree replaces this table when it copies the entries to a smaller table."""
        self._names = list(entries)
        self.end = FIRST_PLACE + len(entries)
        """The number that the next name gets."""
        self._numbers = array("q", range(FIRST_PLACE, self.end))
        """Numbers of the names in `_names`, with the same indexes, in ascending order."""
        self._new: dict[bytes, int] = {}
        """Numbers of names that were added after the order was made. If such a name had been removed before, `_names`
        may have it twice. Then the first of the two counts as removed.
        """

    def __len__(self) -> int:
        """Number of places that are kept, including the places of removed names."""
        return len(self._names)

    def changed(self, name: bytes) -> None:
        """Note that a name was added or removed."""
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
        """Yield numbers, names and entries for numbers from `start` to `end - 1`. No name may be added or removed
        meanwhile.
        """
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
