"""What has changed and is not kept yet: operations on names, in order, and inodes that differ from their rows.

A commit takes some of it (`prefix`, `closure`), and gives it back if it fails. Operations are taken from the front, so
that what a crash leaves is a state that the tree has had. Where an operation gives a file a name, it waits until the
entries that the file had at that moment are on disk, and those behind it wait as well. Only what somebody syncs
overtakes them, with all that it depends on: an fsync waits for no other file's bytes.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from kvfs.names.content import KvFile
from kvfs.names.inode import SOME_NAMES, Changes, Inode, NamePut

OPERATIONS_A_CUT = 32
"""So many operations are taken at once: a fork takes 30 µs, and nothing else runs meanwhile. A commit takes longer."""

DIRECTORIES_ABOVE = 128
"""So far up a sync looks for renames of directories around a file: a tree may be deeper."""

_Thing: TypeAlias = Inode | tuple[Inode] | tuple[int, bytes]
_NONE: dict[int, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class NameChange:
    """One operation on names."""

    number: int
    """In the order of all operations."""
    puts: tuple[NamePut, ...]

    @property
    def things(self) -> set[_Thing]:
        """What it says something of."""
        found: set[_Thing] = set()
        for put in self.puts:
            found.update((put.key, (put.directory,)))
            found.update(inode for inode in (put.before, put.after) if inode is not None)
        return found


class Journal(Changes):
    """The changes of one tree."""

    def __init__(self) -> None:
        self.dirty: dict[Inode, int] = {}
        """Each with the number of the change since when it has been."""
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
        self.when_changed: Callable[[], None] = lambda: None
        self.num_names_kept: Callable[[Inode], int] = lambda _inode: 0
        """How many names of an inode the index knows."""
        self.directory: Callable[[int], Inode]
        """A directory, by its number."""

    # What `Changes` asks for

    def of_inode(self, inode: Inode) -> None:
        if inode.xattrs.held_bytes and not is_gone(inode):
            self.noted[inode] = None
        if inode not in self.dirty and (inode.names or inode.parent is not None):
            self.number += 1
            self.dirty[inode] = self.number
            if len(self.dirty) == 1:
                self.when_changed()

    def of_names(self, puts: tuple[NamePut, ...]) -> None:
        self.number += 1
        self._add(NameChange(self.number, puts))
        if len(self.operations) == 1:
            self.when_changed()

    def of_xattrs_gone(self, inode: Inode) -> None:
        self.gone_xattrs.add(inode.number)
        self.when_changed()

    # What a commit takes

    @property
    def is_empty(self) -> bool:
        return not self.dirty and not self.operations

    def num_left(self, number: int) -> int:
        """How much is not kept yet; 0 if nothing of it has changed by this number. As long as something is left out,
        later changes do not count: so the number shows whether there is progress.
        """
        if self.left_out:
            changes = (*self.operations, *self.dirty.values())
            return sum(each <= number for each in changes)
        first = next(iter(self.operations), number + 1)
        is_left = first <= number or any(since <= number for since in self.dirty.values())
        return len(self.operations) + len(self.dirty) if is_left else 0

    def concerns(self, inode: Inode, number: int) -> bool:
        """Whether something up to this change is not kept yet of what an inode is, is called, or (if it is a
        directory) has in it.
        """
        if inode.names or inode.parent is not None:
            since = self.dirty.get(inode)
            if since is not None and since <= number:
                return True
            return any(change.number <= number for change in self.closure([inode]))
        return False

    def prefix(self, is_ready: Callable[[NamePut], bool]) -> list[NameChange]:
        """The first operations whose files are ready, up to OPERATIONS_A_CUT or a few more.

        What gives a name to a file that is gone by now is taken together with what took the name away: its entries
        will never be on disk, so no commit may end in between.
        """
        taken: list[NameChange] = []
        num_safe, num_unsafe, num_names = 0, 0, dict[Inode, int]()
        for change in self.operations.values():
            if (len(taken) >= OPERATIONS_A_CUT and num_safe == len(taken)) or not all(map(is_ready, change.puts)):
                break
            taken.append(change)
            for inode, step in _steps(change):
                if is_gone(inode):
                    before = num_names.get(inode, 0)
                    after = num_names[inode] = step + (before if inode in num_names else self.num_names_kept(inode))
                    num_unsafe += bool(after) - bool(before)
            if not num_unsafe:
                num_safe = len(taken)
        return taken[:num_safe]

    def apart(self, is_ready: Callable[[NamePut], bool], most: float = math.inf) -> list[NameChange]:
        """The operations, up to `most`, that are ready, and depend on none that is not.

        On a full disk, what is removed behind a file that does not fit has to be forgotten, or there would never be
        room again. A file that can't be written holds up nothing but what depends on it.
        """
        held = _Held()
        while True:
            taken, num_names = list[NameChange](), dict[Inode, int]()
            for change in self.operations.values():
                if len(taken) >= most:
                    break
                if held.holds(change) or not all(map(is_ready, change.puts)):
                    held.add(change)
                    continue
                taken.append(change)
                for inode, step in _steps(change):
                    if is_gone(inode):
                        num_names[inode] = num_names.get(inode, self.num_names_kept(inode)) + step
            unsafe = [inode for inode, count in num_names.items() if count > 0]
            if not unsafe:
                return taken
            held.inodes.update(unsafe)

    def closure(self, wanted: Sequence[Inode], besides: Iterable[NameChange] = ()) -> list[NameChange]:
        """What the names of some inodes depend on besides some operations, in order: a directory's are those in it,
        too.

        Of a directory that is gone nothing may be left, and a file that has another name by now must not be lost with
        the one that it had.
        """
        inodes: set[Inode] = set()
        apart, chosen = {change.number for change in besides}, dict[int, NameChange]()
        waiting: list[_Thing] = [(inode,) for inode in wanted if inode.is_directory]
        for inode in wanted:
            waiting += self._add_with_directories(inodes, inode)
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, Inode) and thing.is_directory and is_gone(thing):
                waiting.append((thing,))
            for number, change in self._about.get(thing, _NONE).items():
                if number in chosen or number in apart:
                    continue
                chosen[number] = change
                for put in change.puts:
                    waiting.append(put.key)
                    if put.before is not None:
                        waiting += self._add_with_directories(inodes, put.before)
                    if put.after is not None:
                        waiting += self._add_with_directories(inodes, put.after)
                        waiting += self._add_with_directories(inodes, put.directory)
        return [chosen[number] for number in sorted(chosen)]

    def directories_above(self, inodes: Iterable[Inode]) -> list[Inode]:
        """Directories that these lie in, DIRECTORIES_ABOVE levels up: a domain's quota is in its directory."""
        found: set[Inode] = set()
        for inode in inodes:
            self._add_with_directories(found, inode)
        return [*found.difference(inodes)]

    def _add_with_directories(self, inodes: set[Inode], inode: Inode) -> list[Inode]:
        """The inode, and the directories that some of its names lie in; those that were not among `inodes`.

        A directory further up, or of another name, is found by the operation that made it, if that is not kept yet.
        """
        waiting, added = [inode], list[Inode]()
        for _ in range(DIRECTORIES_ABOVE):
            new = [each for each in dict.fromkeys(waiting) if each not in inodes]
            if not new:
                break
            inodes.update(new)
            added += new
            waiting = [self.directory(number) for each in new for number, _ in islice(each.names, SOME_NAMES)]
        return added

    def _add(self, change: NameChange) -> None:
        self.operations[change.number] = change
        for thing in change.things:
            self._about.setdefault(thing, {})[change.number] = change

    def _remove(self, change: NameChange) -> None:
        del self.operations[change.number]
        for thing in change.things:
            about = self._about[thing]
            del about[change.number]
            if not about:
                del self._about[thing]

    def take(self, changes: Iterable[NameChange], inodes: Iterable[Inode]) -> dict[Inode, int]:
        """They are being committed: gives what `give_back` wants of the inodes."""
        for change in changes:
            self._remove(change)
        return {inode: self.dirty.pop(inode, 0) for inode in inodes}

    def give_back(self, changes: Sequence[NameChange], inodes: dict[Inode, int]) -> None:
        """The commit failed."""
        if changes:
            later, self.operations = self.operations, {}
            for change in changes:
                self._add(change)
            self.operations = dict(sorted((self.operations | later).items()))
        for inode, since in inodes.items():
            if inode.names or inode.parent is not None:
                self.dirty[inode] = min(since, self.dirty.get(inode, since))

    def first_operations(self) -> list[NameChange]:
        """Those that the next commit may take."""
        changes = self.operations.values()
        return list(islice((change for change in changes if not self.waits(change)), OPERATIONS_A_CUT))

    def waits(self, change: NameChange) -> bool:
        """Whether it gives a name to a file that can't be written."""
        return any(put.after in self.left_out for put in change.puts)

    def look_at_noted(self) -> None:
        """Forget those whose attributes no commit has to put away any more."""
        self.noted = dict.fromkeys(each for each in self.noted if each.xattrs.held_bytes and not is_gone(each))

    def first_dirty(self, count: int) -> list[Inode]:
        """Inodes that have been dirty longest, and can be written."""
        return list(islice((inode for inode in self.dirty if inode not in self.left_out), count))


class _Held:
    """What operations that are held back are about: what comes behind them and touches it is held back as well."""

    def __init__(self) -> None:
        self.keys: set[tuple[int, bytes]] = set()
        self.inodes: set[Inode] = set()
        self.directories: set[Inode] = set()

    def holds(self, change: NameChange) -> bool:
        return any(
            put.key in self.keys
            or put.directory in self.inodes
            or put.before in self.inodes | self.directories
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
    """How many entries have to be on disk before the name may lead to the file."""
    if put.after is None or not stat.S_ISREG(put.after.file_type):
        return 0
    kv = put.after.content
    if not isinstance(kv, KvFile):
        return 0
    return min(put.length if put.content is kv else kv.born_length, kv.table.length)


def _steps(change: NameChange) -> Iterable[tuple[Inode, int]]:
    """How the number of names changes, of each inode."""
    for put in change.puts:
        if put.after is not None:
            yield put.after, 1
        if put.before is not None:
            yield put.before, -1
