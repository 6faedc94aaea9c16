"""Checksums of a plain file's bytes, by extents: of synced ones, as the index has them, and of those written since.

    kept    the index may have it: an extent is marked there, which sets it to 0, before any of its bytes is changed
    spare   marked together with others, and not changed: the sum is right, and goes back when the file is quiet
    fresh   of bytes that were written from the beginning of the extent to its end, and may not be synced yet

The last extent that is kept ends where the synced bytes did. So an append changes none, and needs no mark.

The owner's thread has all of it, but for `wrote`, which the worker calls that is changing the file.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import xxhash

EXTENT_BYTES = 256 << 10
PART_EXTENTS = 1024
"""Extents of which the index has the sums in one row: of 256 MiB in 8 KiB."""
UNCHECKED = 0
_NONE: set[int] = set()
"""Of all files that nobody marks: there may be a million. Nobody changes it."""


def sum_of(data: bytes | memoryview) -> int:
    """Return the checksum of an extent."""
    return xxhash.xxh3_64_intdigest(data)


def num_extents(num_bytes: int) -> int:
    return -(-num_bytes // EXTENT_BYTES)


class Expected(NamedTuple):
    """The length and the sum that an extent should have."""

    num_bytes: int
    """Bytes from the start of the extent that the sum covers."""
    value: int
    """UNCHECKED: there is no sum."""


class Verified(NamedTuple):
    """Extents that were read."""

    data: memoryview
    good: list[tuple[int, Expected]]
    """Extents whose bytes fit their sums."""
    damaged: list[tuple[int, Expected]]


class Taken(NamedTuple):
    """Sums as the index is to have them after a commit."""

    kept: array[int]
    size: int
    parts: tuple[int, ...]
    """Parts whose rows are written."""
    is_shorter: bool
    """Whether there were more parts."""
    is_mark: bool
    spared: dict[int, int]
    """Sums of extents that are marked together with others."""

    @property
    def num_parts(self) -> int:
        return num_parts(len(self.kept))

    def part(self, number: int) -> tuple[int, array[int]]:
        """Return how many bytes a part has, and their sums."""
        first = number * PART_EXTENTS
        num_bytes = min(self.size - first * EXTENT_BYTES, PART_EXTENTS * EXTENT_BYTES)
        return num_bytes, self.kept[first : first + PART_EXTENTS]


class Sums:
    """The sums of one plain file."""

    __slots__ = (
        "_ahead",
        "_cut_to",
        "_fresh",
        "_hasher",
        "_kept",
        "_marking",
        "_num_marks",
        "_num_under_way",
        "_position",
        "_spare",
        "_sparing",
        "_verified",
        "is_doubtful",
        "size",
    )

    def __init__(self, kept: array[int] | None = None, size: int = 0) -> None:
        self._kept = array("Q") if kept is None else kept
        self.size = size
        """Bytes that the index knows to be synced: the file is damaged if it has fewer."""
        self._verified = bytearray(len(self._kept))
        self._spare: dict[int, int] = {}
        self._fresh: dict[int, int] = {}
        self._position = 0
        """Up to here the bytes from the beginning of an extent on went through `_hasher`."""
        self._hasher: xxhash.xxh3_64 | None = None
        """None: no byte did. One takes 700 bytes."""
        self._num_under_way = 0
        self._marking = self._ahead = self._sparing = _NONE
        """Extents that a commit under way marks together with others."""
        self._cut_to: int | None = None
        self._num_marks = 0
        self.is_doubtful = False
        """Whether a commit has failed that may have been made all the same: the index may have other sums."""

    # What is known of bytes

    def expected(self, extent: int) -> Expected:
        kept = self._kept  # a worker that asks may see a commit replace it
        if extent >= len(kept):
            return Expected(0, UNCHECKED)
        num_bytes = min(EXTENT_BYTES, self.size - extent * EXTENT_BYTES)
        return Expected(num_bytes, kept[extent] or self._spare.get(extent, UNCHECKED))

    def is_verified(self, start: int, stop: int) -> bool:
        """Whether bytes may be read as they are: they have no sums, or were found to fit them."""
        each, end = start // EXTENT_BYTES, -(-stop // EXTENT_BYTES)
        while (each := self._verified.find(0, each, end)) >= 0:
            if self._kept[each] or each in self._spare:
                return False
            self._verified[each] = 1
        return True

    def fits(self, extent: int, expected: Expected) -> None:
        """Bytes of the extent were read, and are those that this was expected of."""
        if self.expected(extent) == expected:
            self._verified[extent] = 1

    def unverified_edges(self, start: int, stop: int) -> list[int]:
        """Return extents of which a change of these bytes keeps some that were not verified yet."""
        if start >= self.size or self._verified.find(0, start // EXTENT_BYTES, num_extents(stop)) < 0:
            return []
        edges = {start // EXTENT_BYTES} if start % EXTENT_BYTES else set[int]()
        if stop < self.size and stop % EXTENT_BYTES:
            edges.add(stop // EXTENT_BYTES)
        return [each for each in sorted(edges) if self.expected(each).value and not self._verified[each]]

    # Marks

    def guards(self, start: int, stop: int) -> bool:
        """Whether a change of these bytes has to wait: for a mark, or until what it keeps of an extent is verified."""
        if start >= self.size:
            return False
        first, end = start // EXTENT_BYTES, min(num_extents(stop), len(self._kept))
        return any(self._kept[first:end]) or bool(self._spare and self.unverified_edges(start, stop))

    def needs_mark(self, start: int, stop: int, *, is_cut: bool = False) -> bool:
        """Whether the index has sums that a change of these bytes makes wrong. `is_cut`: all behind `start` goes."""
        if start >= self.size:
            return False
        return is_cut or any(self._kept[start // EXTENT_BYTES : min(num_extents(stop), len(self._kept))])

    def ask(self, start: int, stop: int, *, is_cut: bool = False) -> None:
        """Have the next `take` mark what a change of these bytes needs. Each further mark takes eight times as many
        extents ahead: so few commits are waited for, wherever the file is overwritten.
        """
        if is_cut:
            self._cut_to = start if self._cut_to is None else min(start, self._cut_to)
            return
        first, end = start // EXTENT_BYTES, min(num_extents(stop), len(self._kept))
        self._marking = self._marking.union(range(first, end))
        num_ahead = (1 << min(3 * self._num_marks, 40)) - 1
        count = len(self._kept)
        ahead = range(count) if 2 * num_ahead >= count else range(end, min(count, end + num_ahead))
        self._ahead = self._ahead.union(ahead).difference(range(first, end))
        self._num_marks += 1

    # Changes

    def begin(self, start: int, stop: int) -> None:
        """A change of these bytes is under way, or waits: nobody sums them before it has ended."""
        self._num_under_way += 1
        first, last = start // EXTENT_BYTES, (max(start, stop - 1)) // EXTENT_BYTES
        position = self._position
        if start != position and position % EXTENT_BYTES and first <= position // EXTENT_BYTES <= last:
            self._forget_position()
        for found in (self._fresh, self._spare, self._ahead, self._sparing):
            if found:
                self._forget(found, first, last)

    @staticmethod
    def _forget(found: dict[int, int] | set[int], first: int, last: int) -> None:
        gone = (
            range(first, last + 1) if last - first < len(found) else [each for each in found if first <= each <= last]
        )
        for each in gone:
            if isinstance(found, set):
                found.discard(each)
            else:
                found.pop(each, None)

    def _forget_position(self) -> None:
        self._position = 0
        self._hasher = None

    def wrote(self, offset: int, data: bytes | memoryview) -> None:
        """Hash bytes that a change under way has written."""
        if offset == self._position and len(data) < EXTENT_BYTES - offset % EXTENT_BYTES:
            self._hasher = self._hasher or xxhash.xxh3_64()
            self._hasher.update(data)
            self._position += len(data)
            return
        view = memoryview(data)
        if offset != self._position:
            skipped = -offset % EXTENT_BYTES
            if skipped >= len(data) or self._position % EXTENT_BYTES:
                return
            view, self._position = view[skipped:], offset + skipped
        while view:
            piece = view[: EXTENT_BYTES - self._position % EXTENT_BYTES]
            self._hasher = self._hasher or xxhash.xxh3_64()
            self._hasher.update(piece)
            self._position += len(piece)
            view = view[len(piece) :]
            if not self._position % EXTENT_BYTES:
                self._fresh[self._position // EXTENT_BYTES - 1] = self._hasher.intdigest()
                self._hasher = None

    def failed(self, start: int, stop: int) -> None:
        """Forget the sums of bytes that a failed change may have written."""
        self._forget_position()
        self._forget(self._fresh, start // EXTENT_BYTES, stop // EXTENT_BYTES)

    def end(self) -> None:
        """A change has ended, or does not begin any more."""
        self._num_under_way -= 1

    @property
    def is_changing(self) -> bool:
        return self._num_under_way > 0

    # Sums that the index lacks

    def lacking(self, size: int) -> list[int]:
        """Return the extents of a file of this size that have to be read to be summed."""
        if size == self.size and all(self._kept):
            return []
        grown = self._num_whole(size)
        known = self._fresh.keys() | self._spare.keys() | self._tail(size).keys()
        return [
            each for each in range(num_extents(size)) if each not in known and (each >= grown or not self._kept[each])
        ]

    def _num_whole(self, size: int) -> int:
        """Return how many extents have sums of all the bytes that they have in a file of this size."""
        return len(self._kept) if size == self.size else self.size // EXTENT_BYTES

    def is_lacking(self, size: int) -> bool:
        """Whether the index could have more sums of a file of this size."""
        return size != self.size or not all(self._kept)

    def read(self, sums: dict[int, int]) -> None:
        """Extents were read and summed while nothing was changed."""
        self._fresh |= sums

    def _tail(self, size: int) -> dict[int, int]:
        """The sum of the last extent, where it was written from its beginning and is not full."""
        if size != self._position or self._hasher is None:
            return {}
        return {size // EXTENT_BYTES: self._hasher.intdigest()}

    # Commits

    def take(self, size: int, *, is_synced: bool, is_quiet: bool) -> Taken | None:
        """Return what a commit is to write of a file of this size: marks that were asked for, or sums of what was
        appended; those of what was overwritten, too, if it is quiet. None: nothing.
        """
        kept, kept_size, spared = array("Q", self._kept), self.size, dict[int, int]()
        is_mark = bool(self._marking) or self._cut_to is not None
        if is_mark:
            kept_size = kept_size if self._cut_to is None else min(kept_size, self._cut_to)
            del kept[num_extents(kept_size) :]
            if kept_size % EXTENT_BYTES and kept_size != self.size:
                kept[-1] = UNCHECKED
            num_whole = min(len(kept), self._num_whole(size))
            spared = {each: kept[each] for each in self._ahead if each < num_whole and kept[each]}
            for each in (*self._marking, *spared):
                if each < len(kept):
                    kept[each] = UNCHECKED
            self._sparing, self._ahead = self._ahead, _NONE
            self._marking, self._cut_to = _NONE, None
        elif is_synced and not self.is_changing:
            kept_size = self._raise(kept, size, is_quiet=is_quiet)
        parts = self._parts_that_differ(kept, kept_size)
        if not parts and num_parts(len(kept)) == num_parts(len(self._kept)):
            return None
        is_shorter = num_parts(len(kept)) < num_parts(len(self._kept))
        taken = Taken(kept, kept_size, parts, is_shorter, is_mark, spared)
        self.is_doubtful = False
        if not is_mark:
            self._install(taken)
        return taken

    def _raise(self, kept: array[int], size: int, *, is_quiet: bool) -> int:
        """Put sums that are known into `kept`; how many bytes it is of then."""
        known = self._fresh | self._tail(size)
        appended = self._num_whole(size)
        if size > self.size and appended < len(kept) and kept[appended] and appended not in known:
            return self.size  # a sum of some of its bytes is better than none
        kept.extend([UNCHECKED] * (num_extents(size) - len(kept)))
        if is_quiet:
            known = self._spare | known
            self._num_marks = 0
        for each, value in known.items():
            if each < len(kept) and (is_quiet or each >= appended):
                kept[each] = value
        return size

    def _parts_that_differ(self, kept: array[int], size: int) -> tuple[int, ...]:
        count = num_parts(len(kept))
        if self.is_doubtful:
            return tuple(range(count))
        last = {count - 1} if size != self.size and count else set[int]()
        old_last = num_parts(len(self._kept)) - 1
        if size != self.size and 0 <= old_last < count:
            last.add(old_last)
        if kept == self._kept:
            return tuple(sorted(last))
        bounds = ((each, slice(each * PART_EXTENTS, (each + 1) * PART_EXTENTS)) for each in range(count))
        return tuple(sorted({each for each, part in bounds if kept[part] != self._kept[part]} | last))

    def _install(self, taken: Taken) -> None:
        old, self._kept, self.size = self._kept, taken.kept, taken.size
        self._verified.extend(bytes(max(0, len(self._kept) - len(old))))
        del self._verified[len(self._kept) :]
        for each in [*self._fresh, self.size // EXTENT_BYTES]:
            if each < len(self._kept) and self._kept[each] and (each >= len(old) or old[each] != self._kept[each]):
                self._verified[each] = 0
        for found in (self._fresh, self._spare):
            for each in [each for each in found if each < len(self._kept) and self._kept[each]]:
                del found[each]

    def committed(self, taken: Taken) -> None:
        """The index has it."""
        if taken.is_mark:
            self._install(taken)
            self._spare |= {each: value for each, value in taken.spared.items() if each in self._sparing}
            self._sparing = _NONE

    def not_committed(self) -> None:
        """The index may or may not have what was taken last: sums stay guarded, and are written once more."""
        self.is_doubtful = True

    def forget(self) -> None:
        """The index knows nothing of the file any more."""
        self._kept, self.size, self.is_doubtful = array("Q"), 0, False
        self._verified = bytearray()
        self._spare.clear()
        self._marking = self._ahead = self._sparing = _NONE
        self._cut_to = None


def num_parts(count: int) -> int:
    """Return how many rows the sums of so many extents take."""
    return -(-count // PART_EXTENTS)
