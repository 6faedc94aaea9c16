"""flock(2) on inodes: shared or exclusive locks of open files. Files opened on the mount and files opened by calls use
the same locks.

Claims (`kvfs.fs.Claim`) have a table of the same class. The keys of that table are places of names instead of inode
numbers.

The cost of an operation does not grow with the number of locks on an inode: no loop visits all holders or waiters.

Waiters get the lock in order of arrival. A conversion between shared and exclusive first releases the owner's lock, as
flock(2) does. The locks are advisory: reads and writes ignore them.

The daemon's trio thread owns the locks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice

import trio

from libsym.errors import WouldBlock

SOME_HOLDERS = 16
"""Maximum number of holders that `holders` lists. Thousands may share a lock."""


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: Hashable
    exclusive: bool
    granted: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Lock:
    """The lock of an inode: one exclusive holder, or any number of shared holders."""

    holders: dict[Hashable, None] = field(default_factory=dict)
    is_exclusive: bool = False
    """Whether the lock is held exclusively, by one holder."""
    waiting: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)
    waiting_of: dict[Hashable, dict[_Waiter, None]] = field(default_factory=dict)
    """Waiters by owner."""

    def admits(self, exclusive: bool) -> bool:
        return not self.holders or not (exclusive or self.is_exclusive)

    def has(self, owner: Hashable, *, exclusive: bool) -> bool:
        return owner in self.holders and self.is_exclusive == exclusive

    def grant(self, owner: Hashable, *, exclusive: bool) -> None:
        self.holders[owner], self.is_exclusive = None, exclusive

    def give_up(self, owner: Hashable) -> bool:
        """Remove the owner from the holders. Return whether the owner was a holder."""
        return self.holders.pop(owner, self) is None

    def enter(self, waiter: _Waiter) -> None:
        self.waiting[waiter] = self.waiting_of.setdefault(waiter.owner, {})[waiter] = None

    def leave(self, waiter: _Waiter) -> None:
        del self.waiting[waiter], self.waiting_of[waiter.owner][waiter]
        if not self.waiting_of[waiter.owner]:
            del self.waiting_of[waiter.owner]


class FileLocks:
    """All locks that are held or waited for, by inode number or another key."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, _Lock] = {}

    def __len__(self) -> int:
        """Number of inodes with a lock."""
        return len(self._locks)

    def holders(self, number: Hashable) -> list[Hashable]:
        """Return the holders of an inode's lock. If many share the lock, return the first SOME_HOLDERS."""
        lock = self._locks.get(number)
        return [] if lock is None else list(islice(lock.holders, SOME_HOLDERS))

    def acquire_nowait(self, number: Hashable, owner: Hashable, *, exclusive: bool) -> None:
        """Take the lock, or raise EWOULDBLOCK. If the owner already has a lock of the other kind, the lock is
        converted. If the conversion fails, the owner loses its lock.
        """
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
        """Take the lock after all earlier waiters. On cancellation, leave the queue."""
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
        """Remove the owner's waiters from the queue. The lock never wakes them after that, so the caller has to cancel
        their tasks.
        """
        lock = self._locks.get(number)
        if lock is None:
            return
        for waiter in list(lock.waiting_of.get(owner, ())):
            lock.leave(waiter)
        self._settle(number, lock)

    def release(self, number: Hashable, owner: Hashable) -> None:
        """Release the owner's lock, if the owner has one."""
        lock = self._locks.get(number)
        if lock is not None and lock.give_up(owner):
            self._settle(number, lock)

    def _settle(self, number: Hashable, lock: _Lock) -> None:
        """Grant the lock to waiters that it admits. Drop a lock without holders and waiters."""
        while lock.waiting and lock.admits((first := next(iter(lock.waiting))).exclusive):
            lock.grant(first.owner, exclusive=first.exclusive)
            for waiter in list(lock.waiting_of[first.owner]):
                if waiter.exclusive == first.exclusive:  # threads that wait with one open file get the lock together
                    lock.leave(waiter)
                    waiter.granted.set()
        # `_locks` may have another `_Lock` by now: a waiter may have got this lock and lost it before it was cancelled.
        if not lock.holders and not lock.waiting and self._locks.get(number) is lock:
            del self._locks[number]
