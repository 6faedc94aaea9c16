"""Writes pages to slots: those of a file that have none, or whose slot holds too little of them.

A page may be freed, or overwritten at its end, while it is written: `OnDisk` knows, and says what the slot is good for.
What is written is on disk only after the file of slots was synced. If that fails, all that was written since the last
time is written anew, to other slots: the kernel may have dropped it, also what was written while that sync was under
way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from kvfs.durable.disk_jobs import DiskJobs, Job
from kvfs.durable.pages_in import as_ours
from kvfs.durable.slot_file import SLOTS_A_JOB, Bytes, SlotFile, Source, disk_error
from kvfs.durable.slots import Slots
from kvfs.names.content import OWN, KvFile
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import copies, look
from kvfs.pages.pool import PagePool, pages_for
from libsym.abi import PAGE_ENTRIES
from libsym.errors import SymError

Fills: TypeAlias = npt.NDArray[np.int8]
Checks: TypeAlias = npt.NDArray[np.uint64]

JOBS_A_FILE = 2
"""One is copied and summed while the other is on its way."""


class PagesOut:
    """Writes pages of the running model's identity."""

    def __init__(
        self, pool: PagePool, file: SlotFile, slots: Slots, jobs: DiskJobs, require_room: Callable[[int], None]
    ) -> None:
        """`require_room` raises NoSpace where so many bytes more may not be on disk."""
        self._pool = pool
        self.file = file
        self.slots = slots
        self._jobs = jobs
        self._writing: dict[int, Job[Checks]] = {}
        """By page."""
        self._unsynced: list[IntArray] = []
        self._num_failed_syncs = 0
        self.progressed: Callable[[], None] = lambda: None
        """Told of each job that ends."""
        self.num_bytes = 0
        """Written since the daemon started."""
        self._require_room = require_room

    async def write(self, kv: KvFile, num_entries: int) -> None:
        """Have the first entries of a file in slots. SymError: the disk is full, fails, or does not answer."""
        if kv.identity != OWN:
            return  # its pages came from slots, and have them
        while jobs := self._begin(kv, num_entries):
            await self._jobs.wait(jobs[0])

    def missing(self, kv: KvFile, num_entries: int) -> IntArray:
        """The pages of a file that have to be written."""
        num_entries = min(num_entries, kv.table.length)
        if not num_entries or kv.identity != OWN:
            return _NONE
        pages = kv.table.pages[: pages_for(num_entries)]
        missing: IntArray = pages[~self._pool.on_disk.is_kept(pages, _fills(len(pages), num_entries))]
        return missing

    def _begin(self, kv: KvFile, num_entries: int) -> list[Job[Checks]]:
        """Jobs that write some of what is missing; empty: nothing is."""
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
        """Have pages in slots as far as they are computed. `then` is told on the trio thread, when it is over."""
        groups = deque(pages[first : first + SLOTS_A_JOB] for first in range(0, pages.size, SLOTS_A_JOB))
        errors: list[SymError] = []
        num_running = 0

        def next_one() -> None:
            nonlocal num_running
            while groups and not errors and num_running < JOBS_A_FILE:
                group = groups.popleft()
                try:
                    self._start(group, self._pool.computed(group), ended)
                except SymError as error:
                    errors.append(SymError(str(error), error.errno))
                else:
                    num_running += 1
            if not num_running:
                then(errors[0] if errors else None)

        def ended(error: Exception | None) -> None:
            nonlocal num_running
            num_running -= 1
            self.progressed()
            if error is not None:
                errors.append(as_ours(error))
            next_one()

        trio.lowlevel.current_trio_token().run_sync_soon(next_one)  # whoever asks is in the middle of something

    def _start(
        self, pages: IntArray, fills: Fills, then: Callable[[Exception | None], None] = lambda _error: None
    ) -> Job[Checks]:
        pool, on_disk = self._pool, self._pool.on_disk
        self._require_room(len(pages) * self.file.slot_bytes)
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

        job = self._jobs.start(write, written)
        self._writing |= dict.fromkeys(pages.tolist(), job)
        return job

    def begin_sync(self) -> list[IntArray]:
        """What a sync that begins now will cover; `sync_failed` wants it, if it does."""
        covered, self._unsynced = self._unsynced, []
        return covered

    def sync_failed(self, covered: list[IntArray]) -> None:
        self._num_failed_syncs += 1
        for pages in [*covered, *self.begin_sync()]:
            self._pool.on_disk.spoil(pages, self._pool.store.of[pages] != NOWHERE)


def _fills(num_pages: int, num_entries: int) -> Fills:
    fills = np.full(num_pages, PAGE_ENTRIES, np.int8)
    fills[-1] = num_entries - (num_pages - 1) * PAGE_ENTRIES
    return fills


def _source(pool: PagePool, page: int, fill: int) -> Source:
    """A full page is written from where it is in memory, and stays meanwhile. Of a tail others may be computing the
    rest, so a copy is made of what is there. What is on disk alone comes from the slot that it has.
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
