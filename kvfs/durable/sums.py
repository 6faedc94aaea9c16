"""Checksums of plain files: puts sums into commits, and reads extents that have no sums.

A commit includes the sums of bytes that were appended since the last commit, if the file is synced and no change of the
file is under way. Overwritten bytes get their sums only after the file has not changed for QUIET_S. Before bytes with a
sum are overwritten, a commit has to mark the sum as invalid. If overwritten bytes got their sums earlier, a program
that alternately overwrites and syncs would wait for such a commit each time.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import trio

from kvfs.base.bell import Bell
from kvfs.durable.disk_jobs import DiskJobs
from kvfs.durable.index import Rows
from kvfs.durable.records import SEE_FSCK, SumsRecord, encode_sums
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.sums import EXTENT_BYTES, PART_EXTENTS, UNCHECKED, Expected, Sums, TakenSums, sum_of
from libsym.errors import NotFound, SymError

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""If a file lacks sums and has not changed for this time, its bytes are read, and their sums are computed."""
EXTENTS_A_JOB = 64
"""Extents that one job reads: 16 MiB."""
FILES_A_COMMIT = 64
"""Quiet files whose sums share one commit. A commit takes longer than reading a small file."""
LOOKED_AT = 512
"""Files to look at before other tasks run."""

SumsTaken: TypeAlias = list[tuple[PlainFile, TakenSums | None]]
"""Files with the sums that a commit takes from each; None: the commit removes all sums of the file."""


def restored_sums(records: Iterable[SumsRecord], backing: int) -> Sums:
    """Return the sums of one backing file from an inode's rows. Parts without a row are unchecked."""
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
        """Note files of the last daemon that have bytes without sums."""
        for content in contents:
            if content.sums.is_lacking(content.size):
                self.lacking[content] = None
        if self.lacking:
            self.bell.ring()

    def ask(self, content: PlainFile, *, is_quiet: bool) -> None:
        """Have the next commit take a file's marks and the sums of its appended bytes. If the file is quiet, the commit
        takes its other sums, too.
        """
        self._asked[content] = is_quiet or self._asked.get(content, False)

    def take_asked(self, rows: Rows, taken: SumsTaken, is_known: Callable[[PlainFile], bool]) -> None:
        """Put the requested sums into a cut. `is_known`: whether the index has a row of the file after the cut."""
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
        """Put into a cut those sums of a file that a commit may have."""
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
        """Note that the commit of these sums has succeeded."""
        for content, found in taken:
            if found is None:
                content.sums.forget()
            else:
                content.sums.committed(found)

    def not_committed(self, taken: SumsTaken) -> None:
        """Note that the index may or may not have the sums of a cut."""
        for content, _ in taken:
            content.sums.not_committed()


class Summer:
    """Reads extents without sums in quiet files."""

    def __init__(
        self,
        cutter: SumsCutter,
        jobs: DiskJobs,
        inode: Callable[[int], Inode],
        commit: Callable[[], Awaitable[object]],
    ) -> None:
        """`inode` returns an inode by its number. `commit` waits for a commit."""
        self._cutter = cutter
        self._jobs = jobs
        self._commit = commit
        self._inode = inode
        self._seen: dict[PlainFile, int] = {}

    async def run(self) -> None:
        """Compute the sums of files that have become quiet, until cancelled."""
        while True:
            await self._cutter.bell.wait()
            self.look()
            await trio.sleep(QUIET_S)
            await self.sum_quiet()
            if self._cutter.lacking:
                self._cutter.bell.ring()

    def look(self) -> None:
        """Note files that lack sums, with their present `changes`."""
        self._seen = {each: each.changes for each in self._cutter.lacking}

    async def sum_quiet(self) -> None:
        """Compute and commit the sums of the files that have not changed since `look`."""
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
            if place % LOOKED_AT == LOOKED_AT - 1:  # there may be a million files
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
        """Read extents without sums, and commit their sums, unless the file changes meanwhile."""
        if await self._read(content):
            await self._keep([content])

    async def _read(self, content: PlainFile) -> bool:
        """Read extents without sums. Return whether the file has not changed meanwhile."""
        changes, sums = content.changes, content.sums
        extents = sums.lacking(content.size)
        while extents:
            some, extents = extents[:EXTENTS_A_JOB], extents[EXTENTS_A_JOB:]
            expected = [sums.expected(each) for each in some]
            try:
                found = await self._jobs.do(partial(_sums_of, content, some, expected))
            except SymError as error:
                log.error("bytes of %s get no checksums: %s", content.name, error)  # noqa: TRY400 - a disk error
                break
            if content.changes != changes or sums.is_changing:
                return False
            if len(found) < len(some):
                log.error("%s is damaged, and gets no more checksums: %s", content.name, SEE_FSCK)
            sums.read(found)
        return True

    async def _keep(self, contents: list[PlainFile]) -> None:
        """Commit the known sums of some files."""
        for content in contents:
            self._cutter.lacking.pop(content, None)  # unreadable bytes are read again after a change
            self._cutter.ask(content, is_quiet=True)
        try:
            await self._commit()
        except SymError:  # the log has the error
            self._cutter.lacking |= dict.fromkeys(contents)

    async def finish(self) -> None:
        """Commit the known sums when the daemon ends. No bytes are read."""
        for content in self._cutter.lacking:
            self._cutter.ask(content, is_quiet=True)
        if self._cutter.lacking:
            await self._commit()


def _sums_of(content: PlainFile, extents: list[int], expected: list[Expected]) -> dict[int, int]:
    """Return the sums of extents. Workers call this. An extent whose bytes do not match its known sum is left out."""
    found, room = dict[int, int](), memoryview(bytearray(EXTENT_BYTES))
    for extent, (num_bytes, value) in zip(extents, expected, strict=True):
        data = content.read_to(extent * EXTENT_BYTES, room, keep=False)
        if not value or sum_of(data[:num_bytes]) == value:
            found[extent] = sum_of(data)
    return found
