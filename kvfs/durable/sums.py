"""Checksums of plain files on their way into the index: rows of a commit, and extents that have to be read for them.

A commit has the sums of what was appended since the last one, if the file is synced and nobody changes it. What was
overwritten gets its sums when the file has been left alone for QUIET_S: a program that overwrites and syncs in turns
would wait for a mark each time otherwise.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import trio

from kvfs.bell import Bell
from kvfs.durable.disk_jobs import DiskJobs
from kvfs.durable.index import Rows
from kvfs.durable.records import SEE_FSCK, SumsRecord, encode_sums
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.sums import EXTENT_BYTES, PART_EXTENTS, UNCHECKED, Expected, Sums, Taken, sum_of
from libsym.errors import NotFound, SymError

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""A file that was not changed for so long is read for the sums that it lacks."""
EXTENTS_A_JOB = 64
"""Extents that a job reads at once: 16 MiB."""
FILES_A_COMMIT = 64
"""Of quiet files: one that is small is read in less time than a commit takes."""
LOOKED_AT = 512
"""Files that are looked at before other tasks have a turn."""

SumsTaken: TypeAlias = list[tuple[PlainFile, Taken | None]]
"""Files whose sums a commit has; None: it has none of them any more."""


def restored_sums(records: Iterable[SumsRecord], backing: int) -> Sums:
    """Return what the rows of an inode say of one backing file. Parts whose rows are lost are unchecked."""
    kept, size = array("Q"), 0
    for record in sorted((each for each in records if each.backing == backing), key=attrgetter("part")):
        if size % EXTENT_BYTES:
            kept[-1] = UNCHECKED
        first = record.part * PART_EXTENTS
        kept.extend([UNCHECKED] * (first - len(kept)))
        kept.extend(record.sums)
        size = first * EXTENT_BYTES + record.num_bytes
    return Sums(kept, size)


class SumsCutter:
    """Puts sums into commits."""

    def __init__(self) -> None:
        self._asked: dict[PlainFile, bool] = {}
        self.lacking: dict[PlainFile, None] = {}
        """Files with bytes that have no sums in the index."""
        self.bell = Bell()
        """Rings when a file lacks sums."""

    def add_lacking(self, contents: Iterable[PlainFile]) -> None:
        """Note files of the daemon before that have bytes without sums."""
        for content in contents:
            if content.sums.is_lacking(content.size):
                self.lacking[content] = None
        if self.lacking:
            self.bell.ring()

    def ask(self, content: PlainFile, *, is_quiet: bool) -> None:
        """Have the next commit take what there is of a file's sums: marks, and all others if it is quiet."""
        self._asked[content] = is_quiet or self._asked.get(content, False)

    def take_asked(self, rows: Rows, taken: SumsTaken, is_known: Callable[[PlainFile], bool]) -> None:
        """Put what was asked for into a cut. `is_known`: whether the index knows the file behind that."""
        asked, self._asked = self._asked, {}
        for content, is_quiet in asked.items():
            if is_known(content):
                self.take(rows, taken, content, is_quiet=is_quiet)
                continue
            if content.sums.is_doubtful:
                rows.gone_sums.append((content.inode, 0))
            if (content.inode, 0) in rows.gone_sums:
                taken.append((content, None))
            else:
                content.sums.forget()

    def take(self, rows: Rows, taken: SumsTaken, content: PlainFile, *, is_quiet: bool = False) -> None:
        """Put what there is of a file's sums into a cut."""
        found = content.sums.take(content.size, is_synced=not content.is_dirty, is_quiet=is_quiet)
        if content.sums.is_lacking(content.size):
            self.lacking[content] = None
            self.bell.ring()
        if found is None:
            return
        taken.append((content, found))
        number = content.inode
        if found.is_shorter:
            rows.gone_sums.append((number, found.num_parts))
        for part in found.parts:
            record = SumsRecord(part, content.number, *found.part(part))
            rows.sums.append((number, part, encode_sums(number, record)))

    def committed(self, taken: SumsTaken) -> None:
        """The index has what a cut took."""
        for content, found in taken:
            if found is None:
                content.sums.forget()
            else:
                content.sums.committed(found)

    def not_committed(self, taken: SumsTaken) -> None:
        """The index may have it, or not."""
        for content, _ in taken:
            content.sums.not_committed()


class Summer:
    """Reads extents that have no sums, of files that are quiet."""

    def __init__(
        self,
        cutter: SumsCutter,
        jobs: DiskJobs,
        inode: Callable[[int], Inode],
        commit: Callable[[], Awaitable[object]],
    ) -> None:
        """`inode` gives one by its number, `commit` waits for a commit."""
        self._cutter = cutter
        self._jobs = jobs
        self._commit = commit
        self._inode = inode
        self._seen: dict[PlainFile, int] = {}

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._cutter.bell.wait()
            self.look()
            await trio.sleep(QUIET_S)
            await self.sum_quiet()
            if self._cutter.lacking:
                self._cutter.bell.ring()

    def look(self) -> None:
        """Note files that lack sums, as they are now."""
        self._seen = {each: each.changes for each in self._cutter.lacking}

    async def sum_quiet(self) -> None:
        """Sum the files that have not changed since they were seen."""
        read = list[PlainFile]()
        for place, (content, changes) in enumerate(self._seen.items()):
            if not self._is_shown(content):
                self._cutter.lacking.pop(content, None)
            elif content.changes == changes and not content.is_dirty and not content.sums.is_changing:
                if await self._read(content):
                    read.append(content)
                if len(read) == FILES_A_COMMIT:
                    await self._keep(read)
                    read = []
            if place % LOOKED_AT == LOOKED_AT - 1:  # there may be a million
                await trio.lowlevel.checkpoint()
        if read:
            await self._keep(read)

    def _is_shown(self, content: PlainFile) -> bool:
        try:
            inode = self._inode(content.inode)
        except NotFound:
            return False
        return inode.content is content and bool(inode.names) and not content.is_lost

    async def sum(self, content: PlainFile) -> None:
        """Read what has no sum, and commit the sums; nothing, if the file is changed meanwhile."""
        if await self._read(content):
            await self._keep([content])

    async def _read(self, content: PlainFile) -> bool:
        """Read what has no sum. Whether nobody has changed the file meanwhile."""
        changes, sums = content.changes, content.sums
        extents = sums.lacking(content.size)
        while extents:
            some, extents = extents[:EXTENTS_A_JOB], extents[EXTENTS_A_JOB:]
            expected = [sums.expected(each) for each in some]
            try:
                found = await self._jobs.do(partial(_sums_of, content, some, expected))
            except SymError as error:
                log.error("bytes of %s get no checksums: %s", content.name, error)  # noqa: TRY400 - of the disk
                break
            if content.changes != changes or sums.is_changing:
                return False
            if len(found) < len(some):
                log.error("%s is damaged, and gets no more checksums: %s", content.name, SEE_FSCK)
            sums.read(found)
        return True

    async def _keep(self, contents: list[PlainFile]) -> None:
        """Commit what is known of some files' sums."""
        for content in contents:
            self._cutter.lacking.pop(content, None)  # what can't be read is tried again when it was changed
            self._cutter.ask(content, is_quiet=True)
        try:
            await self._commit()
        except SymError:  # the log has it
            self._cutter.lacking |= dict.fromkeys(contents)

    async def finish(self) -> None:
        """Commit the sums that are known, as the daemon ends: nothing is read for that."""
        for content in self._cutter.lacking:
            self._cutter.ask(content, is_quiet=True)
        if self._cutter.lacking:
            await self._commit()


def _sums_of(content: PlainFile, extents: list[int], expected: list[Expected]) -> dict[int, int]:
    """For a worker. An extent of which a part has a sum gets another only if it fits that."""
    found, room = dict[int, int](), memoryview(bytearray(EXTENT_BYTES))
    for extent, (num_bytes, value) in zip(extents, expected, strict=True):
        data = content.read_to(extent * EXTENT_BYTES, room, keep=False)
        if not value or sum_of(data[:num_bytes]) == value:
            found[extent] = sum_of(data)
    return found
