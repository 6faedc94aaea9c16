"""Journal: changes that the index lacks. The journal consists of operations on names, oldest first, and of inodes that
differ from their rows.

A commit takes changes (`prefix`, `closure`), and gives them back if it fails. The oldest operations are taken first, so
that a crash leaves a state that the tree once had. An operation that gives a name to a file waits until the entries
that the file had at that moment are on disk, or until the first sync of a new plain file is over. Later operations wait
behind it. Only a sync overtakes them: its commit takes all operations that its inode depends on. So an fsync never
waits for the bytes of another file.

A file without names is gone, and its entries will never be on disk. So its names are removed from the operations that
gave them (`settle`). Until the operation that removed such a name is committed, the name in the index leads to the same
file as before.

An operation also records that a directory becomes a domain or stops being one, in order with the operations on its
names. So no crash leaves a file with names on both sides of a domain's boundary.
"""

from __future__ import annotations

import math
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice, pairwise, takewhile
from typing import Any, Protocol, TypeAlias

from kvfs.base.bell import Bell
from kvfs.names.content import KvFile
from kvfs.names.inode import OWN_NAME, SOME_NAMES, Changes, Inode, NamePut
from kvfs.names.plain import PlainFile
from kvfs.pages.accounts import AccountLimits

OPERATIONS_A_CUT = 32
"""The most operations that an ordinary cut takes. A fork takes 30 µs of the trio thread, so the cut takes less time
than the commit, even if all operations are forks.
"""

OPERATIONS_A_SLICE = 512
"""The most operations that a cut takes for syncs, and that a sync looks at. An operation other than a fork takes about
10 µs.
"""

LOOKED_AT = 4 * OPERATIONS_A_SLICE
"""Operations that one call of `apart` looks at to find ready operations."""

DIRTY_LOOKED_AT = 512
"""Dirty inodes that a cut looks at."""

DIRECTORIES_ABOVE = 128
"""Levels of directories above a file in which a sync looks for renamed directories. A tree may be deeper."""

_Thing: TypeAlias = Inode | tuple[Inode] | tuple[int, bytes]
_NONE: dict[int, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class NameChange:
    """An operation on names."""

    number: int
    """Serial number in the order of all operations."""
    puts: tuple[NamePut, ...]
    previous: list[int]
    """For each put, the serial number of the preceding operation on the same name; 0: the index has all earlier
    operations on the name.
    """
    since: int
    """Serial number of the first change that the operation stands for. Ordinarily this is the operation's own number.
    After a `_join` with an earlier operation, it is the number of the earlier operation.
    """
    limits: AccountLimits | None = None
    """The limits before the operation, if a directory becomes a domain or stops being one."""

    def place_of(self, key: tuple[int, bytes]) -> int:
        """Return the index of the put on this name, or -1."""
        return next((place for place, put in enumerate(self.puts) if put.key == key), -1)

    @property
    def things(self) -> set[_Thing]:
        """Names, inodes and (as tuples) directories that the operation concerns."""
        found: set[_Thing] = set()
        for put in self.puts:
            found.update((put.key, (put.directory,)))
            found.update(inode for inode in (put.before, put.after) if inode is not None)
        return found


class Directories(Protocol):
    """Directories by number. The tree satisfies this."""

    def get(self, number: int) -> Inode: ...


class Journal(Changes):
    """The changes of one tree."""

    def __init__(
        self,
        directories: Callable[[], Directories],
        a_cut: int = OPERATIONS_A_CUT,
        a_slice: int = OPERATIONS_A_SLICE,
    ) -> None:
        """`directories` returns the tree. The tree does not exist yet, because it is made together with its journal."""
        self._directories = directories
        self.a_cut, self.a_slice = a_cut, a_slice
        """How many of the oldest operations a cut takes: `a_cut` ordinarily, `a_slice` if a sync depends on more than
        `a_slice` operations.
        """
        self.dirty: dict[Inode, int] = {}
        """Dirty inodes, each with the number of the first change that the index lacks."""
        self.waiting: set[Inode] = set()
        """Dirty inodes that a commit has written without the bytes or entries that were not on disk yet."""
        self.operations: dict[int, NameChange] = {}
        """Operations by number, oldest first."""
        self._about: dict[_Thing, dict[int, NameChange]] = {}
        """Operations by the things that they concern: names, inodes, or (as tuples) directories of names."""
        self.left_out: dict[Inode, str] = {}
        """Inodes that a commit could not write, each with the error. Names of such an inode are not committed
        meanwhile.
        """
        self.noted: dict[Inode, None] = {}
        """Inodes that have large attributes in memory, or had some at the last commit."""
        self.gone_xattrs: set[int] = set()
        """Inodes that are gone, and whose attributes have a row of their own. An inode stays in this set until the
        index has neither the inode nor that row.
        """
        self.number = 0
        """Serial number of the last change, of any kind."""
        self.bell = Bell()
        """Rings when changes that no call waits for have to be written back."""
        self._gone: dict[Inode, None] = {}
        """Files that are gone, and may still have names in operations."""
        self._settling: list[tuple[Inode, int]] = []
        """The operations that `settle` looks at next: pairs of a file that is gone and the serial number of an
        operation that concerns the file.
        """
        self._delayed: list[tuple[int, int]] = []
        """Heap of pairs (since, number) of operations that also stand for an earlier operation. Some of them may be
        committed already.
        """
        self._pass: list[int] = []
        """Serial numbers of the operations that the pass of `apart` has not looked at yet, in reverse order."""
        self.num_passes = 0
        """Number of completed passes of `apart` over all operations."""
        self._dirty_pass: list[Inode] = []
        """Inodes that the pass of `others` has not looked at yet, in reverse order."""
        self.num_dirty_passes = 0
        """Number of completed passes of `others` over all dirty inodes."""
        self._counts = _Counts()
        self._held = _Held()

    # Methods of `Changes`

    def of_inode(self, inode: Inode) -> None:
        self.waiting.discard(inode)
        if inode.xattrs.held_bytes and not is_gone(inode):
            self.noted[inode] = None
        if inode not in self.dirty and (inode.names or inode.parent is not None):
            self.number += 1
            self._make_dirty(inode, self.number)
            if len(self.dirty) == 1:
                self.bell.ring()

    def of_rest(self, inode: Inode) -> None:
        """Note that a commit has written an inode without the bytes or entries that were not on disk yet."""
        if inode not in self.dirty:
            self.of_inode(inode)
            self.waiting.add(inode)

    def of_names(self, puts: tuple[NamePut, ...]) -> None:
        self._note(puts)
        self._gone |= {put.before: None for put in puts if put.before is not None and _is_gone_file(put.before)}

    def of_domain(self, directory: Inode, limits: AccountLimits | None) -> None:
        self._note((NamePut(directory, OWN_NAME, directory, directory, None, 0),), limits)

    def _note(self, puts: tuple[NamePut, ...], limits: AccountLimits | None = None) -> None:
        self.number += 1
        previous = [next(reversed(self._about.get(put.key, _NONE)), 0) for put in puts]
        self._add(NameChange(self.number, puts, previous, self.number, limits))
        if len(self.operations) == 1:
            self.bell.ring()

    def of_xattrs_gone(self, inode: Inode) -> None:
        self.gone_xattrs.add(inode.number)
        self.bell.ring()

    # Changes for a commit

    @property
    def is_empty(self) -> bool:
        return not self.dirty and not self.operations

    @contextmanager
    def counting(self) -> Iterator[Callable[[], int]]:
        """Yield a function that returns how many changes from before this call the index still lacks."""
        number = self.number
        self._counts.mark(number)
        try:
            yield lambda: self._counts.up_to(number) + self.has_operation(number)
        finally:
            self._counts.unmark(number)

    def has_operation(self, number: int) -> bool:
        """Whether the index lacks an operation with this serial number or a lower number."""
        while self._delayed:
            since, delayed = self._delayed[0]
            if delayed in self.operations and self.operations[delayed].since == since:
                break
            heappop(self._delayed)
        first = next(iter(self.operations), number + 1)
        return first <= number or bool(self._delayed and self._delayed[0][0] <= number)

    def concerns(self, inode: Inode, number: int) -> bool:
        """Return whether the index lacks changes up to `number` that concern an inode, its names, or, if the inode is a
        directory, the names in it. If the changes are too many for one cut to look at, return True.
        """
        if inode.names or inode.parent is not None:
            since = self.dirty.get(inode)
            if since is not None and since <= number:
                return True
            if self.has_operation(number):
                found = self.closure([inode], most=self.a_slice)
                return len(found) > self.a_slice or any(change.since <= number for change in found)
        return False

    def is_long(self, inode: Inode) -> bool:
        """Whether a sync of the inode needs more operations than one cut takes for syncs."""
        return len(self.closure([inode], most=self.a_slice)) > self.a_slice

    def prefix(self, is_ready: Callable[[NamePut], bool], most: int) -> list[NameChange]:
        """Return the oldest operations, at most `most`. The list ends before the first operation that is not ready."""
        first = islice(self.operations.values(), most)
        return list(takewhile(lambda change: all(map(is_ready, change.puts)), first))

    def apart(self, is_ready: Callable[[NamePut], bool], most: int) -> list[NameChange]:
        """Return ready operations, at most `most`, that depend only on ready operations.

        On a full disk, a removal must be committed even if an older operation names a file that does not fit. Otherwise
        no room would become free. So a file that can't be written holds up only operations that depend on it. A plain
        file that awaits its first sync is not overtaken: the list ends before its operation. One call looks at
        LOOKED_AT operations, and the next call continues after them.
        """
        taken: list[NameChange] = []
        is_new = False
        for _ in range(LOOKED_AT):
            if not self._pass:
                if taken or is_new:
                    break
                self._pass, self._held, is_new = [*reversed(self.operations)], _Held(), True
            if len(taken) >= most or not self._pass:
                break
            change = self.operations.get(self._pass[-1])
            is_held = change is not None and (self._held.holds(change) or self.waits(change))
            if change is not None and not is_held and any(is_awaited(put.after) for put in change.puts):
                break
            self._pass.pop()
            self.num_passes += not self._pass
            if change is None:
                continue
            if is_held or not all(map(is_ready, change.puts)):
                self._held.add(change)
            else:
                taken.append(change)
        return taken

    def others(self, may_be_taken: Callable[[Inode], bool], most: int) -> list[Inode]:
        """Return dirty inodes, at most `most`, for a cut. One call looks at DIRTY_LOOKED_AT inodes, and the next call
        continues after them.
        """
        taken: list[Inode] = []
        if not most:
            return taken
        self._dirty_pass = self._dirty_pass or [*reversed(self.dirty)]
        for _ in range(min(DIRTY_LOOKED_AT, len(self._dirty_pass))):
            inode = self._dirty_pass.pop()
            if inode in self.dirty and inode not in self.left_out and may_be_taken(inode):
                taken.append(inode)
                if len(taken) == most:
                    break
        self.num_dirty_passes += not self._dirty_pass
        return taken

    @property
    def last_dirty_pass(self) -> int:
        """Value that `num_dirty_passes` will have when `others` has looked at all inodes that are dirty now."""
        return self.num_dirty_passes + 1 + bool(self._dirty_pass)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass of `apart` has begun and is not complete."""
        return bool(self._pass)

    def end_pass(self) -> None:
        """End the pass of `apart`. The next call of `apart` begins with the oldest operation."""
        self._pass = []

    def settle(self) -> bool:
        """Forget files that no longer exist: remove their names from at most `a_slice` of the operations that gave
        these names. Return whether such operations may be left.
        """
        for _ in range(self.a_slice):
            if not self._settling:
                if not self._gone:
                    return False
                inode = next(iter(self._gone))
                del self._gone[inode]
                self._settling = [(inode, number) for number in self._about.get(inode, _NONE)]
                continue
            inode, number = self._settling.pop()
            change = self.operations.get(number)
            for put in () if change is None else change.puts:
                if put.before is inode:
                    self._join(number, put.key, inode)
        return True

    def _join(self, number: int, key: tuple[int, bytes], inode: Inode) -> None:
        """Join the operation that gave a name to a file with the operation that took the name away, because the file is
        gone.

        If the first operation exchanged two names, the name leads nowhere between the two operations, because the file
        that the name led to before has got the other name.
        """
        last = self.operations[number]
        place = last.place_of(key)
        first = self.operations.get(last.previous[place])
        if first is None or (place_in_first := first.place_of(key)) < 0:
            return  # the operation that gave the name is in the index
        given = first.puts[place_in_first]
        assert given.after is inode
        before = given.before
        if before is not None and any(put.after is before for put in first.puts if put is not given):
            self._replace(first, place_in_first, replace(given, after=None, content=None, length=0))
            before = None
        else:
            self._replace(first, place_in_first, None)
        taken = replace(last.puts[place], before=before)
        self._replace(
            last,
            place,
            None if taken.before is taken.after is None else taken,
            previous=first.previous[place_in_first],
            since=min(last.since, first.since),
        )
        if before is inode:
            self._join(number, key, inode)  # in between, the name led to another file that is gone too

    def _replace(
        self, old: NameChange, place: int, put: NamePut | None, *, previous: int | None = None, since: int | None = None
    ) -> None:
        """Replace a put of an operation, or remove it if `put` is None."""
        puts, numbers = [*old.puts], [*old.previous]
        puts[place : place + 1] = [] if put is None else [put]
        numbers[place : place + 1] = [] if put is None else [numbers[place] if previous is None else previous]
        if not puts:
            self._remove(old)
            return
        new = NameChange(old.number, tuple(puts), numbers, old.since if since is None else since)
        self.operations[new.number] = new
        for thing in new.things:
            self._about.setdefault(thing, {})[new.number] = new
        for thing in old.things - new.things:
            self._remove_about(thing, old)
        if new.since < old.since:
            heappush(self._delayed, (new.since, new.number))
        if self._pass:
            self._held.add(new)

    def closure(
        self, wanted: Sequence[Inode], besides: Container[int] = frozenset(), most: float = math.inf
    ) -> list[NameChange]:
        """Return the operations that the names of some inodes depend on, oldest first. Operations in `besides` are left
        out.

        The names of a directory include the names in the directory. The search ends after more than `most` operations.

        The search visits up to DIRECTORIES_ABOVE levels of directories above an inode, and only some of an inode's
        names. A directory beyond these limits is found through the operation that made it, if the index lacks that
        operation.

        An operation that takes a name from a wanted inode, or from a directory above it, includes the operations on the
        directory of that name, because until its commit a crash leaves the inode in that directory.

        If a directory is gone, becomes a domain or stops being one, operations on the names in it are included, so that
        no name is left in the directory. An operation on one name of a file includes the operations on its other names.
        Otherwise the file could be lost with an old name.
        """
        heights: dict[Inode, int] = {}
        """For each visited inode, how many levels the inode lies above the inode at which the search began."""
        get, seen = self._directories().get, set[_Thing]()
        chosen: dict[int, NameChange] = {}
        above = {*wanted, *self.directories_above(wanted)}
        waiting: list[_Thing] = [(inode,) for inode in wanted if inode.is_directory]

        def meet(inode: Inode | None, height: int = 0) -> None:
            if inode is not None and inode not in heights and height < DIRECTORIES_ABOVE:
                heights[inode] = height
                waiting.append(inode)

        for inode in wanted:
            meet(inode)
        while waiting:
            thing = waiting.pop()
            if thing in seen:
                continue
            seen.add(thing)
            if isinstance(thing, Inode):
                if thing.is_directory and is_gone(thing):
                    waiting.append((thing,))
                for directory, _ in islice(thing.names, SOME_NAMES):
                    meet(get(directory), heights[thing] + 1)
            for number, change in self._about.get(thing, _NONE).items():
                if number in chosen or number in besides:
                    continue
                if len(chosen) > most:
                    return [*chosen.values()]
                chosen[number] = change
                for put in change.puts:
                    waiting.append(put.key)
                    if put.is_of_domain:
                        waiting.append((put.directory,))
                    meet(put.before)
                    if put.after is not None:
                        meet(put.after)
                        meet(put.directory)
                    elif put.before in above and not is_gone(put.directory):
                        meet(put.directory)
        return [chosen[number] for number in sorted(chosen)]

    def directories_above(self, inodes: Iterable[Inode]) -> list[Inode]:
        """Return the directories above inodes, up to DIRECTORIES_ABOVE levels, because their rows have the limits of
        domains.
        """
        get, found = self._directories().get, set[Inode]()
        waiting = [*inodes]
        for _ in range(DIRECTORIES_ABOVE):
            waiting = [each for each in dict.fromkeys(waiting) if each not in found]
            found.update(waiting)
            waiting = [get(number) for each in waiting for number, _ in islice(each.names, SOME_NAMES)]
        return [*found.difference(inodes)]

    def _make_dirty(self, inode: Inode, since: int) -> None:
        self.dirty[inode] = since
        self._counts.add(since)

    def _add(self, change: NameChange) -> None:
        self.operations[change.number] = change
        self._counts.add(change.number)
        for thing in change.things:
            self._about.setdefault(thing, {})[change.number] = change

    def _remove(self, change: NameChange) -> None:
        del self.operations[change.number]
        self._counts.add(change.number, -1)
        for thing in change.things:
            self._remove_about(thing, change)

    def _remove_about(self, thing: _Thing, change: NameChange) -> None:
        about = self._about[thing]
        del about[change.number]
        if not about:
            del self._about[thing]

    def take(self, changes: Iterable[NameChange], inodes: Iterable[Inode]) -> dict[Inode, int]:
        """Remove changes and inodes from the journal for a commit. Return the inodes in the form that `give_back`
        takes.
        """
        for change in changes:
            self._remove(change)
        return {inode: self._pop_dirty(inode, 0) for inode in inodes}

    def _pop_dirty(self, inode: Inode, default: int) -> int:
        self.waiting.discard(inode)
        since = self.dirty.pop(inode, None)
        if since is None:
            return default
        self._counts.add(since, -1)
        return since

    def give_back(self, changes: Sequence[NameChange], inodes: dict[Inode, int]) -> None:
        """Take back the changes and inodes of a failed commit."""
        if changes:
            for change in changes:
                self._add(change)
                if change.since < change.number:
                    heappush(self._delayed, (change.since, change.number))
                self._gone |= {
                    put.after: None for put in change.puts if put.after is not None and _is_gone_file(put.after)
                }
            self.operations = dict(sorted(self.operations.items()))
            for key in {put.key for change in changes for put in change.puts}:
                self._about[key] = dict(sorted(self._about[key].items()))
                for before, change in pairwise(self._about[key].values()):
                    change.previous[change.place_of(key)] = before.number  # the operation that was in the commit
            self._pass = []
        for inode, since in inodes.items():
            if inode.names or inode.parent is not None:
                self._make_dirty(inode, min(since, self._pop_dirty(inode, since)))

    def first_operations(self) -> list[NameChange]:
        """Return the operations that the next commit may take."""
        numbers = reversed(self._pass[-LOOKED_AT:]) if self._pass else islice(self.operations, LOOKED_AT)
        changes = (self.operations[number] for number in numbers if number in self.operations)
        return list(islice((change for change in changes if not self.waits(change)), self.a_cut))

    def waits(self, change: NameChange) -> bool:
        """Return whether an operation gives a name to a file that can't be written."""
        return any(put.after in self.left_out for put in change.puts)

    def limits_of(self, directory: Inode) -> AccountLimits | None:
        """Return the limits that a domain had before its first operation that the index lacks. None: the directory was
        not a domain.
        """
        first: NameChange | None = next(iter(self._about.get((directory.number, OWN_NAME), _NONE).values()), None)
        if first is not None:
            return first.limits
        return None if directory.domain is None else directory.domain.limits

    def look_at_noted(self) -> None:
        """Remove from `noted` the inodes that are gone, or that have no large attributes in memory any more."""
        self.noted = dict.fromkeys(each for each in self.noted if each.xattrs.held_bytes and not is_gone(each))

    def first_dirty(self, count: int) -> list[Inode]:
        """Return the writable inodes that have been dirty longest."""
        return list(islice((inode for inode in self.dirty if inode not in self.left_out), count))


class _Counts:
    """Counts of the changes that the index lacks, up to given serial numbers of changes. These serial numbers are the
    marks.
    """

    def __init__(self) -> None:
        self._marks: list[int] = []
        """Marks in ascending order."""
        self._counts = [0]
        """For each mark, the number of changes since the mark before it. The last item counts the changes after all
        marks.
        """

    def add(self, number: int, count: int = 1) -> None:
        self._counts[bisect_left(self._marks, number)] += count

    def mark(self, number: int) -> None:
        """Count changes up to this number from now on."""
        self._marks.append(number)
        self._counts.append(0)

    def up_to(self, number: int) -> int:
        return sum(self._counts[: bisect_right(self._marks, number)])

    def unmark(self, number: int) -> None:
        place = bisect_left(self._marks, number)
        del self._marks[place]
        self._counts[place] += self._counts.pop(place + 1)


class _Held:
    """Names, inodes and directories of operations that are held back. Later operations on them are held back, too."""

    def __init__(self) -> None:
        self.keys: set[tuple[int, bytes]] = set()
        self.inodes: set[Inode] = set()
        self.directories: set[Inode] = set()

    def holds(self, change: NameChange) -> bool:
        return any(
            put.key in self.keys
            or put.directory in self.inodes
            or put.before in self.inodes
            or put.before in self.directories
            or put.after in self.inodes
            for put in change.puts
        )

    def add(self, change: NameChange) -> None:
        for put in change.puts:
            self.keys.add(put.key)
            self.directories.add(put.directory)
            self.inodes.update(inode for inode in (put.before, put.after) if inode is not None)


def is_gone(inode: Inode) -> bool:
    """Whether the inode has lost its last name."""
    return not inode.names and inode.parent is not inode


def is_awaited(inode: Inode | None) -> bool:
    """Whether names of an inode wait for the first sync of its bytes."""
    return inode is not None and isinstance(inode.content, PlainFile) and inode.content.is_awaited


def entries_needed(put: NamePut) -> int:
    """Return how many entries must be on disk before the name may lead to the file."""
    if put.after is None or not stat.S_ISREG(put.after.file_type):
        return 0
    kv = put.after.content
    if not isinstance(kv, KvFile):
        return 0
    return min(put.length if put.content is kv else kv.born_length, kv.table.length)


def _is_gone_file(inode: Inode) -> bool:
    return is_gone(inode) and not inode.is_directory
