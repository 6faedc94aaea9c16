"""Writes pages to new slots if they have no slot, or if their slot lacks their newest entries.

A page may be freed, or overwritten at its end, while it is being written. `PageSlots` notices this, and rejects the new
slot. Written slots are on disk only after a sync of the slot file. If a sync fails, the kernel may have dropped all
writes since the last successful sync, including writes during the failed sync. So the pages of all these writes are
written again, to new slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvfs.durable.disk_jobs import DiskJobs, Job
from kvfs.durable.pages_in import as_ours
from kvfs.durable.slot_file import SLOTS_A_JOB, Bytes, SlotFile, Source, disk_error
from kvfs.durable.slots import Slots
from kvfs.names.content import OWN, KvFile
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import copies, look
from kvfs.pages.pool import PagePool, pages_for
from kvfs.volume.volume import Volume
from libsym.abi import PAGE_ENTRIES
from libsym.errors import SymError

Fills: TypeAlias = npt.NDArray[np.int8]
Checks: TypeAlias = npt.NDArray[np.uint64]

JOBS_A_FILE = 2
"""Jobs of a file at a time. While one job copies its pages and computes checksums, the other job writes."""


@dataclass(slots=True, eq=False)
class _Out:
    """Pages to write to slots, so that they can be evicted."""

    pages: IntArray
    """Pages whose write has not begun."""
    generations: IntArray
    then: Callable[[SymError | None], None]
    num_running: int = 0
    error: SymError | None = None


class PagesOut:
    """Writes pages of the running model's identity."""

    def __init__(
        self, volume: Volume, file: SlotFile, slots: Slots, jobs: DiskJobs, require_room: Callable[[int], None]
    ) -> None:
        """`require_room` gets a number of bytes. It raises NoSpace if the disk may not take that many more bytes."""
        self._pool = volume.pool
        self._progressed = volume.pager.progressed
        self.file = file
        self.slots = slots
        self._jobs = jobs
        self._writing: dict[int, Job[Checks]] = {}
        """Jobs that are writing, by page."""
        self._unsynced: list[IntArray] = []
        """Pages that were written since the last sync."""
        self._after: dict[Job[Checks], list[Callable[[], None]]] = {}
        """Functions to call at the end of a job, for callers that wait for the job of another caller."""
        self._num_failed_syncs = 0
        self.num_bytes = 0
        """Bytes written since the daemon started."""
        self._require_room = require_room

    async def write(self, kv: KvFile, num_entries: int) -> None:
        """Write the first `num_entries` entries of a file to slots. Raise SymError if the disk is full, fails, or does
        not answer.
        """
        if kv.identity != OWN:
            return  # its pages came from slots, and still have slots
        while jobs := self._begin(kv, num_entries):
            await self._jobs.wait(jobs[0])

    def missing(self, kv: KvFile, num_entries: int) -> IntArray:
        """Return the pages that have to be written before the first `num_entries` entries of a file are in slots."""
        num_entries = min(num_entries, kv.table.length)
        if not num_entries or kv.identity != OWN:
            return _NONE
        pages = kv.table.pages[: pages_for(num_entries)]
        missing: IntArray = pages[~self._pool.on_disk.is_kept(pages, _fills(len(pages), num_entries))]
        return missing

    def _begin(self, kv: KvFile, num_entries: int) -> list[Job[Checks]]:
        """Begin or join jobs that write some missing pages. Return the jobs; empty if no page is missing."""
        num_entries = min(num_entries, kv.table.length)
        missing = self.missing(kv, num_entries)
        if not missing.size:
            return []
        under_way = dict.fromkeys(self._writing[page] for page in missing.tolist() if page in self._writing)
        jobs = list(under_way)
        new = np.array([page for page in missing.tolist() if page not in self._writing], np.int32)
        tail_fill = num_entries - (pages_for(num_entries) - 1) * PAGE_ENTRIES
        tail_page = int(kv.table.pages[pages_for(num_entries) - 1])
        for first in range(0, new.size, SLOTS_A_JOB):
            if len(jobs) >= JOBS_A_FILE:
                break
            group = new[first : first + SLOTS_A_JOB]
            jobs.append(self._start(group, np.where(group == tail_page, tail_fill, PAGE_ENTRIES).astype(np.int8)))
        return jobs

    def write_out(self, pages: IntArray, then: Callable[[SymError | None], None]) -> None:
        """Write pages to slots, with all computed entries. At the end, `then` is called on the trio thread, with None
        or the error.
        """
        out = _Out(pages, self._pool.on_disk.generation[pages], then)
        self._jobs.soon(partial(self._write_next, out))  # not now: the caller is in the middle of a change

    def _write_next(self, out: _Out) -> None:
        """Begin as many jobs as allowed. Only one job at a time writes a page, so pages that another job is writing are
        left for last.
        """
        while out.error is None and out.num_running < JOBS_A_FILE:
            group = self._next_group(out)
            if not group.size:
                break
            try:
                self._start(group, self._pool.computed(group), partial(self._is_out, out))
            except SymError as error:
                out.error = SymError(str(error), error.errno)
            else:
                out.num_running += 1
        if out.num_running:
            return
        if out.error is None and out.pages.size:
            job = self._writing[int(out.pages[0])]
            self._after.setdefault(job, []).append(partial(self._write_next, out))
        else:
            out.then(out.error)

    def _next_group(self, out: _Out) -> IntArray:
        """Remove the next pages to write from `out`, and return them."""
        pool = self._pool
        is_left = pool.on_disk.generation[out.pages] == out.generations  # other pages were freed meanwhile
        is_left &= ~pool.on_disk.is_kept(out.pages, pool.computed(out.pages))
        out.pages, out.generations = out.pages[is_left], out.generations[is_left]
        free = (place for place, page in enumerate(out.pages.tolist()) if page not in self._writing)
        places = np.array([*islice(free, SLOTS_A_JOB)], np.intp)
        group = out.pages[places]
        out.pages, out.generations = np.delete(out.pages, places), np.delete(out.generations, places)
        return group

    def _is_out(self, out: _Out, error: Exception | None) -> None:
        out.num_running -= 1
        self._progressed()
        if error is not None:
            out.error = out.error or as_ours(error)
        self._write_next(out)

    def _start(
        self, pages: IntArray, fills: Fills, then: Callable[[Exception | None], None] = lambda _error: None
    ) -> Job[Checks]:
        pool, on_disk = self._pool, self._pool.on_disk
        self._require_room(len(pages) * self.file.slot_bytes)
        # If a page is only on disk, all entries of its old slot are written again, because other files may need them.
        fills = np.where(pool.store.of[pages] == NOWHERE, np.maximum(fills, on_disk.kept[pages]), fills)
        slots = self.slots.take(len(pages))
        generations = on_disk.begin_write(pages, fills)
        sources = [_source(pool, page, fill) for page, fill in zip(pages.tolist(), fills.tolist(), strict=True)]
        pool.pin(pages)
        where, num_failed_syncs = slots.tolist(), self._num_failed_syncs

        def write() -> Checks:
            try:
                return self.file.write(where, sources)
            except OSError as error:
                raise disk_error("write", self.file.path, error) from error

        def written(job: Job[Checks]) -> None:
            for page in pages.tolist():
                del self._writing[page]
            pool.unpin(pages)
            if job.error is not None or self._num_failed_syncs != num_failed_syncs:
                self.slots.disown(slots)
            else:
                is_same = on_disk.end_write(pages, generations, fills, slots, job.settle())
                self.slots.disown(slots[~is_same])
                self._unsynced.append(pages[is_same])
                self.num_bytes += len(pages) * self.file.slot_bytes
            then(job.error)
            for function in self._after.pop(job, ()):
                function()

        job = self._jobs.start(write, written)
        self._writing |= dict.fromkeys(pages.tolist(), job)
        return job

    def begin_sync(self) -> IntArray:
        """Begin a sync. Return the pages that the sync covers. If the sync fails, pass these pages to `sync_failed`."""
        covered, self._unsynced = np.unique(np.concatenate([_NONE, *self._unsynced])), []
        return covered

    def sync_failed(self, covered: IntArray) -> None:
        self._num_failed_syncs += 1
        pages = np.union1d(covered, self.begin_sync())
        pages = pages[self._pool.refcount[pages] > 0]
        self._pool.on_disk.spoil(pages, self._pool.store.of[pages] != NOWHERE)


def _fills(num_pages: int, num_entries: int) -> Fills:
    fills = np.full(num_pages, PAGE_ENTRIES, np.int8)
    fills[-1] = num_entries - (num_pages - 1) * PAGE_ENTRIES
    return fills


def _source(pool: PagePool, page: int, fill: int) -> Source:
    """Return a function that returns the bytes of a page. A full page in memory is not copied. A page that is not full
    is copied, because a step may be computing further entries in it. A page that is only on disk is read from its
    present slot.
    """
    frame, store = int(pool.store.of[page]), pool.store.store

    def source() -> Bytes:
        if frame == NOWHERE:
            (data,) = look(pool.store, pool.cold, np.array([page], np.int32), copies)
            view = memoryview(data)
        else:
            view = store.view(frame)
        return view if fill == PAGE_ENTRIES else store.masked(view, fill)

    return source


_NONE = np.empty(0, np.int32)
