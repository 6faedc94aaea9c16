"""States that a disk may hold after a power cut: trees that the operations of a log allow.

    for state in states(disk.log(), seed=1, count=100):
        materialize(state, directory)
        ...                                    # start on that directory, and expect what state.marks say was promised

A state is a log, a place where it is cut, and a seed; the same three give the same tree. Of the operations before the
cut:

- *What a sync covers survives.* It covers the bytes, size and (but for fdatasync) mode that its file had before it in
  the log; syncing a new file also covers the name that it was made with. Syncing a directory covers the names in it.
  A sync that failed covers nothing, and no later one covers what it should have covered: Linux takes those pages for
  clean.
- *Names* are changed in order, as by a journal: a number of the last changes is missing, none that a sync covers.
- *Size, truncation, fallocate, holes and mode* of each file likewise, with a journal of its own: files are cut at
  different places, and elsewhere than names. Bytes that were written after a truncation (or hole) are not there without
  it, where it made room for them.
- *Each write* that no sync covers is there, or not, or in some sectors of 512 bytes. So later bytes may be there
  without earlier ones. A sector never goes back behind a newer version that is there: it has one of its versions since
  the last sync.
- *Bytes that were not written* below a size that is there read as what was there before. If that was nothing, they
  are zeros, or stale bytes of whoever had these blocks before (`holes`). What fallocate gave reads as zeros.
"""

import os
import shutil
import stat
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from tests.disk.allocation import punch
from tests.disk.extents import Extents
from tests.disk.history import NEVER, history_of, size_after
from tests.disk.log import (
    ROOT,
    Allocated,
    Changed,
    FileChange,
    Log,
    Made,
    Marked,
    Punched,
    Removed,
    Renamed,
    Resized,
    Written,
)

SECTOR_BYTES = 512

Holes = Literal["zeros", "garbage", "either"]
Keep = Literal["some", "all", "none"]
"""Fate of operations that no sync covers: a random part, all (as after kill -9), or none of them is kept."""


@dataclass(frozen=True, slots=True)
class State:
    """A state that a disk may hold after it lost power behind `cut` operations."""

    log: Log = field(repr=False)
    cut: int
    seed: int
    keep: Keep = "some"
    holes: Holes = "either"

    @property
    def marks(self) -> list[str]:
        """Labels that the test had put into the log before the cut."""
        return [operation.label for operation in self.log.operations[: self.cut] if isinstance(operation, Marked)]


def states(log: Log, seed: int, count: int, *, after: str | None = None) -> Iterator[State]:
    """`count` states of this log, cut anywhere behind the mark `after`.

    Half of the cuts are beside a sync, a mark or a change of names. In one of ten nothing is lost, and in two of ten
    everything is that may be.
    """
    random = Random(seed)
    first = 0 if after is None else log.place_of(after) + 1
    corners = [
        place
        for place in range(first, len(log))
        if not isinstance(log.operations[place], Written | Resized | Allocated | Punched)
    ]
    for _ in range(count):
        cut = random.randint(first, len(log))
        if corners and random.random() < 0.5:
            cut = random.choice(corners) + random.randint(0, 1)
        keep: Keep = random.choices(["all", "none", "some"], [1, 2, 7])[0]  # type: ignore[assignment]
        yield State(log, cut, random.getrandbits(32), keep)


def materialize(state: State, target: Path) -> None:
    """Make the tree of this state in `target`, which is emptied first.

    Files are sparse where nothing was written. Several processes may do so with states of one log.
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    _Materialization(state, target).run()


def _forgets(operation: FileChange) -> tuple[int, int] | None:
    """The bytes whose blocks this takes away."""
    match operation:
        case Resized(size=size):
            return size, NEVER
        case Punched(offset=offset, size=size):
            return offset, offset + size
    return None


class _Materialization:
    def __init__(self, state: State, target: Path) -> None:
        self._state, self._target = state, target
        self._history = history_of(state.log)
        self._random = Random(state.seed)
        self._holes_are_garbage = state.holes == "garbage" or (state.holes == "either" and self._random.random() < 0.5)

    def run(self) -> None:
        self._make_directory(ROOT, self._target, self._entries(), set())

    # Names

    def _entries(self) -> dict[int, dict[str, int]]:
        """Return the names that each directory has left."""
        names, cut = self._history.names, self._state.cut
        number, floor = bisect_left(names, cut, key=lambda change: change[0]), self._history.name_floor(cut)
        entries: dict[int, dict[str, int]] = {}
        for _, change in names[: self._prefix(number - floor) + floor]:
            match change:
                case Made():
                    entries.setdefault(change.parent, {})[change.name] = change.file
                case Removed():
                    del entries[change.parent][change.name]
                case Renamed():
                    del entries[change.parent][change.name]
                    entries.setdefault(change.new_parent, {})[change.new_name] = change.file
        return entries

    def _make_directory(self, number: int, path: Path, entries: dict[int, dict[str, int]], above: set[int]) -> None:
        for name, file in entries.get(number, {}).items():
            made = self._history.made.get(file)
            if made is None or file in above:
                continue
            here = path / name
            if stat.S_ISDIR(made.mode):
                here.mkdir()
                self._make_directory(file, here, entries, above | {file})
                self._finish(here, made, self._play(file, None))
            else:
                self._make_file(here, made)

    def _make_file(self, path: Path, made: Made) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            changed = self._play(made.file, descriptor)
        finally:
            os.close(descriptor)
        self._finish(path, made, changed)

    def _finish(self, path: Path, made: Made, changed: Changed | None) -> None:
        latest = made if changed is None else changed
        if os.geteuid() == 0:
            os.chown(path, latest.uid, latest.gid)
        path.chmod(stat.S_IMODE(latest.mode))

    # Bytes

    def _play(self, file: int, descriptor: int | None) -> Changed | None:
        """Write what is there of this file, and give its last change of mode that is."""
        changes = self._history.files.get(file, [])
        changes = changes[: bisect_left(changes, self._state.cut, key=lambda change: change[0])]
        kept_in_order = self._orders_kept(changes)
        share = self._share()
        covered = Extents()  # what was written or allocated, so not a hole; kept for garbage alone
        missing: list[tuple[int, int]] = []  # what truncations and holes that are not there should have taken away
        size, mode = 0, None
        for place, change in changes:
            if place in kept_in_order and not kept_in_order[place] and not isinstance(change, Written):
                if (gone := _forgets(change)) is not None:
                    missing.append(gone)
                continue
            match change:
                case Changed():
                    mode = change
                case Written():
                    pieces = self._pieces(place, change, share, missing)
                    if descriptor is not None and not self._history.is_overwritten(place, self._state.cut):
                        self._write(descriptor, change, pieces, covered)
                    if kept_in_order.get(place, True):
                        size = size_after(change, size)
                case Resized():
                    assert descriptor is not None
                    os.ftruncate(descriptor, change.size)
                    covered.remove(change.size)
                    size = change.size
                case Punched():
                    assert descriptor is not None
                    punch(descriptor, change.offset, change.size)
                    covered.remove(change.offset, change.offset + change.size)
                case Allocated():
                    if self._holes_are_garbage:
                        assert descriptor is not None
                        for start, end in covered.gaps(change.offset, change.offset + change.size):
                            punch(descriptor, start, end - start)
                        covered.add(change.offset, change.offset + change.size)
                    size = size_after(change, size)
        if descriptor is not None:
            os.ftruncate(descriptor, size)
        return mode

    def _orders_kept(self, changes: list[tuple[int, FileChange]]) -> dict[int, bool]:
        """Return, for each change of size, blocks or mode that no sync covers, whether it is kept."""
        places = [
            place
            for place, change in changes
            if not self._is_covered(place) and (not isinstance(change, Written) or place in self._history.growing)
        ]
        length = self._prefix(len(places))
        return {place: index < length for index, place in enumerate(places)}

    def _pieces(
        self, place: int, write: Written, share: float, missing: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The parts of this write that are on the disk, as ranges of its bytes."""
        whole = [(0, write.size)]
        if self._is_covered(place):
            return whole
        end = write.offset + write.size
        lacks_room = any(low < end and write.offset < high for low, high in missing)
        chance = self._random.random()
        if not lacks_room and chance < share:
            return whole
        pieces: list[tuple[int, int]] = []
        if not lacks_room and share and chance < share + (1 - share) / 2:
            pieces = self._torn(write)
            if pieces == whole:
                return whole
        return pieces

    def _torn(self, write: Written) -> list[tuple[int, int]]:
        """Runs of sectors; small writes are torn anywhere, large ones in some places."""
        first = write.offset // SECTOR_BYTES
        count = -(-(write.offset + write.size) // SECTOR_BYTES) - first
        borders = sorted(
            {self._random.randrange(1, count) for _ in range(self._random.randint(1, 6))} if count > 1 else ()
        )
        is_there, pieces, start = self._random.random() < 0.5, [], 0
        for border in [*borders, count]:
            end = min((first + border) * SECTOR_BYTES - write.offset, write.size)
            if is_there:
                pieces.append((start, end))
            is_there, start = not is_there, end
        return pieces

    def _write(self, descriptor: int, write: Written, pieces: list[tuple[int, int]], covered: Extents) -> None:
        if self._holes_are_garbage and pieces != [(0, write.size)]:
            for start, end in covered.gaps(write.offset, write.offset + write.size):
                os.pwrite(descriptor, self._random.randbytes(end - start), start)
        data = self._state.log.written(write)
        for start, end in pieces:
            os.pwrite(descriptor, data[start:end], write.offset + start)
            if self._holes_are_garbage:
                covered.add(write.offset + start, write.offset + end)

    # Chance

    def _is_covered(self, place: int) -> bool:
        return self._history.is_covered(place, self._state.cut)

    def _share(self) -> float:
        """How likely it is that a thing is there; often none or all, so that files differ from each other."""
        if self._state.keep != "some":
            return float(self._state.keep == "all")
        return self._random.choice([0.0, 1.0, self._random.random(), self._random.random()])

    def _prefix(self, length: int) -> int:
        return round(self._share() * length)
