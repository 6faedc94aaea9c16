"""Events of a tree, as its model remembers them: operations on names, syncs, and what each file was when."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

from kvfs.names.inode import OWN_NAME, Inode
from tests.kvfs.durable.contents import Content

T = TypeVar("T")

Key = tuple[int, bytes]
"""(number of a directory, name)."""
ROOT = 1


@dataclass(frozen=True, slots=True)
class Attributes:
    """Facts of an inode beside its names and its entries."""

    file_type: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    used_ns: int
    device: int
    target: bytes
    advice: object
    xattrs: tuple[tuple[bytes, bytes], ...]
    quota: object

    @classmethod
    def of(cls, inode: Inode) -> Attributes:
        beside = {"xattrs", "quota"}
        facts = {each.name: getattr(inode, each.name) for each in fields(cls) if each.name not in beside}
        limits = None if inode.domain is None else inode.domain.limits
        return cls(**facts, xattrs=tuple(sorted(inode.xattrs.items())), quota=limits)


@dataclass(frozen=True, slots=True)
class Put:
    """A name, with the inode that it led to before an operation, and leads to after it."""

    key: Key
    before: int | None
    after: int | None

    def __str__(self) -> str:
        directory, name = self.key
        return f"{directory}/{name.decode(errors='replace')}: {self.before} → {self.after}"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation on names."""

    moment: int
    puts: tuple[Put, ...]

    @property
    def inodes(self) -> set[int]:
        """Inodes that get a name, or lose one."""
        return {each for put in self.puts for each in (put.before, put.after) if each is not None}

    @property
    def bounded(self) -> set[int]:
        """Directories that become a domain, or stop being one: behind all that they had in them."""
        return {put.key[0] for put in self.puts if put.key[1] == OWN_NAME}

    @property
    def directories(self) -> set[int]:
        """Directories that get a name in them."""
        return {put.key[0] for put in self.puts if put.after is not None}

    def __str__(self) -> str:
        return f"[{self.moment}] " + ", ".join(map(str, self.puts))


@dataclass(slots=True, eq=False)
class Sync:
    """A wait, over or not, for an inode to be on disk; for everything, without a number."""

    number: int | None
    begun: int
    above: frozenset[int] = frozenset()
    """The directories that it lay in."""
    above_at_end: frozenset[int] = frozenset()
    """The directories that it lay in when the sync returned 0."""
    ended: int | None = None
    """Moment at which the sync returned 0."""
    named: frozenset[int] = frozenset()
    """Inodes that had a name then: nothing is promised for others."""
    unnamed: frozenset[int] = frozenset()
    """Inodes that had a name when the sync began, and none when it returned: the journal has left them out."""

    def is_over(self, now: int) -> bool:
        return self.ended is not None and self.ended <= now

    def promises(self, number: int) -> bool:
        """Whether it is about an inode, once it is over."""
        return number in self.named and self.number in {None, number}

    def __str__(self) -> str:
        what = "everything" if self.number is None else f"inode {self.number}"
        return f"the sync of {what} at [{self.begun}]"


class History(Generic[T]):
    """States of something, each with the moment from which on it held."""

    def __init__(self) -> None:
        self._states: list[tuple[int, T]] = []

    def add(self, moment: int, state: T) -> None:
        if not self._states or self._states[-1][1] != state:
            self._states.append((moment, state))

    @property
    def last(self) -> T:
        return self._states[-1][1]

    def between(self, first: int, last: int) -> Iterator[tuple[int, T]]:
        """Every state that it had in this time, the oldest first, and when it had it first."""
        for place, (moment, state) in enumerate(self._states):
            ends = self._states[place + 1][0] if place + 1 < len(self._states) else last + 1
            if moment <= last and ends > first:
                yield max(moment, first), state


@dataclass(slots=True)
class Life:
    """Life of an inode, since it was made."""

    attributes: History[Attributes] = field(default_factory=History)
    content: History[Content] = field(default_factory=History)

    @property
    def is_directory(self) -> bool:
        return any(stat.S_ISDIR(state.file_type) for _, state in self.attributes.between(0, sys.maxsize - 1))
