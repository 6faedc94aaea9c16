"""Unlinks and closes backing files in background threads, from a queue, because both calls may wait for the disk.

The close of an unlinked file frees its blocks, which took 12 to 40 ms for 270 MB. Some file systems write data at a
close.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections import deque
from pathlib import Path

import trio

from kvfs.names.disk import Disk

log = logging.getLogger(__name__)

MAX_THREADS = 4
STUCK_S = 1.0
"""A thread that has been in one call for this long counts as stuck. If all threads are stuck, another thread is
started.
"""


class Descriptor:
    """An open backing file. The descriptor is closed soon after its last user has dropped this object. The last user
    may be a worker that is reading, or a frame in an error's traceback.
    """

    __slots__ = ("_removals", "number")

    def __init__(self, removals: Removals, number: int) -> None:
        self._removals = removals
        self.number = number

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit no thread can start
            self._removals.close(self.number)


class Removals:
    """Queue of backing files to unlink and descriptors to close. Any thread may add to the queue without a wait."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._pending: deque[tuple[Path | None, Descriptor | int | None]] = deque()
        self._numbers = itertools.count()
        self._began_s: dict[int, float] = {}
        """The time when each busy thread began its current call."""
        self._lock = threading.Condition(threading.RLock())
        """Lock around `_pending` and `_began_s`. The lock is reentrant, because the garbage collector may add a
        descriptor in a thread that holds the lock.
        """

    def close(self, number: int) -> None:
        """Queue a descriptor to be closed, once it has no user."""
        self._add(None, number)

    def remove(self, path: Path, descriptor: Descriptor | None) -> None:
        """Queue a file to be unlinked. The file's descriptor is dropped after that."""
        self._add(path, descriptor)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and all threads are done. Return False after `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pending and not self._began_s, timeout_s)

    def _add(self, path: Path | None, descriptor: Descriptor | int | None) -> None:
        with self._lock:
            self._pending.append((path, descriptor))
            last_s = max(self._began_s.values(), default=0.0)
            if self._began_s and (len(self._began_s) == MAX_THREADS or time.monotonic() - last_s < STUCK_S):
                return
            number = next(self._numbers)
            self._began_s[number] = time.monotonic()
        trio.lowlevel.start_thread_soon(lambda: self._work(number), lambda done: done.unwrap())

    def _work(self, number: int) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    del self._began_s[number]
                    self._lock.notify_all()
                    return
                path, descriptor = self._pending.popleft()
                self._began_s[number] = time.monotonic()
            self._do(path, descriptor if isinstance(descriptor, int) else None)
            del descriptor  # closes the unlinked file now, unless a worker is using it

    def _do(self, path: Path | None, number: int | None) -> None:
        try:
            if path is not None:
                self.disk.unlink(path)
            if number is not None:
                self.disk.close(number)
        except FileNotFoundError:
            pass  # the backing file was never made
        except OSError as error:
            log.warning("can't %s: %s", "close a backing file" if path is None else f"remove {path}", error.strerror)
        except Exception:
            log.exception("can't remove %s", path)  # the thread continues with the rest of the queue
