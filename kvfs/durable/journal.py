"""Journal: operations on names, in order, and inodes that differ from their rows: changes that the index lacks.

A commit takes changes (`prefix`, `closure`), and gives them back if it fails. Operations are taken from the front, so
that a crash leaves a state that the tree has had. An operation that gives a file a name waits until the entries that
the file had at that moment are on disk. Later operations wait behind it. Only a sync overtakes them, with all that its
inode depends on: an fsync waits for no other file's bytes.

A file that is gone takes its names out of the operations that gave them (`settle`). Entries of such a file will never
be on disk. Until the operation that took a name away, the name leads where it led before.
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

from kvfs.bell import Bell
from kvfs.names.content import KvFile
from kvfs.names.inode import OWN_NAME, SOME_NAMES, Changes, Inode, NamePut
from kvfs.pages.accounts import Limits

OPERATIONS_A_CUT = 32
"""Operations that a cut takes at once: a fork takes 30 µs, and nothing else runs meanwhile. A commit takes longer."""

OPERATIONS_A_SLICE = 512
"""Operations that a cut takes for syncs, and a sync looks at: without a fork, an operation takes some 10 µs."""

LOOKED_AT = 4 * OPERATIONS_A_SLICE
"""Operations that are looked at for a cut that takes ready ones apart from unready ones."""

DIRTY_LOOKED_AT = 512
"""Dirty inodes that are looked at for a cut."""

DIRECTORIES_ABOVE = 128
"""Levels that a sync looks up for renames of directories around a file: a tree may be deeper."""

_Thing: TypeAlias = Inode | tuple[Inode] | tuple[int, bytes]
_NONE: dict[int, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class NameChange:
    """An operation on names."""

    number: int
    """In the order of all operations."""
    puts: tuple[NamePut, ...]
    previous: list[int]
    """For each put, the operation that the name was changed by before; 0: none that is not kept yet."""
    since: int
    """The first change that it stands for: its own, or one that gave a name to a file that is gone by now."""
    limits: Limits | None = None
    """Of a directory that becomes a domain or stops being one: those that it had before."""

    def place_of(self, key: tuple[int, bytes]) -> int:
        """Return the number of the put that is about a name; -1: there is none."""
        return next((place for place, put in enumerate(self.puts) if put.key == key), -1)

    @property
    def things(self) -> set[_Thing]:
        """Names, inodes and (in tuples) directories that the operation is about."""
        found: set[_Thing] = set()
        for put in self.puts:
            found.update((put.key, (put.directory,)))
            found.update(inode for inode in (put.before, put.after) if inode is not None)
        return found


class Directories(Protocol):
    """Directories by their number: a tree."""

    def get(self, number: int) -> Inode: ...


class Journal(Changes):
    """The changes of one tree."""

    def __init__(
        self,
        directories: Callable[[], Directories],
        a_cut: int = OPERATIONS_A_CUT,
        a_slice: int = OPERATIONS_A_SLICE,
    ) -> None:
        """`directories` returns the tree, which is made with its journal."""
        self._directories = directories
        self.a_cut, self.a_slice = a_cut, a_slice
        """Operations that a cut takes from the front: as a rule, and where a sync depends on more than a slice."""
        self.dirty: dict[Inode, int] = {}
        """Dirty inodes, each with the number of the first change that the index lacks."""
        self.waiting: set[Inode] = set()
        """Inodes of which the index has all but bytes or entries that were not on disk at the last commit."""
        self.operations: dict[int, NameChange] = {}
        """By number, in order."""
        self._about: dict[_Thing, dict[int, NameChange]] = {}
        """Operations by what they say something of: a name, an inode, or (in a tuple) what is in a directory."""
        self.left_out: dict[Inode, str] = {}
        """Inodes that a commit could not write, each with the reason. Names that lead to them wait."""
        self.noted: dict[Inode, None] = {}
        """Inodes with large attributes in memory, or that had some at the last commit."""
        self.gone_xattrs: set[int] = set()
        """Inodes that are gone, and whose attributes have a row of their own: until the index forgets both."""
        self.number = 0
        """Of the last change, of any kind."""
        self.bell = Bell()
        """Rings when something is to be written back that nobody waits for."""
        self._gone: dict[Inode, None] = {}
        """Files that are gone, and that operations may have given names to."""
        self._settling: list[tuple[Inode, int]] = []
        """(file, number): operations that one of them is taken out of next."""
        self._delayed: list[tuple[int, int]] = []
        """A heap of (since, number): operations that stand for an earlier one as well, and some that are kept."""
        self._pass: list[int] = []
        """Operations that `apart` has not looked at yet, the last one first."""
        self.num_passes = 0
        """Completed passes of `apart` over all operations."""
        self._dirty_pass: list[Inode] = []
        """Inodes that `others` has not looked at yet, the last one first."""
        self.num_dirty_passes = 0
        """Completed passes of `others` over all dirty inodes."""
        self._counts = _Counts()
        self._held = _Held()

    # What `Changes` asks for

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
        """Note that a commit has an inode without what was not on disk yet."""
        if inode not in self.dirty:
            self.of_inode(inode)
            self.waiting.add(inode)

    def of_names(self, puts: tuple[NamePut, ...]) -> None:
        self._note(puts)
        self._gone |= {put.before: None for put in puts if put.before is not None and _is_gone_file(put.before)}

    def of_domain(self, directory: Inode, limits: Limits | None) -> None:
        self._note((NamePut(directory, OWN_NAME, directory, directory, None, 0),), limits)

    def _note(self, puts: tuple[NamePut, ...], limits: Limits | None = None) -> None:
        self.number += 1
        previous = [next(reversed(self._about.get(put.key, _NONE)), 0) for put in puts]
        self._add(NameChange(self.number, puts, previous, self.number, limits))
        if len(self.operations) == 1:
            self.bell.ring()

    def of_xattrs_gone(self, inode: Inode) -> None:
        self.gone_xattrs.add(inode.number)
        self.bell.ring()

    # What a commit takes

    @property
    def is_empty(self) -> bool:
        return not self.dirty and not self.operations

    @contextmanager
    def counting(self) -> Iterator[Callable[[], int]]:
        """A function that tells how many of the changes until now are not kept yet."""
        number = self.number
        self._counts.mark(number)
        try:
            yield lambda: self._counts.up_to(number) + self.has_operation(number)
        finally:
            self._counts.unmark(number)

    def has_operation(self, number: int) -> bool:
        """Whether an operation up to this change is not kept yet."""
        while self._delayed:
            since, delayed = self._delayed[0]
            if delayed in self.operations and self.operations[delayed].since == since:
                break
            heappop(self._delayed)
        first = next(iter(self.operations), number + 1)
        return first <= number or bool(self._delayed and self._delayed[0][0] <= number)

    def concerns(self, inode: Inode, number: int) -> bool:
        """Whether something up to this change is not kept yet of what an inode is, is called, or (if it is a
        directory) has in it. What is too much for one cut may be: nobody looks at all of that.
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
        """Whether a sync of the inode is too much for one cut."""
        return len(self.closure([inode], most=self.a_slice)) > self.a_slice

    def prefix(self, is_ready: Callable[[NamePut], bool], most: int) -> list[NameChange]:
        """The first operations, up to `most`, if their files are ready."""
        first = islice(self.operations.values(), most)
        return list(takewhile(lambda change: all(map(is_ready, change.puts)), first))

    def apart(self, is_ready: Callable[[NamePut], bool], most: int) -> list[NameChange]:
        """Operations, up to `most`, that are ready, and depend on none that is not.

        On a full disk, what is removed behind a file that does not fit has to be forgotten, or there would never be
        room again. A file that can't be written holds up nothing but what depends on it. After LOOKED_AT operations
        the next call goes on.
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
            change = self.operations.get(self._pass.pop())
            self.num_passes += not self._pass
            if change is None:
                continue
            if self._held.holds(change) or not all(map(is_ready, change.puts)):
                self._held.add(change)
            else:
                taken.append(change)
        return taken

    def others(self, may_be_taken: Callable[[Inode], bool], most: int) -> list[Inode]:
        """Dirty inodes, up to `most`, that a cut may take. After DIRTY_LOOKED_AT the next call goes on."""
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
        """The pass at whose end `others` has looked at all inodes that are dirty now."""
        return self.num_dirty_passes + 1 + bool(self._dirty_pass)

    @property
    def is_in_pass(self) -> bool:
        """Whether `apart` has not looked at all operations yet."""
        return bool(self._pass)

    def end_pass(self) -> None:
        """Operations are in order again: the next call of `apart` begins anew."""
        self._pass = []

    def settle(self) -> bool:
        """Take files that are gone out of operations that gave them names: of a slice. Whether some are left."""
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
        """An operation takes a name from a file that is gone: the one that gave the name leaves it where it was.

        Where the two were exchanged, it leads nowhere in between: what was there has gone to the other name.
        """
        last = self.operations[number]
        place = last.place_of(key)
        first = self.operations.get(last.previous[place])
        if first is None or (place_in_first := first.place_of(key)) < 0:
            return  # the index has the name
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
            self._join(number, key, inode)  # another one had taken the name in between, and is gone, too

    def _replace(
        self, old: NameChange, place: int, put: NamePut | None, *, previous: int | None = None, since: int | None = None
    ) -> None:
        """An operation gets another put, or loses it."""
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
        """Return the operations that the names of some inodes depend on besides some operations, in order.

        Names of a directory include those in it. With more than `most` operations the search ends.

        Directories above are looked at as they are met, DIRECTORIES_ABOVE levels up. A directory further up, or of
        another name, is found by the operation that made it, if that is not kept yet.

        No name may be left in a directory that is gone, becomes a domain or stops being one. A file that has another
        name by now must not be lost with its old one.
        """
        heights: dict[Inode, int] = {}
        """Of each inode that was met: how far it lies above what is asked for, or above a name of an operation."""
        get, seen = self._directories().get, set[_Thing]()
        chosen: dict[int, NameChange] = {}
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
        return [chosen[number] for number in sorted(chosen)]

    def directories_above(self, inodes: Iterable[Inode]) -> list[Inode]:
        """Directories that these lie in, DIRECTORIES_ABOVE levels up: a domain's quota is in its directory."""
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
        """Take changes and inodes that are being committed; return what `give_back` wants of the inodes."""
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
        """The commit failed."""
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
                    change.previous[change.place_of(key)] = before.number  # which was on its way when that came
            self._pass = []
        for inode, since in inodes.items():
            if inode.names or inode.parent is not None:
                self._make_dirty(inode, min(since, self._pop_dirty(inode, since)))

    def first_operations(self) -> list[NameChange]:
        """Return operations that the next commit may take."""
        numbers = reversed(self._pass[-LOOKED_AT:]) if self._pass else islice(self.operations, LOOKED_AT)
        changes = (self.operations[number] for number in numbers if number in self.operations)
        return list(islice((change for change in changes if not self.waits(change)), self.a_cut))

    def waits(self, change: NameChange) -> bool:
        """Whether it gives a name to a file that can't be written."""
        return any(put.after in self.left_out for put in change.puts)

    def limits_of(self, directory: Inode) -> Limits | None:
        """The limits of a domain before the first of its operations that is not kept yet; None: it was none."""
        first: NameChange | None = next(iter(self._about.get((directory.number, OWN_NAME), _NONE).values()), None)
        if first is not None:
            return first.limits
        return None if directory.domain is None else directory.domain.limits

    def look_at_noted(self) -> None:
        """Forget those whose attributes no commit has to put away any more."""
        self.noted = dict.fromkeys(each for each in self.noted if each.xattrs.held_bytes and not is_gone(each))

    def first_dirty(self, count: int) -> list[Inode]:
        """Inodes that have been dirty longest, and can be written."""
        return list(islice((inode for inode in self.dirty if inode not in self.left_out), count))


class _Counts:
    """Counts of changes that are not kept yet: up to some numbers, the marks."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        """Ascending."""
        self._counts = [0]
        """Of changes up to each mark and beyond the mark before; then of those beyond all marks."""

    def add(self, number: int, count: int = 1) -> None:
        self._counts[bisect_left(self._marks, number)] += count

    def mark(self, number: int) -> None:
        """Count up to the last change from now on."""
        self._marks.append(number)
        self._counts.append(0)

    def up_to(self, number: int) -> int:
        return sum(self._counts[: bisect_right(self._marks, number)])

    def unmark(self, number: int) -> None:
        place = bisect_left(self._marks, number)
        del self._marks[place]
        self._counts[place] += self._counts.pop(place + 1)


class _Held:
    """Names, inodes and directories of operations that are held back: later operations on them are held back, too."""

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
    """Whether no name leads to it any more."""
    return not inode.names and inode.parent is not inode


def entries_needed(put: NamePut) -> int:
    """Return how many entries have to be on disk before the name may lead to the file."""
    if put.after is None or not stat.S_ISREG(put.after.file_type):
        return 0
    kv = put.after.content
    if not isinstance(kv, KvFile):
        return 0
    return min(put.length if put.content is kv else kv.born_length, kv.table.length)


def _is_gone_file(inode: Inode) -> bool:
    return is_gone(inode) and not inode.is_directory
