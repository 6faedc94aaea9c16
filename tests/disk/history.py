"""A log, sorted by files and directories, and the operations that a sync covers."""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

from tests.disk.log import (
    Allocated,
    Changed,
    FileChange,
    Log,
    Made,
    NameChange,
    Punched,
    Removed,
    Renamed,
    Resized,
    Settled,
    Synced,
    Written,
)

NEVER = 1 << 62


@dataclass(slots=True)
class History:
    names: list[tuple[int, NameChange]] = field(default_factory=list)
    """Changes of names, with their places in the log."""
    files: dict[int, list[tuple[int, FileChange]]] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    covered_at: dict[int, int] = field(default_factory=dict)
    """Place of the sync that covers an operation, by the operation's place. Names are covered by a directory's sync
    alone.
    """
    name_floors: list[tuple[int, int]] = field(default_factory=list)
    """(place of a sync, how many of `names` are on the disk from then on), both growing."""
    growing: set[int] = field(default_factory=set)
    """Places of writes that made their file longer."""
    again_at: dict[int, int] = field(default_factory=dict)
    """Place of the next write to the same bytes, by a write's place."""

    def is_covered(self, place: int, cut: int) -> bool:
        return self.covered_at.get(place, NEVER) < cut

    def is_overwritten(self, place: int, cut: int) -> bool:
        """Return whether a later write to the same bytes is on the disk at this cut in any case."""
        again = self.again_at.get(place)
        return again is not None and self.is_covered(again, cut)

    def name_floor(self, cut: int) -> int:
        before = bisect_left(self.name_floors, cut, key=lambda entry: entry[0])
        return self.name_floors[before - 1][1] if before else 0


def size_after(operation: FileChange, size: int) -> int:
    match operation:
        case Resized(size=new):
            return new
        case Written(offset=offset, size=length) | Allocated(offset=offset, size=length, keep_size=False):
            return max(size, offset + length)
    return size


@lru_cache(maxsize=4)  # by identity: a log has many states
def history_of(log: Log) -> History:
    reader = _Reader()
    for place, operation in enumerate(log.operations):
        match operation:
            case Made() | Removed() | Renamed():
                reader.name(place, operation)
            case Written() | Resized() | Allocated() | Punched() | Changed():
                reader.file(place, operation)
            case Synced(failed=True):
                reader.failed_sync(operation)
            case Synced():
                reader.sync(place, operation)
            case Settled():
                reader.settle(place)
    return reader.history


class _Reader:
    def __init__(self) -> None:
        self.history = History()
        self._unsynced: dict[int, list[int]] = {}
        self._unsynced_names: dict[int, list[int]] = {}
        self._doubtful: list[int] = []  # what a sync failed to cover
        self._named: dict[int, list[tuple[int, int]]] = {}  # directory or new file: (place, how many names then)
        self._modes: set[int] = set()  # which fdatasync does not cover
        self._sizes: dict[int, int] = {}
        self._writes: dict[tuple[int, int, int], int] = {}

    def name(self, place: int, change: NameChange) -> None:
        self.history.names.append((place, change))
        about = {change.parent}
        if isinstance(change, Renamed):
            about.add(change.new_parent)
        for directory in about:
            self._unsynced_names.setdefault(directory, []).append(place)
        if isinstance(change, Made):
            self.history.made[change.file] = change
            about.add(change.file)
        for number in about:
            self._named.setdefault(number, []).append((place, len(self.history.names)))

    def file(self, place: int, change: FileChange) -> None:
        self.history.files.setdefault(change.file, []).append((place, change))
        self._unsynced.setdefault(change.file, []).append(place)
        size = self._sizes.get(change.file, 0)
        self._sizes[change.file] = size_after(change, size)
        if isinstance(change, Changed):
            self._modes.add(place)
        if isinstance(change, Written):
            if change.offset + change.size > size:
                self.history.growing.add(place)
            target = change.file, change.offset, change.size
            if target in self._writes:
                self.history.again_at[self._writes[target]] = place
            self._writes[target] = place

    def sync(self, place: int, sync: Synced) -> None:
        for pending in (self._unsynced, self._unsynced_names):
            places = pending.get(sync.file, [])
            last = bisect_left(places, sync.start)
            left_out = [each for each in places[:last] if sync.data_only and each in self._modes]
            self._cover([each for each in places[:last] if each not in left_out], place)
            places[:last] = left_out
        named = self._named.get(sync.file, [])
        number = bisect_left(named, (sync.start, 0))
        if number:
            self._raise_floor(place, named[number - 1][1])

    def failed_sync(self, sync: Synced) -> None:
        places = self._unsynced.get(sync.file, [])
        number = bisect_left(places, sync.start)
        self._doubtful += places[:number]
        self._unsynced[sync.file] = places[number:]

    def settle(self, place: int) -> None:
        for places in (self._doubtful, *self._unsynced.values(), *self._unsynced_names.values()):
            self._cover(places, place)
        self._doubtful.clear()
        self._unsynced.clear()
        self._unsynced_names.clear()
        self._raise_floor(place, len(self.history.names))

    def _cover(self, places: list[int], at: int) -> None:
        for place in places:  # a rename is in two directories, and the first one that is synced has it
            self.history.covered_at.setdefault(place, at)

    def _raise_floor(self, place: int, number: int) -> None:
        floors = self.history.name_floors
        floors.append((place, max(number, floors[-1][1]) if floors else number))
