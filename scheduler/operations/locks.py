"""kv_lock and kv_unlock: flock(2) for handles. Locks of handles and of the mount are in one table.

A lock belongs to the handle: every thread of a program that uses the handle has the lock. Closing the handle releases
the lock. When a program ends, its nursery is cancelled, which ends its waits.
"""

from __future__ import annotations

import errno
from collections.abc import Coroutine
from typing import Any
from weakref import WeakKeyDictionary

import trio

from kvfs.fs import FileSystem, OpenKv
from libsym.abi import LOCK_NOWAIT, LOCK_SHARED, Op
from libsym.errors import SymError, WouldBlock
from scheduler.connection.lip import MAX_WAITS, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply


class Locking:
    """Answers KV_LOCK and KV_UNLOCK."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._locks = fs.volume.locks
        self._waits: dict[OpenKv, set[trio.CancelScope]] = {}
        self._by: WeakKeyDictionary[OpenKv, Lip] = WeakKeyDictionary()
        """The LIP of each handle that has asked for a lock."""

    def table(self) -> Table:
        return {
            Op.KV_LOCK: Operation(self._lock, takes_payload=False, max_waiting=MAX_WAITS),
            Op.KV_UNLOCK: Operation(self._unlock, takes_payload=False),
        }

    def _lock(self, call: SystemCall) -> Reply | Coroutine[Any, Any, Reply]:
        """Take the lock if it is free. Otherwise fail, or wait in a coroutine."""
        file, flags = call.lip.file(call.request.handle), call.request.flags
        exclusive = not flags & LOCK_SHARED
        self._by[file] = call.lip
        try:
            self._locks.acquire_nowait(file.inode.number, file, exclusive=exclusive)
        except WouldBlock:
            if flags & LOCK_NOWAIT:
                name, holder = self._fs.name_of(file), self._holder(file, call.lip)
                raise WouldBlock(f"{name} is locked by {holder}: try again later, or wait for it") from None
        else:
            return Reply()
        # The wait must be in the table now: an unlock or a close may come before the coroutine begins, and must end the
        # wait.
        scope = trio.CancelScope()
        self._waits.setdefault(file, set()).add(scope)
        return self._wait(file, scope, exclusive=exclusive)

    def _unlock(self, call: SystemCall) -> Reply:
        """Release the lock, and end the waits of this handle: a program that gives up waiting sends KV_UNLOCK."""
        file = call.lip.file(call.request.handle)
        self.end_waits(file)
        self._locks.release(file.inode.number, file)
        return Reply()

    def _holder(self, file: OpenKv, asker: Lip) -> str:
        """Return the name of the lock's holder if the asker may know it, else "somebody else".

        Only root may know programs of other users. A program in a domain may know only programs in this domain.
        """
        for owner in self._locks.holders(file.inode.number):
            by = self._by.get(owner) if isinstance(owner, OpenKv) else None
            if by is not None and asker.uid in {0, by.uid} and asker.credentials.root in {None, by.credentials.root}:
                return f"pid {by.program.pid or by.pid} ({by.program.name})"
        return "somebody else"

    def end_waits(self, file: OpenKv) -> None:
        """End all waits of this handle, before the lock is released or the handle is closed."""
        self._locks.leave(file.inode.number, file)
        for scope in self._waits.get(file, ()):
            scope.cancel()

    async def _wait(self, file: OpenKv, scope: trio.CancelScope, *, exclusive: bool) -> Reply:
        try:
            with scope:
                if not scope.cancel_called:
                    await self._locks.acquire(file.inode.number, file, exclusive=exclusive)
        finally:
            scopes = self._waits[file]
            scopes.remove(scope)
            if not scopes:
                del self._waits[file]
        if scope.cancel_called:
            raise SymError("the wait for the lock was ended: the file was unlocked or closed meanwhile", errno.EINTR)
        return Reply()
