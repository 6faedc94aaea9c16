"""Reads pages back from slots: all that somebody needs, or none; or some for a reader of an image, into no frame.

Every page is verified. What is damaged is never given to anybody: the file says EIO, and the log says which it is.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import trio

from kvfs.durable.disk_jobs import DiskJobs, Job
from kvfs.durable.slot_file import SLOTS_A_JOB, Damaged, SlotFile, disk_error
from kvfs.images.masking import masked
from kvfs.images.model_facts import ModelFacts
from kvfs.names.content import KvFile
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import Bytes, copies, look
from kvfs.pages.on_disk import NO_SLOT
from kvfs.volume import Volume
from libsym.errors import SymError

log = logging.getLogger(__name__)

T = TypeVar("T")

JOBS_A_FILE = 3


@dataclass(slots=True, eq=False)
class _Bringing:
    """Pages that are being read into frames."""

    pages: IntArray
    frames: IntArray
    then: Callable[[SymError | None], None]
    num_begun: int = 0
    num_running: int = 0
    error: Exception | None = None


class PagesIn:
    """Brings pages of one volume into memory; satisfies `ColdPages`, for workers."""

    def __init__(self, volume: Volume, jobs: DiskJobs, own: SlotFile) -> None:
        self._volume = volume
        self._pool = volume.pool
        self._jobs = jobs
        self._own = own
        self._others: list[tuple[int, int, SlotFile]] = []
        self._facts: dict[SlotFile, ModelFacts] = {}
        self.num_bytes = 0
        """Read since the daemon started."""

    def add(self, first: int, stop: int, file: SlotFile, facts: ModelFacts) -> None:
        """Pages from `first` to before `stop` are of another model, in another file."""
        self._others.append((first, stop, file))
        self._facts[file] = facts

    def in_order_on_disk(self, pages: IntArray) -> IntArray:
        """Pages file by file, and by their slots. For a worker: what changes meanwhile may be out of order."""
        place = np.zeros(pages.size, np.int32)
        for number, (first, stop, _) in enumerate(self._others, 1):
            place[(pages >= first) & (pages < stop)] = number
        in_order: IntArray = pages[np.lexsort((self._pool.on_disk.slot[pages], place))]
        return in_order

    def bring_in(self, pages: IntArray, frames: IntArray, then: Callable[[SymError | None], None]) -> None:
        """Read pages, which somebody holds, into frames that nobody else knows. `then` is told on the trio thread, when
        no job writes there any more: EIO, one is damaged.
        """
        in_order = np.argsort(self._pool.on_disk.slot[pages])
        bringing = _Bringing(pages[in_order], frames[in_order], then)
        for _ in range(JOBS_A_FILE):
            self._read_next(bringing)

    def _read_next(self, bringing: _Bringing) -> None:
        first = bringing.num_begun
        if first >= bringing.pages.size or bringing.error is not None:
            return
        bringing.num_begun += SLOTS_A_JOB
        self._read_group(bringing, bringing.pages[first:][:SLOTS_A_JOB], bringing.frames[first:][:SLOTS_A_JOB])

    def _read_group(self, bringing: _Bringing, pages: IntArray, frames: IntArray) -> None:
        """Read the pages that are on disk still: without whoever wanted them, pages may be given back."""
        on_disk = self._pool.on_disk
        is_there = on_disk.slot[pages] != NO_SLOT
        pages, frames = pages[is_there], frames[is_there]
        slots, checks = on_disk.slot[pages], on_disk.check[pages]
        bringing.num_running += 1

        def ended(job: Job[None]) -> None:
            bringing.num_running -= 1
            self._volume.pager.progressed()
            if isinstance(job.error, Damaged) and (on_disk.slot[pages] != slots).any():
                self._read_group(bringing, pages, frames)  # written anew meanwhile: the old slots may be anybody's
                return
            if job.error is not None:
                bringing.error = bringing.error or self._told(job.error, pages)
            else:
                self.num_bytes += pages.size * self._own.slot_bytes
            self._read_next(bringing)
            if not bringing.num_running:
                bringing.then(None if bringing.error is None else as_ours(bringing.error))

        self._jobs.start(partial(self._read, slots, checks, frames.tolist()), ended)

    def _read(self, slots: IntArray, checks: npt.NDArray[np.uint64], frames: list[int]) -> None:
        """For a worker: into frames that nobody knows yet."""
        if not frames:
            return
        store = self._pool.store.store
        try:
            self._own.read_into(slots.tolist(), checks.tolist(), [store.writable(frame) for frame in frames])
        except OSError as error:
            raise disk_error("read", self._own.path, error) from error

    # For workers that bring nothing into memory

    def use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        """See `ColdPages`. All of them are of one identity."""
        found: list[T | None] = []
        for first in range(0, len(pages), SLOTS_A_JOB):
            found += self._use(pages[first : first + SLOTS_A_JOB], what)
        return found

    def _use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        on_disk, file = self._pool.on_disk, self.file_of(int(pages[0]))
        slots, checks = on_disk.slot[pages], on_disk.check[pages]
        if (slots == NO_SLOT).any():  # it is in memory by now
            return [None] * len(pages)
        try:
            with file.lent(slots.tolist(), checks.tolist()) as (views, damaged):
                is_right = ~np.isin(slots, damaged)
                self._require_readable(pages[~is_right], slots[~is_right], checks[~is_right])
                right_views: list[Bytes] = [view for view, right in zip(views, is_right, strict=True) if right]
                results = iter(what(right_views) if right_views else ())
                return [next(results) if right else None for right in is_right.tolist()]
        except OSError as error:
            if isinstance(error, SymError):
                raise
            raise disk_error("read", file.path, error) from error

    def _require_readable(self, pages: IntArray, slots: IntArray, checks: npt.NDArray[np.uint64]) -> None:
        """EIO: these slots hold something else, and are what these pages have. A page that came into memory meanwhile
        may have got another slot since, and its old one may be anybody's.
        """
        on_disk = self._pool.on_disk
        is_lost = (on_disk.slot[pages] == slots) & (on_disk.check[pages] == checks)
        is_lost &= self._pool.store.of[pages] == NOWHERE
        if is_lost.any():
            raise _from_worker(partial(self._told, Damaged(slots[is_lost].tolist()), pages[is_lost]))

    def read_into(self, pages: IntArray, rooms: Sequence[memoryview]) -> None:
        """Fill rooms with pages, wherever those are by now; EIO: some are damaged. All are of one identity."""
        for first in range(0, len(pages), SLOTS_A_JOB):
            group, some = pages[first : first + SLOTS_A_JOB], rooms[first : first + SLOTS_A_JOB]
            if not self._read_group_into(group, some):
                for room, data in zip(some, look(self._pool.store, self, group, copies), strict=True):
                    room[:] = data

    def _read_group_into(self, pages: IntArray, rooms: Sequence[memoryview]) -> bool:
        """False: some of them are not what these slots hold, or have none by now."""
        on_disk, file = self._pool.on_disk, self.file_of(int(pages[0]))
        slots, checks = on_disk.slot[pages], on_disk.check[pages]
        if (slots == NO_SLOT).any():
            return False
        try:
            file.read_into(slots.tolist(), checks.tolist(), rooms)
        except Damaged:
            return False
        except OSError as error:
            raise disk_error("read", file.path, error) from error
        return True

    def head(self, page: int, data: Bytes, num_entries: int) -> bytes:
        """The first entries of a tail: others may share it further, and its slot may hold what was cut off since."""
        facts = self._facts.get(self.file_of(page))
        view = memoryview(data)
        return self._pool.store.store.masked(view, num_entries) if facts is None else masked(view, facts, num_entries)

    def file_of(self, page: int) -> SlotFile:
        """Where its slot is."""
        return next((file for first, stop, file in self._others if first <= page < stop), self._own)

    # Damage

    def _told(self, error: Exception, pages: IntArray) -> Exception:
        """Return the error that a caller gets for a failed read; damage is in the log, with every file that has it."""
        if not isinstance(error, Damaged):
            return error
        slots = self._pool.on_disk.slot[pages]
        damaged = pages[np.isin(slots, error.slots)]
        found = [*self.files_with(damaged)]
        names = [f"{path} from entry {first} on" for path, first in found]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        about = {"file": [path for path, _ in found[:8]]}
        log.error(
            "slots %s are damaged, and with them %s", list(error.slots), shown or "files that are gone", extra=about
        )
        return SymError(f"damaged on disk: {shown}: see `symphony fsck`", errno.EIO)

    def files_with(self, pages: IntArray) -> list[tuple[str, int]]:
        """Files that have some of these pages, and the first entry that is in one."""
        found = []
        for inode in self._volume.tree:
            if isinstance(inode.content, KvFile):
                where = np.flatnonzero(np.isin(inode.content.table.pages, pages))
                if where.size:
                    found.append((str(self._volume.tree.path_of(inode)), int(where[0]) * 32))
        return found


def as_ours(error: Exception) -> SymError:
    """Of a job of the disk."""
    if isinstance(error, SymError):
        return error
    log.error("a job of the disk failed inside the daemon", exc_info=error)
    return SymError(f"a job of the disk failed inside the daemon: {error!r}", errno.EIO)


def _from_worker(told: Callable[[], Exception]) -> Exception:
    """Look at the tree where that may be done."""
    try:
        return trio.from_thread.run_sync(told)
    except RuntimeError:  # no worker of trio's: the tests call it from a thread of their own
        return told()
