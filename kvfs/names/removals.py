"""Unlinks backing files and closes descriptors in the background: both may wait for the disk, and nobody for them.

A close frees the blocks of a file that was unlinked: 270 MB took 12 to 40 ms. Some file systems write at a close.
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
"""One thread does it all, unless it has been in one call for so long: then another one goes on with the rest."""


class Descriptor:
    """An open backing file, closed soon after the last user has let go of it: a worker in the middle of a read, or a
    frame of an error.
    """

    __slots__ = ("_removals", "number")

    def __init__(self, removals: Removals, path: Path, flags: int) -> None:
        self._removals = removals
        self.number = removals.disk.open(path, flags)

    def __del__(self) -> None:
        if hasattr(self, "number") and not sys.is_finalizing():  # no thread starts any more; the process closes it
            self._removals.close(self.number)


class Removals:
    """What is to be unlinked and closed. Any thread may add to it; nobody waits."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._pending: deque[tuple[Path | None, Descriptor | int | None]] = deque()
        self._numbers = itertools.count()
        self._began_s: dict[int, float] = {}
        """Of each thread that is at work: when its last call began."""
        self._lock = threading.Condition(threading.RLock())
        """Of both. The collector may add a descriptor in the middle of anything, also of what is done with the lock."""

    def close(self, number: int) -> None:
        """Close a descriptor that nobody uses any more."""
        self._add(None, number)

    def remove(self, path: Path, descriptor: Descriptor | None) -> None:
        """Unlink a file, then let go of its descriptor."""
        self._add(path, descriptor)

    def wait(self, timeout_s: float) -> bool:
        """Whether everything was done within that time."""
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
            del descriptor  # that of a file which was unlinked: closed now, unless a worker is using it

    def _do(self, path: Path | None, number: int | None) -> None:
        try:
            if path is not None:
                self.disk.unlink(path)
            if number is not None:
                self.disk.close(number)
        except FileNotFoundError:
            pass  # it never came to be
        except OSError as error:
            log.warning("can't %s: %s", "close a backing file" if path is None else f"remove {path}", error.strerror)
        except Exception:
            log.exception("can't remove %s", path)  # and the others go on
