"""Checksums of a plain file's extents: the index's sums of synced bytes, and sums of bytes that were written later.

    kept    a sum that the index may have. Before any byte of its extent is changed, the extent is *marked*: a commit
            sets the sum in the index to 0
    spare   a sum whose extent was marked ahead, together with others, and not changed. The sum is still right, and
            returns to the index when the file is quiet
    fresh   a sum of bytes that were written from the beginning of the extent to its end, and may not be synced yet

The sum of the last kept extent covers bytes only up to the end of the synced bytes. So an append changes no bytes with
a kept sum, and needs no mark.

Only the owner's thread uses this module, except that the worker that changes the file also calls `wrote`.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import xxhash

EXTENT_BYTES = 256 << 10
PART_EXTENTS = 1024
"""Number of extents whose sums are in one row of the index. These extents have 256 MiB, and their sums take 8 KiB."""
UNCHECKED = 0
_NONE: set[int] = set()
"""The empty set that all files without marks share, because there may be a million files. Code must never change this
set.
"""


def sum_of(data: bytes | memoryview) -> int:
    """Return the checksum of an extent's bytes."""
    return xxhash.xxh3_64_intdigest(data)


def num_extents(num_bytes: int) -> int:
    return -(-num_bytes // EXTENT_BYTES)


class Expected(NamedTuple):
    """The length and the sum that an extent should have."""

    num_bytes: int
    """Bytes that the sum covers, from the start of the extent."""
    value: int
    """The sum; UNCHECKED: no sum is known."""


class Verified(NamedTuple):
    """Bytes that were read, and the result of comparing their extents with the expected sums."""

    data: memoryview
    good: list[tuple[int, Expected]]
    """Extents whose bytes match their sums."""
    damaged: list[tuple[int, Expected]]


def compare(data: memoryview, start: int, wanted: list[tuple[int, Expected]]) -> Verified:
    """Compare extents with their sums. `data`: the bytes of the file from `start` on."""
    found = Verified(data, [], [])
    for extent, expected in wanted:
        begin = extent * EXTENT_BYTES - start
        piece = data[begin : begin + expected.num_bytes]
        if expected.value:
            is_good = len(piece) == expected.num_bytes and sum_of(piece) == expected.value
            (found.good if is_good else found.damaged).append((extent, expected))
    return found


class TakenSums(NamedTuple):
    """Sums that a commit is to put into the index."""

    kept: array[int]
    size: int
    parts: tuple[int, ...]
    """Parts whose rows have to be written."""
    is_shorter: bool
    """Whether the commit leaves fewer parts in the index."""
    is_mark: bool
    spared: dict[int, int]
    """Sums of extents that the commit marks ahead, before any change of these extents."""

    @property
    def num_parts(self) -> int:
        return num_parts(len(self.kept))

    def part(self, number: int) -> tuple[int, array[int]]:
        """Return the number of bytes that a part covers, and the part's sums."""
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
        """Number of bytes that the index records as synced. A file with fewer bytes is damaged."""
        self._verified = bytearray(len(self._kept))
        self._spare: dict[int, int] = {}
        self._fresh: dict[int, int] = {}
        self._position = 0
        """End of the bytes that were hashed last. If `_hasher` is set, it has hashed the bytes from the start of their
        extent to this position.
        """
        self._hasher: xxhash.xxh3_64 | None = None
        """Hasher of the beginning of the extent at `_position`; None: no byte of this extent was hashed. A hasher takes
        700 bytes.
        """
        self._num_under_way = 0
        self._marking = self._ahead = self._sparing = _NONE
        """Sets of extents. `_marking`: extents that the next commit has to mark. `_ahead`: extents that the next commit
        marks ahead. `_sparing`: extents that the commit under way marks ahead.
        """
        self._cut_to: int | None = None
        self._num_marks = 0
        self.is_doubtful = False
        """Whether the outcome of the last commit is unknown. Then the index may have other sums."""

    # Verification

    def expected(self, extent: int) -> Expected:
        kept = self._kept  # a commit may replace the array while a worker runs this
        if extent >= len(kept):
            return Expected(0, UNCHECKED)
        num_bytes = min(EXTENT_BYTES, self.size - extent * EXTENT_BYTES)
        return Expected(num_bytes, kept[extent] or self._spare.get(extent, UNCHECKED))

    def expected_in(self, start: int, stop: int) -> list[tuple[int, Expected]]:
        """Return what is expected of the extents that begin in these bytes."""
        return [(each, self.expected(each)) for each in range(num_extents(start), num_extents(stop))]

    def is_verified(self, start: int, stop: int) -> bool:
        """Whether bytes need no verification, because their extents have no sums or were verified before."""
        each, end = start // EXTENT_BYTES, -(-stop // EXTENT_BYTES)
        while (each := self._verified.find(0, each, end)) >= 0:
            if self._kept[each] or each in self._spare:
                return False
            self._verified[each] = 1
        return True

    def fits(self, extent: int, expected: Expected) -> None:
        """Note that bytes of the extent were read and match `expected`."""
        if self.expected(extent) == expected:
            self._verified[extent] = 1

    def unverified_edges(self, start: int, stop: int) -> list[int]:
        """Return the extents that a change of these bytes overwrites only in part, and that have a sum but were not
        verified.
        """
        if start >= self.size or self._verified.find(0, start // EXTENT_BYTES, num_extents(stop)) < 0:
            return []
        edges = {start // EXTENT_BYTES} if start % EXTENT_BYTES else set[int]()
        if stop < self.size and stop % EXTENT_BYTES:
            edges.add(stop // EXTENT_BYTES)
        return [each for each in sorted(edges) if self.expected(each).value and not self._verified[each]]

    # Marks

    def guards(self, start: int, stop: int) -> bool:
        """Whether a change of these bytes has to wait for a mark, or for the verification of extents that the change
        overwrites in part.
        """
        if start >= self.size:
            return False
        first, end = start // EXTENT_BYTES, min(num_extents(stop), len(self._kept))
        return any(self._kept[first:end]) or bool(self._spare and self.unverified_edges(start, stop))

    def needs_mark(self, start: int, stop: int, *, is_cut: bool = False) -> bool:
        """Whether the index has sums that a change of these bytes would make wrong. `is_cut`: the change cuts off all
        bytes from `start` on.
        """
        if start >= self.size:
            return False
        return is_cut or any(self._kept[start // EXTENT_BYTES : min(num_extents(stop), len(self._kept))])

    def ask(self, start: int, stop: int, *, is_cut: bool = False) -> None:
        """Request that the next `take` marks the extents of these bytes. Each further request marks eight times as many
        extents ahead, so that a program that overwrites a file waits for few commits.
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
        """Note that a change of these bytes is about to begin. The sums of these bytes are forgotten, or are not taken
        until the change has ended.
        """
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
        """Hash bytes that a change under way has just written."""
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
        """Forget the sums of the bytes of a failed change, which may have been written."""
        self._forget_position()
        self._forget(self._fresh, start // EXTENT_BYTES, stop // EXTENT_BYTES)

    def end(self) -> None:
        """Note that a change has ended or was abandoned."""
        self._num_under_way -= 1

    @property
    def is_changing(self) -> bool:
        return self._num_under_way > 0

    # Sums that the index lacks

    def lacking(self, size: int) -> list[int]:
        """Return the extents whose sums are unknown until the extents are read. `size`: the size of the file."""
        if size == self.size and all(self._kept):
            return []
        grown = self._num_whole(size)
        known = self._fresh.keys() | self._spare.keys() | self._tail(size).keys()
        return [
            each for each in range(num_extents(size)) if each not in known and (each >= grown or not self._kept[each])
        ]

    def _num_whole(self, size: int) -> int:
        """Return how many of the kept sums cover their whole extent. The last extent may have grown: `size` is the
        present size of the file.
        """
        return len(self._kept) if size == self.size else self.size // EXTENT_BYTES

    def is_lacking(self, size: int) -> bool:
        """Whether the index lacks sums of a file of this size."""
        return size != self.size or not all(self._kept)

    def read(self, sums: dict[int, int]) -> None:
        """Note the sums of extents that were read while no change was under way."""
        self._fresh |= sums

    def _tail(self, size: int) -> dict[int, int]:
        """Return the sum of the last extent of a file of this size, if the extent is not full and its hasher has all
        its bytes.
        """
        if size != self._position or self._hasher is None:
            return {}
        return {size // EXTENT_BYTES: self._hasher.intdigest()}

    # Commits

    def take(self, size: int, *, is_synced: bool, is_quiet: bool) -> TakenSums | None:
        """Return the sums that a commit has to write for a file of this size, or None. If marks were requested, the
        commit writes only the marks. Otherwise the commit writes the sums of appended bytes. If the file is quiet, the
        commit also writes the sums of overwritten bytes.
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
        taken = TakenSums(kept, kept_size, parts, is_shorter, is_mark, spared)
        self.is_doubtful = False
        if not is_mark:
            self._install(taken)
        return taken

    def _raise(self, kept: array[int], size: int, *, is_quiet: bool) -> int:
        """Put known sums into `kept`. Return the number of bytes that `kept` then covers."""
        known = self._fresh | self._tail(size)
        appended = self._num_whole(size)
        if size > self.size and appended < len(kept) and kept[appended] and appended not in known:
            return self.size  # a sum that covers a part of the extent is better than no sum
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

    def _install(self, taken: TakenSums) -> None:
        old, self._kept, self.size = self._kept, taken.kept, taken.size
        self._verified.extend(bytes(max(0, len(self._kept) - len(old))))
        del self._verified[len(self._kept) :]
        for each in [*self._fresh, self.size // EXTENT_BYTES]:
            if each < len(self._kept) and self._kept[each] and (each >= len(old) or old[each] != self._kept[each]):
                self._verified[each] = 0
        for found in (self._fresh, self._spare):
            for each in [each for each in found if each < len(self._kept) and self._kept[each]]:
                del found[each]

    def committed(self, taken: TakenSums) -> None:
        """Note that the commit of these sums has succeeded."""
        if taken.is_mark:
            self._install(taken)
            self._spare |= {each: value for each, value in taken.spared.items() if each in self._sparing}
            self._sparing = _NONE

    def not_committed(self) -> None:
        """Note that the last commit may have failed. The sums of both outcomes stay guarded, and the next commit writes
        all sums again.
        """
        self.is_doubtful = True

    def forget(self) -> None:
        """Forget all sums, because the index has no sums of this file any more."""
        self._kept, self.size, self.is_doubtful = array("Q"), 0, False
        self._verified = bytearray()
        self._spare.clear()
        self._marking = self._ahead = self._sparing = _NONE
        self._cut_to = None


def num_parts(count: int) -> int:
    """Return how many rows of the index the sums of `count` extents take."""
    return -(-count // PART_EXTENTS)
