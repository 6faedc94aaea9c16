"""The entries of all files of a trace as a tree of segments: what forks share is one segment, which all of them read.

A segment is a range of a file's places, from `start` on; before it come those of its parents. A fork at entry n parts
the file there, so a segment is shared whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Segment:
    """Entries that are shared alike."""

    start: int
    parent: int | None
    size: int = 0
    """As many as it ever has."""
    num_initial: int = 0
    """That were there before the trace began: the first ones."""
    is_named: bool = False
    """Some file with a name has it: it stays when nobody needs it any more."""

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class _File:
    tip: int
    """Its last segment, which no other file has."""
    length: int
    is_named: bool


@dataclass(slots=True)
class Segments:
    """Grows while a trace is read, in order of time."""

    all: list[Segment] = field(default_factory=list)
    _files: dict[int, _File] = field(default_factory=dict)

    def has(self, file: int) -> bool:
        return file in self._files

    def length_of(self, file: int) -> int:
        return self._files[file].length

    def begin(self, file: int, length: int, *, is_named: bool) -> None:
        """A file that had so many entries when the trace began."""
        tip = self._new(0, None)
        self.all[tip].size = self.all[tip].num_initial = length
        self._files[file] = _File(tip, length, is_named)

    def fork(self, file: int, source: int, num_shared: int, *, is_named: bool) -> None:
        """`file` begins as the first entries of `source`."""
        parent = self._cut(source, num_shared)
        self._files[file] = _File(self._new(num_shared, parent), num_shared, is_named)

    def cut(self, file: int, length: int) -> None:
        """It was truncated: what follows is written anew."""
        found = self._files[file]
        found.tip, found.length = self._new(length, self._cut(file, length)), length

    def append(self, file: int, count: int) -> int:
        """Its tip, which has so many more entries now."""
        found = self._files[file]
        found.length += count
        tip = self.all[found.tip]
        tip.size = max(tip.size, found.length - tip.start)
        return found.tip

    def chain(self, tip: int, length: int) -> tuple[int, ...]:
        """The segments of a file's first entries, from the first on. Good when all forks are known."""
        chain: list[int] = []
        place: int | None = tip
        while place is not None:
            segment = self.all[place]
            if segment.start < length and segment.size:
                chain.append(place)
            place = segment.parent
        return tuple(reversed(chain))

    def finish(self) -> None:
        """What has a name keeps its segments."""
        for file in self._files.values():
            for place in self.chain(file.tip, file.length) if file.is_named else ():
                self.all[place].is_named = True

    def _new(self, start: int, parent: int | None) -> int:
        self.all.append(Segment(start, parent))
        return len(self.all) - 1

    def _cut(self, file: int, length: int) -> int | None:
        """Part the segments of a file there; the last one before."""
        place: int | None = self._files[file].tip
        while place is not None and self.all[place].start >= length:
            place = self.all[place].parent
        if place is None:
            return None
        segment = self.all[place]
        if segment.end <= length and place != self._files[file].tip:
            return place
        # What others refer to as `place` is what follows: turns of before read both, by the length that they need.
        upper = self._new(segment.start, segment.parent)
        count = min(length - segment.start, segment.size)
        self.all[upper].size = count
        self.all[upper].num_initial = min(count, segment.num_initial)
        segment.num_initial -= self.all[upper].num_initial
        segment.size -= count
        segment.start, segment.parent = length, upper
        return upper
