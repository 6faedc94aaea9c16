"""Segments: the entries of all files of a trace, as a tree in which forks share segments.

A segment is a range of a file's entries. The range begins at `start`, where the range of the parent segment ends. A
fork at entry n splits the segment there, so that two files share a segment entirely or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Segment:
    """Range of entries. A file has the whole segment, or no part of it."""

    start: int
    parent: int | None
    size: int = 0
    """Largest number of entries that the segment ever has."""
    num_initial: int = 0
    """Number of entries at the segment's start that existed before the trace began."""
    is_named: bool = False
    """Whether a file with a name has the segment. Then it is kept even if no later turn needs it."""

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class _File:
    tip: int
    """Last segment of the file. No other file has it."""
    length: int
    is_named: bool


@dataclass(slots=True)
class Segments:
    """Tree of segments, which grows while a trace is read in order of time."""

    all: list[Segment] = field(default_factory=list)
    _files: dict[int, _File] = field(default_factory=dict)

    def has(self, file: int) -> bool:
        return file in self._files

    def length_of(self, file: int) -> int:
        return self._files[file].length

    def begin(self, file: int, length: int, *, is_named: bool) -> None:
        """Add a file that had `length` entries when the trace began."""
        tip = self._new(0, None)
        self.all[tip].size = self.all[tip].num_initial = length
        self._files[file] = _File(tip, length, is_named)

    def fork(self, file: int, source: int, num_shared: int, *, is_named: bool) -> None:
        """Add `file` as a fork of the first `num_shared` entries of `source`."""
        parent = self._cut(source, num_shared)
        self._files[file] = _File(self._new(num_shared, parent), num_shared, is_named)

    def cut(self, file: int, length: int) -> None:
        """Truncate a file to `length` entries. Entries that are appended later go into a new segment."""
        found = self._files[file]
        found.tip, found.length = self._new(length, self._cut(file, length)), length

    def append(self, file: int, count: int) -> int:
        """Append entries to a file's last segment, and return that segment."""
        found = self._files[file]
        found.length += count
        tip = self.all[found.tip]
        tip.size = max(tip.size, found.length - tip.start)
        return found.tip

    def chain(self, tip: int, length: int) -> tuple[int, ...]:
        """Return the segments of a file's first `length` entries, in order. A later fork may still split them."""
        chain: list[int] = []
        place: int | None = tip
        while place is not None:
            segment = self.all[place]
            if segment.start < length and segment.size:
                chain.append(place)
            place = segment.parent
        return tuple(reversed(chain))

    def finish(self) -> None:
        """Mark the segments of files with names. Call this after the last fork."""
        for file in self._files.values():
            for place in self.chain(file.tip, file.length) if file.is_named else ():
                self.all[place].is_named = True

    def _new(self, start: int, parent: int | None) -> int:
        self.all.append(Segment(start, parent))
        return len(self.all) - 1

    def _cut(self, file: int, length: int) -> int | None:
        """Split the segments of a file at `length`, and return the segment that ends there.
        None: `length` is 0, so no segment precedes it.
        """
        place: int | None = self._files[file].tip
        while place is not None and self.all[place].start >= length:
            place = self.all[place].parent
        if place is None:
            return None
        segment = self.all[place]
        if segment.end <= length and place != self._files[file].tip:
            return place
        # `place` keeps the later entries. Earlier turns refer to it, and find the earlier entries in its new parent.
        upper = self._new(segment.start, segment.parent)
        count = min(length - segment.start, segment.size)
        self.all[upper].size = count
        self.all[upper].num_initial = min(count, segment.num_initial)
        segment.num_initial -= self.all[upper].num_initial
        segment.size -= count
        segment.start, segment.parent = length, upper
        return upper
