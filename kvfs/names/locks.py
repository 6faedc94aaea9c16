"""flock(2) over inodes: shared or exclusive, held by an open file, wherever it was opened: on the mount or by a LIP.

The same table, another one, holds the claims on names (`kvfs.fs.Claim`): there the places of names are locked.

A lock costs the same beside thousands on one inode: nothing here walks over those that hold it or wait for it.

Waiters are served in order of arrival, except that a conversion gives up the lock that its owner has first, as
flock(2) does. Advisory: nothing else looks at these locks.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice

import trio

from libsym.errors import WouldBlock

SOME_HOLDERS = 16
"""Holders that are named: thousands may share a lock."""


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: Hashable
    exclusive: bool
    granted: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Lock:
    """One inode's: either one exclusive holder or any number of shared ones."""

    holders: dict[Hashable, None] = field(default_factory=dict)
    is_exclusive: bool = False
    """Of the holders there are."""
    waiting: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)
    waiting_of: dict[Hashable, dict[_Waiter, None]] = field(default_factory=dict)
    """The same by their owners."""

    def admits(self, exclusive: bool) -> bool:
        return not self.holders or not (exclusive or self.is_exclusive)

    def has(self, owner: Hashable, *, exclusive: bool) -> bool:
        return owner in self.holders and self.is_exclusive == exclusive

    def grant(self, owner: Hashable, *, exclusive: bool) -> None:
        self.holders[owner], self.is_exclusive = None, exclusive

    def give_up(self, owner: Hashable) -> bool:
        """Whether the owner had it."""
        return self.holders.pop(owner, self) is None

    def enter(self, waiter: _Waiter) -> None:
        self.waiting[waiter] = self.waiting_of.setdefault(waiter.owner, {})[waiter] = None

    def leave(self, waiter: _Waiter) -> None:
        del self.waiting[waiter], self.waiting_of[waiter.owner][waiter]
        if not self.waiting_of[waiter.owner]:
            del self.waiting_of[waiter.owner]


class FileLocks:
    """Every lock that is held or waited for, by inode number, or by whatever else is locked."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, _Lock] = {}

    def __len__(self) -> int:
        """Inodes with a lock."""
        return len(self._locks)

    def holders(self, number: Hashable) -> list[Hashable]:
        """Holders of the lock of one inode; the first few, where many share it."""
        lock = self._locks.get(number)
        return [] if lock is None else list(islice(lock.holders, SOME_HOLDERS))

    def num_waiting(self, number: Hashable) -> int:
        """Who waits for the lock of one inode."""
        lock = self._locks.get(number)
        return 0 if lock is None else len(lock.waiting)

    def acquire_nowait(self, number: Hashable, owner: Hashable, *, exclusive: bool) -> None:
        """Take the lock, or raise EWOULDBLOCK. What the owner held before is converted, or lost if that fails."""
        lock = self._locks.setdefault(number, _Lock())
        if lock.has(owner, exclusive=exclusive):
            return
        lock.give_up(owner)
        try:
            if lock.waiting or not lock.admits(exclusive):
                raise WouldBlock(f"inode {number} is locked by somebody else")
            lock.grant(owner, exclusive=exclusive)
        finally:
            self._settle(number, lock)

    async def acquire(self, number: Hashable, owner: Hashable, *, exclusive: bool) -> None:
        """Take the lock, after everybody who asked earlier. Cancelled, it leaves the queue."""
        lock = self._locks.setdefault(number, _Lock())
        if lock.has(owner, exclusive=exclusive):
            return
        lock.give_up(owner)
        waiter = _Waiter(owner, exclusive)
        lock.enter(waiter)
        self._settle(number, lock)
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                lock.give_up(owner)
            elif waiter in lock.waiting:
                lock.leave(waiter)
            self._settle(number, lock)
            raise

    def leave(self, number: Hashable, owner: Hashable) -> None:
        """Take the owner's waiters out of the queue now. No grant wakes them: their tasks have to be cancelled."""
        lock = self._locks.get(number)
        if lock is None:
            return
        for waiter in list(lock.waiting_of.get(owner, ())):
            lock.leave(waiter)
        self._settle(number, lock)

    def release(self, number: Hashable, owner: Hashable) -> None:
        """Give the lock up; nothing happens if the owner has none."""
        lock = self._locks.get(number)
        if lock is not None and lock.give_up(owner):
            self._settle(number, lock)

    def _settle(self, number: Hashable, lock: _Lock) -> None:
        """Grant what can be granted; forget a lock that nobody wants."""
        while lock.waiting and lock.admits((first := next(iter(lock.waiting))).exclusive):
            lock.grant(first.owner, exclusive=first.exclusive)
            for waiter in list(lock.waiting_of[first.owner]):
                if waiter.exclusive == first.exclusive:  # threads that asked for one open file get the lock together
                    lock.leave(waiter)
                    waiter.granted.set()
        # A waiter that was granted the lock, lost it again and then is cancelled settles one that is forgotten already.
        if not lock.holders and not lock.waiting and self._locks.get(number) is lock:
            del self._locks[number]
