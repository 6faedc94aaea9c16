"""Reads of pages from slots. `bring_in` reads pages into frames, all of them or none. Workers read pages into other
memory.

Every page is verified. A damaged page is never handed out: reads of the file fail with EIO, and the log names the page.
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
from kvfs.pages.page_slots import NO_SLOT
from kvfs.volume.volume import Volume
from libsym.errors import SymError

log = logging.getLogger(__name__)

T = TypeVar("T")

JOBS_A_FILE = 3


@dataclass(slots=True, eq=False)
class _Bringing:
    """Pages that are being read into frames, for one caller."""

    pages: IntArray
    frames: IntArray
    then: Callable[[SymError | None], None]
    num_begun: int = 0
    num_running: int = 0
    error: Exception | None = None


class PagesIn:
    """Reader of a volume's pages into memory. Satisfies `ColdPages`, for workers."""

    def __init__(self, volume: Volume, jobs: DiskJobs, own: SlotFile) -> None:
        self._volume = volume
        self._pool = volume.pool
        self._jobs = jobs
        self._own = own
        self._others: list[tuple[int, int, SlotFile]] = []
        self._facts: dict[SlotFile, ModelFacts] = {}
        self.num_bytes = 0
        """Bytes read since the daemon started."""

    def add(self, first: int, stop: int, file: SlotFile, facts: ModelFacts) -> None:
        """Note that the pages `first` to `stop - 1` belong to another model, and are in the slot file `file`."""
        self._others.append((first, stop, file))
        self._facts[file] = facts

    def in_order_on_disk(self, pages: IntArray) -> IntArray:
        """Return pages ordered by file and slot. A worker may call this, and pages that change meanwhile may be out of
        order.
        """
        place = np.zeros(pages.size, np.int32)
        for number, (first, stop, _) in enumerate(self._others, 1):
            place[(pages >= first) & (pages < stop)] = number
        in_order: IntArray = pages[np.lexsort((self._pool.on_disk.slot[pages], place))]
        return in_order

    def bring_in(self, pages: IntArray, frames: IntArray, then: Callable[[SymError | None], None]) -> None:
        """Read pages into frames that nothing else uses. The caller has references to the pages. `then` is called on
        the trio thread when no job writes to the frames any more. It gets None or the error, which is EIO if a page is
        damaged.
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
        """Read those of the pages that still have slots. Pages whose tickets were cancelled may have been freed."""
        on_disk = self._pool.on_disk
        is_there = on_disk.slot[pages] != NO_SLOT
        pages, frames = pages[is_there], frames[is_there]
        slots, checks = on_disk.slot[pages], on_disk.check[pages]
        bringing.num_running += 1

        def ended(job: Job[None]) -> None:
            bringing.num_running -= 1
            self._volume.pager.progressed()
            if isinstance(job.error, Damaged) and (on_disk.slot[pages] != slots).any():
                self._read_group(bringing, pages, frames)  # pages got new slots meanwhile: read these slots
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
        """Read slots in a worker into frames that no page has yet."""
        if not frames:
            return
        store = self._pool.store.store
        try:
            self._own.read_into(slots.tolist(), checks.tolist(), [store.writable(frame) for frame in frames])
        except OSError as error:
            raise disk_error("read", self._own.path, error) from error

    # For workers, which read pages without frames

    def use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        """Call `what` on the bytes of pages, as `ColdPages` describes. All pages belong to one identity."""
        found: list[T | None] = []
        for first in range(0, len(pages), SLOTS_A_JOB):
            found += self._use(pages[first : first + SLOTS_A_JOB], what)
        return found

    def _use(self, pages: IntArray, what: Callable[[list[Bytes]], Sequence[T]]) -> Sequence[T | None]:
        on_disk, file = self._pool.on_disk, self.file_of(int(pages[0]))
        slots, checks = on_disk.slot[pages], on_disk.check[pages]
        if (slots == NO_SLOT).any():  # a page is in memory by now
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
        """Raise EIO if a page is lost. A lost page still has its damaged slot, and is not in memory. A page that was
        read into memory meanwhile may have another slot by now, and its old slot may be reused.
        """
        on_disk = self._pool.on_disk
        is_lost = (on_disk.slot[pages] == slots) & (on_disk.check[pages] == checks)
        is_lost &= self._pool.store.of[pages] == NOWHERE
        if is_lost.any():
            raise _from_worker(partial(self._told, Damaged(slots[is_lost].tolist()), pages[is_lost]))

    def read_into(self, pages: IntArray, rooms: Sequence[memoryview]) -> None:
        """Fill the memory in `rooms` with pages of one identity, wherever the pages are by now: in frames or on disk.
        Raise EIO if a page is damaged.
        """
        for first in range(0, len(pages), SLOTS_A_JOB):
            group, some = pages[first : first + SLOTS_A_JOB], rooms[first : first + SLOTS_A_JOB]
            if not self._read_group_into(group, some):
                for room, data in zip(some, look(self._pool.store, self, group, copies), strict=True):
                    room[:] = data

    def _read_group_into(self, pages: IntArray, rooms: Sequence[memoryview]) -> bool:
        """Fill the memory in `rooms` from slots. Return False if a page has no slot by now, or a slot does not hold the
        expected bytes.
        """
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
        """Return a page's bytes with zeros behind the first `num_entries` entries.

        The slot may also hold entries that other files use, or entries that were cut off since.
        """
        facts = self._facts.get(self.file_of(page))
        view = memoryview(data)
        return self._pool.store.store.masked(view, num_entries) if facts is None else masked(view, facts, num_entries)

    def file_of(self, page: int) -> SlotFile:
        """Return the slot file of a page."""
        return next((file for first, stop, file in self._others if first <= page < stop), self._own)

    # Damage

    def _told(self, error: Exception, pages: IntArray) -> Exception:
        """Return the error that a caller gets for a failed read. Log damage, with all files that have a damaged
        page.
        """
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
        """Return the paths of files that have some of these pages, each with the first entry in such a page."""
        found = []
        for inode in self._volume.tree:
            if isinstance(inode.content, KvFile):
                where = np.flatnonzero(np.isin(inode.content.table.pages, pages))
                if where.size:
                    found.append((str(self._volume.tree.path_of(inode)), int(where[0]) * 32))
        return found


def as_ours(error: Exception) -> SymError:
    """Return an error of a disk job as a SymError."""
    if isinstance(error, SymError):
        return error
    log.error("a job of the disk failed inside the daemon", exc_info=error)
    return SymError(f"a job of the disk failed inside the daemon: {error!r}", errno.EIO)


def _from_worker(told: Callable[[], Exception]) -> Exception:
    """Run a function on the trio thread, where it may read the tree. Return its result."""
    try:
        return trio.from_thread.run_sync(told)
    except RuntimeError:  # not a worker thread of trio: tests use other threads
        return told()
