"""Scrub: reads every slot that a file in the tree needs, while the daemon runs, at a bounded rate or at full speed.

A scrub can mend damage. If a page with a damaged slot is in memory, the page is written again. If such a page is only
on disk, its file is cut, and keeps the entries before that page. A page in memory whose slot is damaged is pinned until
all damage is mended. Otherwise the page could be evicted, because the daemon assumes that its slot is good. The scrub
never holds the trio thread for long: it gathers pages and searches for files in time slices, sorts pages in a worker,
and reads them in disk jobs.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from time import perf_counter

import numpy as np
import numpy.typing as npt
import trio

from kvfs.durable.findings import Finding, Progress, what_is_left
from kvfs.durable.keeper import Keeper
from kvfs.durable.slot_file import SLOTS_A_JOB, SlotFile, disk_error
from kvfs.names.content import KvFile
from kvfs.names.inode import SOME_NAMES, Inode, shown
from kvfs.pages.frames import NOWHERE
from kvfs.pages.free_list import IntArray
from kvfs.pages.page_slots import NO_SLOT
from kvfs.volume.volume import Volume
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Busy, SymError

log = logging.getLogger(__name__)

SLICE_S = 0.0003
"""Seconds for which a scrub runs before it lets other tasks run."""
READERS = 3
"""Jobs at a time if no rate is given. One job computes checksums while the others wait for the disk."""
STRETCH_S = 0.25
"""If a rate is given, a job reads as many bytes as the rate allows in this time."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """The findings of one scrub, and the amount that it has read."""

    num_pages: int
    num_bytes: int
    seconds: float
    findings: tuple[Finding, ...]


async def scrub(
    volume: Volume,
    keeper: Keeper,
    *,
    rate: int | None = None,
    repair: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> ScrubReport:
    """Read all slots that files need. With `repair`, mend the damage. `rate`: the most bytes to read a second.

    Raise SymError if the disk does not answer.
    """
    began_s = perf_counter()
    lost = [_about_lost(volume, inode, kv) for inode, kv in keeper.lost_files()]
    walk = _Walk(volume, keeper, rate, progress)
    try:
        await walk.run()
        touched = await _files_with(volume, walk.damaged)
        findings = [_about(volume, each) for each in touched]
        if repair:
            for place, each in enumerate(touched):
                findings[place] = await _mended(volume, keeper, walk.damaged, each, findings[place])
    finally:
        walk.damaged.let_go()
    findings += [*lost, *await _of_index(volume, keeper)]
    return ScrubReport(walk.num_pages, walk.num_bytes, perf_counter() - began_s, tuple(findings))


def _about_lost(volume: Volume, inode: Inode, kv: KvFile) -> Finding:
    what = what_is_left(kv.table.length, kv.table.length + kv.lost)
    return Finding("lost", _paths_of(volume, inode), what, "", is_damage=False)


async def _of_index(volume: Volume, keeper: Keeper) -> list[Finding]:
    """Return a finding with the names that are refused because the index is damaged."""
    if not keeper.damage:
        return []
    paths: list[str] = []
    time_slice = _TimeSlice()
    for inode in volume.tree:
        await time_slice.end()
        paths += _paths_of(volume, inode) if inode.is_damaged else ()
    return [Finding("index", tuple(paths), keeper.damage, "not possible while a daemon uses the state")]


class _DamagedPages:
    """Pages whose slots hold wrong bytes. A page that has another slot by now is no longer damaged."""

    def __init__(self, volume: Volume) -> None:
        self._pool = volume.pool
        self._pages = self._slots = _NONE
        self._on_disk = volume.pool.on_disk
        self._pinned: list[IntArray] = []
        self.count = 0

    def add(self, pages: IntArray, slots: IntArray) -> None:
        """Note damaged pages. Pages in memory are pinned until `let_go`."""
        self._pages, self._slots = np.concatenate([self._pages, pages]), np.concatenate([self._slots, slots])
        self.count += pages.size
        self._pinned.append(pages[self._pool.store.of[pages] != NOWHERE])
        self._pool.pin(self._pinned[-1])

    def let_go(self) -> None:
        for pages in self._pinned:
            self._pool.unpin(pages)
        self._pinned = []

    def places_in(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return, for each of these pages, whether it is damaged."""
        damaged: npt.NDArray[np.bool_] = np.isin(pages, self._pages[self._on_disk.slot[self._pages] == self._slots])
        return damaged


class _Walk:
    """Reads the pages that files need when the walk begins. Pages that lose their slots before the walk reads them are
    left out.
    """

    def __init__(self, volume: Volume, keeper: Keeper, rate: int | None, progress: Progress) -> None:
        self._volume = volume
        self._keeper = keeper
        self._rate = rate
        self._progress = progress
        self._total_bytes = 0
        self._error: SymError | None = None
        self._waiting: deque[tuple[SlotFile, IntArray]] = deque()
        self.num_pages = 0
        self.num_bytes = 0
        self.damaged = _DamagedPages(volume)

    async def run(self) -> None:
        tables: list[IntArray] = []
        time_slice = _TimeSlice()
        for inode in self._volume.tree:
            await time_slice.end()
            if inode.names and isinstance(inode.content, KvFile):
                tables.append(inode.content.table.pages.copy())
        pages_in = self._keeper.pages_in
        pages = await trio.to_thread.run_sync(lambda: pages_in.in_order_on_disk(_distinct(tables)))
        await self._divide(pages)
        begins_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(READERS if self._rate is None else 1):
                nursery.start_soon(self._read_all, begins_s)
        if self._error is not None:
            raise self._error

    async def _divide(self, pages: IntArray) -> None:
        """Divide pages into groups, one for each job. The pages of a group are neighbours in one file."""
        first = 0
        time_slice = _TimeSlice()
        while first < pages.size:
            await time_slice.end()
            file = self._keeper.pages_in.file_of(int(pages[first]))
            group = pages[first : first + self._num_at_once(file)]
            same = [self._keeper.pages_in.file_of(page) is file for page in group.tolist()]
            group = group[: same.index(False)] if False in same else group
            self._waiting.append((file, group))
            self._total_bytes += group.size * file.slot_bytes
            first += group.size

    def _num_at_once(self, file: SlotFile) -> int:
        if self._rate is None:
            return SLOTS_A_JOB
        return max(1, min(SLOTS_A_JOB, int(self._rate * STRETCH_S) // file.slot_bytes))

    async def _read_all(self, begins_s: float) -> None:
        while self._waiting:
            file, pages = self._waiting.popleft()
            try:
                await self._read(file, pages)
            except SymError as error:
                self._error = error
                self._waiting.clear()
                return
            self.num_bytes += pages.size * file.slot_bytes
            self._progress(self.num_bytes, self._total_bytes)
            if self._rate is not None:
                await trio.sleep_until(begins_s + self.num_bytes / self._rate)

    async def _read(self, file: SlotFile, pages: IntArray) -> None:
        on_disk = self._volume.pool.on_disk
        pages = pages[(on_disk.slot[pages] != NO_SLOT) & (on_disk.kept[pages] > 0)]
        if not pages.size:
            return
        slots, checks = on_disk.slot[pages], on_disk.check[pages]
        damaged = await self._keeper.jobs.do(partial(_damaged, file, slots, checks))
        self.num_pages += pages.size
        # A page that has another slot or no slot by now is skipped, because its old slot may be reused.
        is_same = (on_disk.slot[pages] == slots) & (on_disk.check[pages] == checks)
        found = pages[is_same & np.isin(slots, damaged)]
        if found.size:
            log.error("slots %s of %s are damaged", on_disk.slot[found].tolist(), file.path)
            self.damaged.add(found, on_disk.slot[found])


def _damaged(file: SlotFile, slots: IntArray, checks: npt.NDArray[np.uint64]) -> list[int]:
    """Return the slots whose bytes do not match their checksums. Workers call this."""
    try:
        return file.verify(slots.tolist(), checks.tolist())
    except OSError as error:
        raise disk_error("read", file.path, error) from error


def _distinct(tables: list[IntArray]) -> IntArray:
    return np.unique(np.concatenate(tables)) if tables else _NONE


# Files


@dataclass(frozen=True, slots=True)
class _Touched:
    """A file with damaged pages."""

    inode: Inode
    kv: KvFile
    places: npt.NDArray[np.intp]
    """Places of the damaged pages in the file's table."""
    first_lost: int | None
    """The first entry of the first damaged page that is only on disk; None: all damaged pages are in memory."""


async def _files_with(volume: Volume, damaged: _DamagedPages) -> list[_Touched]:
    """Return the files with damaged pages. The search runs in time slices, and may miss files that change meanwhile."""
    found: list[_Touched] = []
    time_slice = _TimeSlice()
    for inode in volume.tree if damaged.count else ():
        await time_slice.end()
        each = _touched(volume, damaged, inode)
        if each is not None:
            found.append(each)
    return found


def _touched(volume: Volume, damaged: _DamagedPages, inode: Inode) -> _Touched | None:
    kv = inode.content
    if not inode.names or not isinstance(kv, KvFile):
        return None
    pages = kv.table.pages
    places = np.flatnonzero(damaged.places_in(pages))
    if not places.size:
        return None
    lost = places[volume.pool.store.of[pages[places]] == NOWHERE]
    return _Touched(inode, kv, places, int(lost[0]) * PAGE_ENTRIES if lost.size else None)


def _about(volume: Volume, touched: _Touched) -> Finding:
    """Return the finding about a file, and log it."""
    paths, kv = _paths_of(volume, touched.inode), touched.kv
    firsts = ", ".join(str(place * PAGE_ENTRIES) for place in touched.places[:8].tolist())
    count = touched.places.size
    what = f"damaged on disk: {count} of its pages, from entry {firsts}{' …' if count > 8 else ''} on"
    log.error("%s: %s", ", ".join(paths), what, extra={"file": paths})
    if touched.first_lost is None:
        return Finding("page", paths, what, "it is written anew, from memory")
    return Finding("page", paths, what, f"it keeps {touched.first_lost} of {kv.table.length + kv.lost} entries")


async def _mended(
    volume: Volume, keeper: Keeper, damaged: _DamagedPages, touched: _Touched, finding: Finding
) -> Finding:
    """Mend a file. Return the finding, with an error in place of the repair if the repair failed."""
    inode, kv, path = touched.inode, touched.kv, finding.paths[0]
    now = _touched(volume, damaged, inode)  # the damage may be mended, with another file that shares the page
    try:
        if inode.content is not kv:
            raise Busy(f"{path} was replaced meanwhile")
        if now is not None and now.first_lost is not None:
            lost = kv.table.length + kv.lost - now.first_lost
            volume.truncate_kv(kv, now.first_lost, path)
            kv.lost = lost
            keeper.lost.add(inode)
            inode.modified()
        pages = kv.table.pages
        spoilt = pages[damaged.places_in(pages)]
        volume.pool.on_disk.spoil(spoilt, volume.pool.store.of[spoilt] != NOWHERE)
        await keeper.pages_out.write(kv, kv.table.length)
        inode.note_change()  # not earlier: a commit before this would keep the damaged slots
        await keeper.sync(inode)
    except SymError as error:
        return replace(finding, repair=f"not possible now: {error}")
    return finding


def _paths_of(volume: Volume, inode: Inode) -> tuple[str, ...]:
    tree = volume.tree
    names = islice(inode.names, SOME_NAMES)
    return tuple(
        sorted(f"{str(tree.path_of(tree.get(directory))).rstrip('/')}/{shown(name)}" for directory, name in names)
    )


class _TimeSlice:
    """Time slice of a scrub on the trio thread."""

    def __init__(self) -> None:
        self._ends_s = perf_counter() + SLICE_S

    async def end(self) -> None:
        """If the time slice is over, let other tasks run."""
        if perf_counter() > self._ends_s:
            await trio.lowlevel.checkpoint()
            self._ends_s = perf_counter() + SLICE_S


_NONE = np.empty(0, np.int32)
