"""Names that a crash may leave: those after the first k operations, and after operations that overtook with fsyncs.

The operations that must have happened are found from below. A name that leads where only a later operation can have put
it proves that operation; so do syncs that have returned. An operation has happened as a whole, after all that it
depends on. Then k is the last operation that no fsync can have taken along. If any of them puts a name where it is not,
no promise allows the names.

A name of a file that is gone by now may lead where it led before: the file leaves the journal with all its names. A
sync that has made the name durable rules that out, unless the file was gone before the sync returned.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.kvfs.durable.events import Key, Operation, Sync


class NamesThatAreThere:
    """Finds which operations have happened; AssertionError: these names can't be."""

    def __init__(
        self,
        base: Mapping[Key, int],
        operations: Sequence[Operation],
        syncs: Iterable[Sync],
        found: Mapping[Key, int],
        now: int,
        directories: Iterable[int],
        *,
        is_ordered: bool = True,
    ) -> None:
        """`base`: the names before all operations; `found`: those that came back; `now`: the last event.

        `directories`: which inodes are some.

        Not `is_ordered`: the disk was full, and what is ready has overtaken what it had no room for.
        """
        self._is_ordered = is_ordered
        self._base, self._found, self._now = base, found, now
        whole = [each for each in operations if each.moment <= now]
        last = {**base, **{put.key: put.after for each in whole for put in each.puts}}
        self.gone = {put.after for each in whole for put in each.puts} | {*base.values()} - {None}
        """Files that no name leads to any more, in the end: nothing depends on what their names were."""
        self.gone -= {*last.values(), *directories}
        self._operations = [part for each in whole for part in self._parts(each)]
        self._last = {inode: each.moment for each in whole for inode in each.inodes}
        """Moment of the last operation on each inode."""
        self._moves = {(each.moment, put.after) for each in whole for put in each.puts}
        """Pairs of a moment and the inode that got a name then."""
        self._syncs = [each for each in syncs if each.begun <= now]
        self._above = {sync: self._promised_above(sync) for sync in self._syncs}
        self._chains: dict[Key, list[Operation]] = {}
        """Operations on each name, in order."""
        self._directories: dict[int, set[int]] = {}
        """Directories in which an inode has ever been."""
        for (directory, _), inode in base.items():
            self._directories.setdefault(inode, set()).add(directory)
        for operation in self._operations:
            for put in operation.puts:
                self._chains.setdefault(put.key, []).append(operation)
                if put.after is not None:
                    self._directories.setdefault(put.after, set()).add(put.key[0])
        self._places: dict[Key, int] = {}
        """Number of operations on a name that have happened."""
        self._because: dict[Operation, str] = {}
        """Operations that have happened, and why that is known."""
        self._durable: set[Operation] = set()
        """Operations that syncs have made durable."""
        self._floors: dict[Key, int] = {}
        """Number of operations on a name, up to the last durable one."""

    def happened(self) -> list[Operation]:
        """Return the operations that must have happened, in order."""
        for key in self._chains.keys() | self._base.keys() | self._found.keys():
            self._reach(key, 0, f"{_shown(key)} leads to {self._found.get(key)}")
        for sync in self._syncs:
            if sync.is_over(self._now) and (sync.number is None or sync.promises(sync.number)):
                for operation in self._operations:
                    if self._is_promised(operation, sync):
                        self._has_happened(operation, f"{sync} returned 0", sync)
        taken_along = self._taken_along() if self._is_ordered else set(self._operations)
        first = 0
        while strange := [
            each
            for each in self._operations
            if each.moment > first and each in self._because and each not in taken_along
        ]:
            first = strange[-1].moment
            for operation in self._operations:
                if operation.moment <= first:
                    self._has_happened(operation, f"it is before what nobody synced, {strange[-1]}")
        return [each for each in self._operations if each in self._because]

    def _parts(self, operation: Operation) -> Iterator[Operation]:
        """Split an operation into parts that happen at once: a name that is about gone files alone stands by itself."""
        rest = tuple(put for put in operation.puts if {put.before, put.after} - {None} - self.gone)
        if rest:
            yield Operation(operation.moment, rest)
        for put in operation.puts:
            if put not in rest:
                yield Operation(operation.moment, (put,))

    def _reach(self, key: Key, least: int, why: str) -> None:
        """Mark operations on a name as happened, `least` or more: as many as lead to where the name leads."""
        chain = self._chains.get(key, [])
        for place in range(max(least, self._places.get(key, 0)), len(chain) + 1):
            if self._found.get(key) in self._values(key, place):
                self._places[key] = place
                for operation in chain[:place]:
                    self._has_happened(operation, why)
                return
        raise AssertionError(
            f"{_shown(key)} leads to {self._found.get(key)}. It led to {self._base.get(key)}, then\n"
            + "".join(f"  {operation}\n" for operation in chain)
            + f"and {least} of these have happened, since {why}.\n"
            + "What has happened:\n"
            + "".join(f"  {each}, since {self._because[each]}\n" for each in self._operations if each in self._because)
            + "What came back:\n"
            + "".join(f"  {_shown(key)}: {number}\n" for key, number in sorted(self._found.items()))
        )

    def _value(self, key: Key, place: int) -> int | None:
        if not place:
            return self._base.get(key)
        return next(put.after for put in self._chains[key][place - 1].puts if put.key == key)

    def _values(self, key: Key, place: int) -> Iterator[int | None]:
        """Yield the inodes that a name may lead to after this many of its operations; None: no inode."""
        value = self._value(key, place)
        yield value
        while value in self.gone and place > self._floors.get(key, 0):
            place -= 1
            value = self._value(key, place)
            if (self._chains[key][place].moment, value) in self._moves:  # the two were exchanged
                if value in self.gone:
                    yield value  # the journal may have forgotten the other half first
                value = None
            yield value

    def _has_happened(self, operation: Operation, why: str, sync: Sync | None = None) -> None:
        """Mark an operation as happened. `sync`: the sync that has promised it."""
        if operation in self._because and (operation in self._durable or sync is None):
            return
        self._because.setdefault(operation, why)
        if sync is not None:
            self._durable.add(operation)
            for put in operation.puts:
                if not self._was_gone(put.after, sync):  # else the journal had forgotten the name
                    place = self._chains[put.key].index(operation) + 1
                    self._floors[put.key] = max(place, self._floors.get(put.key, 0))
        for each in self._operations:
            if each is operation:
                break
            if self._depends(operation, each):
                self._has_happened(each, f"{operation} depends on it, and {why}", sync)
        for put in operation.puts:
            self._reach(put.key, self._chains[put.key].index(operation) + 1, f"{operation} has happened, for {why}")

    def _was_gone(self, inode: int | None, sync: Sync) -> bool:
        """Return whether a file was gone when a sync returned 0."""
        return inode is not None and inode in self.gone and self._last[inode] <= (sync.ended or self._now)

    def _depends(self, operation: Operation, earlier: Operation) -> bool:
        """Whether it makes no sense without an earlier one: of its files or directories, or in one that goes."""
        named = {put.key[0] for put in operation.puts if put.after is not None and put.after not in self.gone}
        if earlier.inodes & (operation.inodes - self.gone | named):
            return True
        gone = {put.before for put in operation.puts if put.before is not None and put.after != put.before}
        named_again = {put.after for put in operation.puts}
        return any(put.key[0] in (gone - named_again) | operation.bounded for put in earlier.puts)

    # What may overtake

    def _taken_along(self) -> set[Operation]:
        """Return operations that fsyncs may have taken along: those not surely on disk when the fsync began."""
        on_disk: set[Operation] = set()
        over = sorted((sync for sync in self._syncs if sync.ended is not None), key=lambda sync: sync.ended or 0)
        taken: set[Operation] = set()
        for sync in self._syncs:
            while over and (over[0].ended or 0) <= sync.begun:
                on_disk |= self._promised(over.pop(0))
            if sync.number is not None:
                last = self._now if sync.ended is None else sync.ended
                pending = [each for each in self._operations if each.moment <= last and each not in on_disk]
                taken |= self._connected(pending, {sync.number, *sync.above}, sync.number)
        return taken

    def _connected(self, pending: Sequence[Operation], inodes: set[int], listed: int) -> set[Operation]:
        """The most that one fsync may commit: what is about these inodes or in that directory, all that hangs on that,
        and where the directories of those files lie.
        """
        keys: set[Key] = set()
        directories = {listed}
        found: set[Operation] = set()
        is_growing = True
        while is_growing:
            is_growing = False
            for operation in pending:
                is_near = any(put.key in keys or put.key[0] in directories for put in operation.puts)
                if operation not in found and (is_near or operation.inodes & inodes):
                    is_growing = True
                    found.add(operation)
                    keys |= {put.key for put in operation.puts}
                    inodes |= self._with_directories(operation.inodes | operation.directories)
                    gone = {put.before for put in operation.puts if put.before is not None and put.after is None}
                    directories |= gone | operation.bounded
        return found

    def _with_directories(self, inodes: set[int]) -> set[int]:
        """Return these inodes with all directories that they have ever been in."""
        found: set[int] = set()
        waiting = inodes
        while waiting:
            found |= waiting
            waiting = {each for inode in waiting for each in self._directories.get(inode, ())} - found
        return found

    def _promised(self, sync: Sync) -> set[Operation]:
        """Return the operations that are on disk since a sync has returned 0."""
        promised: set[Operation] = set()
        if sync.number is None or sync.promises(sync.number):
            for operation in reversed(self._operations):
                is_needed = any(self._depends(each, operation) for each in promised)
                if self._is_promised(operation, sync) or (is_needed and operation.moment <= sync.begun):
                    promised.add(operation)
        return promised

    def _is_promised(self, operation: Operation, sync: Sync) -> bool:
        is_given = all(put.before is None for put in operation.puts)
        is_left_out = is_given and operation.inodes <= sync.unnamed & self.gone
        return operation.moment <= sync.begun and not is_left_out and self._is_about(operation, sync)

    def _is_about(self, operation: Operation, sync: Sync) -> bool:
        """Whether an operation is part of what is called a file, its names, or the names in a directory."""
        if sync.number is None or operation.inodes & {sync.number, *self._above[sync]}:
            return True
        return any(put.key[0] == sync.number for put in operation.puts)

    def _promised_above(self, sync: Sync) -> set[int]:
        """Return the directories whose names a sync has promised: those that the file lay in, unless it left them
        before the sync returned, and is found elsewhere.
        """
        above, waiting = set[int](), [sync.number]
        while waiting:
            parents = {directory for (directory, _), child in self._found.items() if child in waiting}
            waiting = [*parents - above]
            above |= parents
        return set(sync.above & (sync.above_at_end | above))


def _shown(key: Key) -> str:
    return f"{key[0]}/{key[1].decode(errors='replace')}"
