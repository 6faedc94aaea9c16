"""flock(2) over inodes: shared or exclusive, held by an open file, wherever it was opened: on the mount or by a LIP.

The same table, another one, holds the claims on names (`kvfs.fs.Claim`): there the places of names are locked.

Waiters are served in order of arrival, except that a conversion gives up the lock that its owner has first, as
flock(2) does. Advisory: nothing else looks at these locks.

Owned by the daemon's trio thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import trio

from libsym.errors import WouldBlock


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: Hashable
    exclusive: bool
    granted: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Lock:
    """One inode's: either one exclusive holder or any number of shared ones."""

    holders: dict[Hashable, bool] = field(default_factory=dict)
    """owner -> exclusive"""
    waiting: deque[_Waiter] = field(default_factory=deque)

    def admits(self, exclusive: bool) -> bool:
        return not self.holders or not (exclusive or any(self.holders.values()))


class FileLocks:
    """Every lock that is held or waited for, by inode number, or by whatever else is locked."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, _Lock] = {}

    def __len__(self) -> int:
        """Inodes with a lock."""
        return len(self._locks)

    def holders(self, number: Hashable) -> list[Hashable]:
        """Who has the lock of one inode, or a share of it."""
        lock = self._locks.get(number)
        return [] if lock is None else list(lock.holders)

    def num_waiting(self, number: Hashable) -> int:
        """Who waits for the lock of one inode."""
        lock = self._locks.get(number)
        return 0 if lock is None else len(lock.waiting)

    def acquire_nowait(self, number: Hashable, owner: Hashable, *, exclusive: bool) -> None:
        """Take the lock, or raise EWOULDBLOCK. What the owner held before is converted, or lost if that fails."""
        lock = self._locks.setdefault(number, _Lock())
        if lock.holders.get(owner) == exclusive:
            return
        lock.holders.pop(owner, None)
        try:
            if lock.waiting or not lock.admits(exclusive):
                raise WouldBlock(f"inode {number} is locked by somebody else")
            lock.holders[owner] = exclusive
        finally:
            self._settle(number, lock)

    async def acquire(self, number: Hashable, owner: Hashable, *, exclusive: bool) -> None:
        """Take the lock, after everybody who asked earlier. Cancelled, it leaves the queue."""
        lock = self._locks.setdefault(number, _Lock())
        if lock.holders.get(owner) == exclusive:
            return
        lock.holders.pop(owner, None)
        waiter = _Waiter(owner, exclusive)
        lock.waiting.append(waiter)
        self._settle(number, lock)
        try:
            await waiter.granted.wait()
        except BaseException:
            if waiter.granted.is_set():
                lock.holders.pop(owner, None)
            elif waiter in lock.waiting:
                lock.waiting.remove(waiter)
            self._settle(number, lock)
            raise

    def leave(self, number: Hashable, owner: Hashable) -> None:
        """Take the owner's waiters out of the queue now. No grant wakes them: their tasks have to be cancelled."""
        lock = self._locks.get(number)
        if lock is None:
            return
        for waiter in [each for each in lock.waiting if each.owner == owner]:
            lock.waiting.remove(waiter)
        self._settle(number, lock)

    def release(self, number: Hashable, owner: Hashable) -> None:
        """Give the lock up; nothing happens if the owner has none."""
        lock = self._locks.get(number)
        if lock is not None and lock.holders.pop(owner, None) is not None:
            self._settle(number, lock)

    def _settle(self, number: Hashable, lock: _Lock) -> None:
        """Grant what can be granted; forget a lock that nobody wants."""
        while lock.waiting and lock.admits(lock.waiting[0].exclusive):
            waiter = lock.waiting.popleft()
            lock.holders[waiter.owner] = waiter.exclusive
            waiter.granted.set()
        for waiter in [each for each in lock.waiting if lock.holders.get(each.owner) == each.exclusive]:
            lock.waiting.remove(waiter)  # two threads asked for one open file: what one has got, both have
            waiter.granted.set()
        # A waiter that was granted the lock, lost it again and then is cancelled settles one that is forgotten already.
        if not lock.holders and not lock.waiting and self._locks.get(number) is lock:
            del self._locks[number]
