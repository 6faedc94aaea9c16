"""The storage of a volume. The keeper makes one commit at a time, for calls that wait and for changes that are old
enough.

    sync(inode)     1  write the file's pages into slots, or its bytes to the disk, in jobs beside those of other syncs
                    2  wait for a commit that has its rows, its names, and the operations that these depend on
    a commit        a  take a cut, at one instant                                              trio thread
                    b  sync files of slots, and new names of backing files                     worker
                    c  make one transaction                                                    worker
                    d  free space that only the old rows needed; wake the waiting calls        trio thread

Changes that no call syncs are written back once they are `WRITE_BACK_S` old, or exceed `WRITE_BACK_BYTES` in all. If a
commit fails, each call that waits for it gets the error, and the changes of the commit are dirty again.

The trio thread owns all state of the keeper.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat

import numpy as np
import trio

from kvfs.durable.cut import NO_BYTES, Cut, Cutter, Known, extent_of
from kvfs.durable.disk_jobs import DiskJobs
from kvfs.durable.disk_room import DiskRoom
from kvfs.durable.journal import Journal, NameChange
from kvfs.durable.kept import KeptRows
from kvfs.durable.pages_in import PagesIn, as_ours
from kvfs.durable.pages_out import PagesOut
from kvfs.durable.records import SEE_FSCK
from kvfs.durable.restore import Restored, Restorer, remove_leftovers
from kvfs.durable.slot_file import SlotFile, disk_error
from kvfs.durable.slots import Slots
from kvfs.durable.state import State
from kvfs.durable.sums import Summer
from kvfs.durable.superblock import sync_directory
from kvfs.names.content import Content, KvFile
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile, sync_all
from kvfs.names.tree import ROOT_NUMBER
from kvfs.pages.free_list import IntArray
from kvfs.volume.storage import Reading, StorageStatistics
from kvfs.volume.volume import Volume
from libsym.errors import NoSpace, SymError

log = logging.getLogger(__name__)

WRITE_BACK_S = 5.0
WRITE_BACK_BYTES = 256 << 20
WRITE_BACK_XATTRS_BYTES = 8 << 20
"""Bytes of attributes beyond which a request waits for a commit. Until the commit, these attributes take memory besides
the pages.
"""
GIVE_BACK_BYTES = 64 << 20
"""A commit begins when the slots freed since the last commit have more bytes than this. The commit returns the bytes to
the file system.
"""
SMALL_BYTES = 256 << 10
"""Plain files up to this size are synced several in a job. Larger files have a deadline each."""
LOOK_S = 0.5
"""Time between two checks of how many bytes are dirty."""
AGAIN_S = 5.0
"""Seconds from a disk error to the next attempt to write back changes that no call waits for."""
OTHERS_A_CUT = 32
"""Dirty inodes that a commit takes in addition to the inodes that calls wait for."""
LOOKED_AT = 512
"""Inodes to look at before other tasks run."""
NAMES_A_LINE = 20
"""Names on one line of the log, when the log lists files that are not kept or have lost entries."""
SYNCS_A_CUT = 32
"""The most syncs in one cut. A cut holds the trio thread for some 40 µs an inode. Further syncs wait for the next
commit.
"""


class _LeftOut(SymError):  # noqa: N818 - as the errors of libsym
    """Error for an inode that can't be written even if the disk is sound. Commits leave the inode out."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A call that waits for a commit."""

    inodes: tuple[Inode, ...]
    others: int
    """Number of further dirty inodes that the commit should take."""
    num_left: Callable[[], int]
    """Function that counts the changes that the call waits for and that the index lacks. The keeper calls the function
    between two commits.
    """
    is_slice: bool = False
    """Whether the commit should take a whole slice of the oldest operations, more than an ordinary cut takes."""
    is_apart: bool = False
    """Whether ready operations should not wait for earlier ones that are not ready."""
    found: int = 0
    is_over: trio.Event = field(default_factory=trio.Event)
    error: SymError | None = None


class _Wanted:
    """A file that a call wants to be durable, as it was at the time of the call."""

    __slots__ = ("_content", "_extent", "inode")

    def __init__(self, inode: Inode) -> None:
        self.inode = inode
        self._content = inode.content
        self._extent = extent_of(inode.content)

    @property
    def extent(self) -> int:
        """The extent that the index has to reach. If a plain file was imported meanwhile, the new content has the same
        bytes.
        """
        content = self.inode.content
        if content is self._content:
            return self._extent
        return content.born_length if isinstance(content, KvFile) else 0


class _Reading:
    """Implementation of `Reading`."""

    def __init__(self, jobs: DiskJobs, read: Callable[[], None], then: Callable[[], None]) -> None:
        self._jobs = jobs
        self._job = jobs.start(read, lambda _job: then())

    @property
    def is_over(self) -> bool:
        return self._job.has_ended

    async def wait(self) -> None:
        if self._job.has_ended:
            self._job.settle()
        else:
            await self._jobs.wait(self._job)


class Keeper:
    """The storage of one volume. Satisfies `Storage`, `Mover` and `SlotFiles`."""

    def __init__(
        self,
        state: State,
        kept: KeptRows,
        volume: Volume,
        journal: Journal,
        deadline_s: float = 30.0,
        disk_limit_bytes: int | None = None,
    ) -> None:
        """`volume` is empty, and its pool has room for the restored pages. The volume reports its changes to `journal`.

        `disk_limit_bytes`: limit on the bytes of pages, names and all other data on disk together.
        """
        self._state = state
        self._volume = volume
        self._journal = journal
        self.jobs = DiskJobs(str(state.directory), deadline_s)
        self._own = own = state.identity_of(volume.model, kept)
        self._others: list[tuple[int, int, int]] = []  # pages of other identities: first, stop, identity
        self._files: dict[int, SlotFile] = {}
        self.slots = {identity: Slots() for identity in kept.facts}  # also for identities without pages
        self._cutter = Cutter(volume.pool, journal, self.slots, own, volume.bits, self._note_left_out)
        restored = Restorer(volume, kept, own).run()
        for identity in kept.facts:
            self._files[identity] = state.slot_file(identity, kept.facts[identity])
        self.pages_in = PagesIn(volume, self.jobs, self._files[own])
        self._take_over(kept, restored, own)
        self.damage = _damage_of(kept)
        """Summary of the losses that the start found in the index; empty if the index is whole."""
        if self.damage:
            log.error("%s", self.damage)
        self._disk_limit_bytes = disk_limit_bytes
        self._disk_room = DiskRoom(state.directory, self.jobs, self._other_bytes, volume.disk.unwritten)
        self.pages_out = PagesOut(volume, self._files[own], self.slots[own], self.jobs, self.require_room)
        self._expiring, self._pinned, self._backing = restored.expiring, restored.pinned, restored.backing
        contents = [inode.content for inode in volume.tree]
        self._inherited = deque(each for each in contents if isinstance(each, PlainFile) and each.exists)
        """Plain files from before the start. They are synced once more, after other writes, because the last daemon may
        have been killed before their sync.
        """
        self.summer = Summer(self._cutter.sums, self.jobs, volume.tree.get, lambda: self._commit(lambda: 0))
        self._cutter.sums.add_lacking(self._inherited)
        self._asked: list[_Asked] = []
        self._committing, self._committed = Cut(), list[NameChange]()
        """The cut of the commit under way, and the operations of the last commit if that commit succeeded."""
        self._something_asked = trio.Event()
        if self._inherited:
            journal.bell.ring()
        self._doubtful: list[tuple[int, IntArray]] = []
        self._num_commits, self._error = 0, ""
        self._something_spare = trio.Event()
        self._bringing = trio.Lock()
        self._told: SymError | None = None
        """The error about unwritten changes that was logged last."""
        self._has_no_room = self._is_full = self._is_running = False
        volume.storage = self
        volume.pool.cold = self.pages_in
        if not kept.is_damaged:
            remove_leftovers(volume.backing_dir, self._backing)

    def _take_over(self, kept: KeptRows, restored: Restored, own: int) -> None:
        """Take over the slots that the index has."""
        for identity, slots in kept.slots.items():
            pages = restored.pages_of[identity]
            self.slots[identity].restore(slots.slots, self._volume.pool.refcount[pages])
            if identity != own:
                self.pages_in.add(int(pages[0]), int(pages[-1]) + 1, self._files[identity], kept.facts[identity])
                self._others.append((int(pages[0]), int(pages[-1]) + 1, identity))
        for identity, held in kept.held.items():
            self.slots[identity].hold_for_good(held)
        for identity, file in self._files.items() if kept.refusal else ():  # lost rows may need any slot
            self.slots[identity].hold_for_good(np.arange(file.num_slots, dtype=np.int32))
        self._cutter.named_elsewhere = kept.named_elsewhere
        self.lost = restored.lost
        """Files that lacked entries at the start. `lost_files` returns those that still lack entries."""
        self._tell_of_lost()
        versions, get, known = kept.versions, self._volume.tree.get, self._cutter.known
        if kept.is_root_damaged:
            known[ROOT_NUMBER] = Known(1)  # so that no commit writes the root's row
        for number in kept.inodes.keys() - {*versions.numbers}:
            known[number] = Known(len(get(number).names), kept.inodes[number].backing)
        all_fields = zip(
            [len(inode.names) for inode in restored.files],
            repeat(NO_BYTES),
            [inode.content for inode in restored.files],
            *(each.tolist() for each in (versions.lengths, versions.full_lengths, versions.identities)),
            versions.split(versions.slots),
            versions.turns,
            strict=False,
        )
        known.update(zip(versions.numbers, map(Known._make, all_fields), strict=True))

    def _tell_of_lost(self) -> None:
        lost = self.lost_files()
        if not lost:
            return
        named = [(str(self._volume.tree.path_of(inode)), kv.table.length, kv.lost) for inode, kv in lost[:NAMES_A_LINE]]
        told = [f"{path} has {left} of {left + gone}" for path, left, gone in named]
        told += ["symphony fsck names the others"] if len(lost) > len(named) else []
        log.warning(
            "KV files that lost entries: %d: %s",
            len(lost),
            ", ".join(told),
            extra={"file": [each[0] for each in named]},
        )

    def lost_files(self) -> list[tuple[Inode, KvFile]]:
        """Return files that lack entries, with their KV files. A file that was cut below the loss, or removed, is no
        longer returned.
        """
        found = [(each, each.content) for each in self.lost if each.names and isinstance(each.content, KvFile)]
        lost = sorted(((inode, kv) for inode, kv in found if kv.lost), key=lambda pair: pair[0].number)
        self.lost = {inode for inode, _ in lost}
        return lost

    # Methods of `Mover`

    @property
    def deadline_s(self) -> float:
        return self.jobs.deadline_s

    def bring_in(self, pages: IntArray, frames: IntArray, then: Callable[[SymError | None], None]) -> None:
        self.pages_in.bring_in(pages, frames, then)

    def write_out(self, pages: IntArray, then: Callable[[SymError | None], None]) -> None:
        self.pages_out.write_out(pages, then)

    def late(self) -> SymError:
        return self.jobs.late()

    # Methods of `Storage`

    def read_cold(self, pages: IntArray, rooms: Sequence[memoryview], then: Callable[[], None]) -> Reading:
        def ended() -> None:
            self.pages_in.num_bytes += sum(map(len, rooms))
            then()

        return _Reading(self.jobs, partial(self.pages_in.read_into, pages, rooms), ended)

    async def sync(self, inode: Inode) -> None:
        """Make an inode durable as it is now. If the inode has no name, only the bytes of a plain file are synced."""
        number, wanted = self._journal.number, _Wanted(inode)

        def num_left() -> int:
            is_whole = self._cutter.knows(inode, wanted.extent)
            return 0 if is_whole and not self._journal.concerns(inode, number) else 1

        self._cutter.try_again((inode,))
        while True:
            await self._shorten(inode, number)
            await self._write_or_make_room(inode.content)
            for each in await self._end_first_syncs(self._cutter.holding_up(inode)):
                await self._write_or_make_room(each)
            if not await self._commit(num_left, (inode,)):
                return
            self._require_written(inode)

    async def _shorten(self, inode: Inode, number: int) -> None:
        """Commit the oldest operations, slice by slice, until the operations that a sync depends on fit into one cut,
        or until no older operation is left.

        Files that hold up the oldest operations are written. If such a file can't be written, other operations overtake
        the operation that it holds up. A file that has changed before the cut is written once more.
        """
        journal, is_apart, mark = self._journal, False, self._journal.num_passes
        await self._settle()
        while journal.has_operation(number) and journal.is_long(inode):
            error: SymError | None = None
            unready = [*self._cutter.unready(journal.first_operations()), *self._cutter.holding_up(inode)]
            for each in await self._end_first_syncs(unready):
                try:
                    await self._write_or_make_room(each)
                except SymError as failure:
                    error = failure
            is_apart = is_apart or error is not None or bool(journal.left_out)
            if await self._commit(lambda: len(self._committed), is_slice=True, is_apart=is_apart):
                is_apart, mark = False, journal.num_passes
            elif is_apart and self._has_looked(mark):
                self._require_written()
                raise error or self.jobs.late()

    async def _settle(self) -> None:
        """Have the journal forget files that no longer exist."""
        while self._journal.settle():
            await trio.lowlevel.checkpoint()

    async def sync_all(self) -> None:
        """Wait until all changes made before the call are on disk. A file that can't be written holds up no other
        file.
        """
        with self._journal.counting() as num_changes_left:
            await self._sync_all(num_changes_left)

    async def _sync_all(self, num_changes_left: Callable[[], int]) -> None:
        self._cutter.try_again(tuple(self._journal.left_out))
        files: deque[_Wanted] = deque()
        for place, inode in enumerate(dict.fromkeys([*self._committing.inodes, *self._journal.dirty])):
            files.append(_Wanted(inode))
            if place % LOOKED_AT == LOOKED_AT - 1:  # there may be 100,000 inodes
                await trio.lowlevel.checkpoint()

        def num_left() -> int:
            while files and self._cutter.knows(files[0].inode, files[0].extent):
                files.popleft()
            return len(files) + num_changes_left() + len(self._inherited)

        before, mark, last_pass = -1, self._journal.num_passes, self._journal.last_dirty_pass
        while True:
            error = await self._write_back()
            self._is_full = error is not None and error.errno == errno.ENOSPC
            left = await self._commit(num_left, others=OTHERS_A_CUT)  # even after an error, because removals make room
            is_stuck = left == before and self._has_looked(mark) and self._journal.num_dirty_passes >= last_pass
            if error is not None and (not left or is_stuck):
                raise error
            if not left:
                self._told = None
                return
            if is_stuck:
                self._require_written()
            if left != before:
                before, mark, last_pass = left, self._journal.num_passes, self._journal.last_dirty_pass

    def _require_written(self, inode: Inode | None = None) -> None:
        """Raise EIO if all commits leave out this inode, or an inode that holds it up. Without `inode`, raise EIO if
        commits leave out any inode.
        """
        left_out = self._cutter.left_out(inode)
        if left_out is not None:
            raise _LeftOut(self._why_left_out(left_out), errno.EIO)

    def _why_left_out(self, inode: Inode) -> str:
        path = self._volume.tree.path_of(inode)
        return f"{path} is left out of all commits, because it can't be written: {self._journal.left_out[inode]}"

    async def bring_xattrs(self, inode: Inode) -> None:
        """Read an inode's large attributes into memory again. Only one job at a time reads attributes, so that a
        program that asks for many attributes does not delay other jobs.
        """
        xattrs = inode.xattrs
        with trio.move_on_after(self.jobs.deadline_s):
            async with self._bringing:
                while xattrs.is_away:
                    changes = xattrs.changes
                    noted = await self.jobs.do(partial(self._state.index.xattrs, inode.number))
                    if not xattrs.is_away or xattrs.changes != changes:
                        continue  # `noted` is out of date: the attributes have changed since, or the file is gone
                    if noted is None:
                        raise SymError(f"the attributes of inode {inode.number} are lost: {SEE_FSCK}", errno.EIO)
                    xattrs.bring(noted)
            return
        raise self.jobs.late()

    async def mark(self, content: PlainFile) -> None:
        """Commit the marks of a plain file. All waiting callers share the commit."""
        self._cutter.sums.ask(content, is_quiet=False)
        await self._commit(lambda: 0)

    @property
    def is_behind(self) -> bool:
        noted = self._journal.noted
        return len(noted) > LOOKED_AT or sum(each.xattrs.held_bytes for each in noted) > WRITE_BACK_XATTRS_BYTES

    async def catch_up(self) -> None:
        """Commit inodes with large attributes. All waiting callers share the commit."""
        await self._commit(lambda: 0, tuple(islice(self._journal.noted, OTHERS_A_CUT)), others=OTHERS_A_CUT)

    def require_room(self, num_bytes: int) -> None:
        room = self._room_bytes()
        if room is not None and num_bytes > room:
            raise NoSpace(
                f"what is kept on disk is at its limit of {self._disk_limit_bytes} bytes: {self._used_bytes()} are "
                f"used, {num_bytes} more are wanted; remove files (`symphony du --disk` shows them), or start the "
                "daemon with more --disk"
            )

    def require_noted(self, num_bytes: int) -> None:
        self.require_room(num_bytes)
        self._disk_room.require(num_bytes)

    def num_free_slots(self) -> int | None:
        room = 0 if self._is_full or self._has_no_room else self._room_bytes()
        return None if room is None else max(0, room) // self._files[self._own].slot_bytes

    def needs_backing(self, name: str) -> bool:
        return name in self._backing

    def check(self) -> None:
        """Raise AssertionError if a free slot is owned by a page or needed by a version, or if a slot is neither free
        nor used.
        """
        for slots in self.slots.values():
            slots.check()

    def limit(self, disk_limit_bytes: int | None, deadline_s: float) -> None:
        """Set new limits. Bytes on disk beyond a smaller limit stay there."""
        self._disk_limit_bytes = disk_limit_bytes
        self.jobs.deadline_s = deadline_s
        self._volume.pager.try_again()

    # The service

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the storage until it is cancelled. Call `drain` before that."""
        for inode in self._expiring:
            self._volume.resume_expiry(inode)
        self._expiring = []
        self._is_running = True
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.jobs.run)
                await nursery.start(self._volume.pager.run)
                self._volume.pager.start(self)
                nursery.start_soon(self._commit_for_ever)
                nursery.start_soon(self._write_back_for_ever)
                nursery.start_soon(self._pin_again)
                nursery.start_soon(self._shrink_for_ever)
                nursery.start_soon(self.summer.run)
                task_status.started()
        finally:
            self._is_running = False

    async def _shrink_for_ever(self) -> None:
        """Have the index return its free pages to the file system, a few at a time. Commits run in between."""
        while True:
            await self._something_spare.wait()
            self._something_spare = trio.Event()
            try:
                while await self.jobs.do(self._state.index.shrink):
                    pass
            except SymError as error:
                log.info("the index stays as large as it is: %s", error)

    async def _pin_again(self) -> None:
        """Bring the pinned files into memory after a start. Each file takes a millisecond, and other tasks run after
        each file.
        """
        while self._pinned:
            inode = self._pinned.pop()
            if inode.names and inode.advice.pinned:
                self._volume.resume_pin(inode)
            await trio.lowlevel.checkpoint()

    async def drain(self, limit_s: float = math.inf) -> list[str]:
        """Make all files that have a name durable when the daemon ends. Files that have been dirty longest are written
        first. Return the names that are not durable, because the disk fails, `limit_s` is over, or an error has ended
        the storage.
        """
        why = "an error has ended the storage"
        if self._is_running:
            why = f"{limit_s:.3g} s were not enough"
            with trio.move_on_after(limit_s):
                try:
                    return await self._drained()
                except SymError as error:
                    why = str(error)
        names = self.unsynced_names()
        for first in range(0, len(names), NAMES_A_LINE):
            some = names[first : first + NAMES_A_LINE]
            log.error("not kept: %s: %s", ", ".join(some), why, extra={"file": some})
        return names

    async def _drained(self) -> list[str]:
        """Make everything durable, and return an empty list. If the disk does not answer in time, try again until the
        caller cancels this.
        """
        while True:
            try:
                await self.sync_all()
                await self.summer.finish()
            except SymError as error:
                if error.errno != errno.ETIMEDOUT:
                    raise
            else:
                return []

    async def is_at_rest(self, limit_s: float) -> bool:
        """Wait at most `limit_s` for the end of all disk jobs. Return whether all jobs have ended. If so, the files of
        the state may be closed.
        """
        with trio.move_on_after(limit_s):
            await self.jobs.are_over()
            return True
        return not self.jobs.num_under_way

    def close(self) -> None:
        """Close the state after the daemon's end."""
        self._state.close()

    def unsynced_names(self) -> list[str]:
        """Return the names whose changes a crash would lose now. Names in a commit under way are returned, too,
        although their changes may survive.
        """
        journal, tree = self._journal, self._volume.tree
        changes = [*self._committing.changes, *journal.operations.values()]
        named = {put.after for change in changes for put in change.puts if put.after is not None}
        dirty = {*journal.dirty, *self._committing.inodes}
        return sorted(str(tree.path_of(inode)) for inode in dirty | named if inode.names)

    def statistics(self) -> StorageStatistics:
        left_out = self._cutter.left_out()
        return StorageStatistics(
            self._used_bytes(),
            self._disk_limit_bytes,
            len(self._journal.dirty) + len(self._journal.operations),
            self._dirty_bytes(),
            self._num_commits,
            self.pages_out.num_bytes,
            self.pages_in.num_bytes,
            self._error or ("" if left_out is None else self._why_left_out(left_out)),
            len(self.lost_files()),
            self.damage,
        )

    def _room_bytes(self) -> int | None:
        """Return how many more bytes the limit allows, or None if there is no limit."""
        return None if self._disk_limit_bytes is None else self._disk_limit_bytes - self._used_bytes()

    def _used_bytes(self) -> int:
        slots = sum(self.slots[each].num_used * file.slot_bytes for each, file in self._files.items())
        return self._other_bytes() + slots

    def _other_bytes(self) -> int:
        return self._volume.pool.accounts.bytes_beside_pages

    # Writing back

    async def _write_back_for_ever(self) -> None:
        while True:
            await self._journal.bell.wait()
            ends_s = trio.current_time() + WRITE_BACK_S
            while trio.current_time() < ends_s and not self._is_much_dirty():  # noqa: ASYNC110
                await trio.sleep(LOOK_S)
            try:
                await self.sync_all()
            except _LeftOut:  # the log has the error
                await trio.sleep(AGAIN_S)
            except SymError as error:
                self._failed(error)
                await trio.sleep(AGAIN_S)
            if self._inherited or not self._journal.is_empty:
                self._journal.bell.ring()

    def _is_much_dirty(self) -> bool:
        is_much = self._volume.disk.unwritten.are_many or self._dirty_bytes() > WRITE_BACK_BYTES
        return is_much or self.is_behind

    def _dirty_bytes(self) -> int:
        """Return the bytes of pages that lack slots, in the few files that have been dirty longest."""
        dirty = [inode.content for inode in self._journal.first_dirty(OTHERS_A_CUT)]
        missing = [self.pages_out.missing(kv, kv.table.length).size for kv in dirty if isinstance(kv, KvFile)]
        return sum(missing) * self._volume.pool.page_bytes

    async def _write_back(self) -> SymError | None:
        """Write some dirty files' bytes to disk, so that the next commit can take the files. Return the first error, or
        None.
        """
        contents = [inode.content for inode in self._journal.first_dirty(OTHERS_A_CUT)]
        waiting = self._cutter.unready(self._journal.first_operations())
        inherited = [self._inherited.popleft() for _ in range(min(len(self._inherited), OTHERS_A_CUT))]
        distinct = dict.fromkeys([*contents, *waiting, *inherited])
        errors = await self._write_small(distinct)
        for content in distinct:
            if content not in errors:
                try:
                    await self._write(content)
                except SymError as error:
                    errors[content] = error
        self._inherited += [each for each in inherited if each in errors and not each.sync_failed]
        return next(iter(errors.values()), None)

    async def _end_first_syncs(self, holding_up: list[KvFile | PlainFile]) -> list[KvFile]:
        """Sync the plain files that hold up operations. A file that the disk refuses holds up no operation after that.
        Return the KV files. Raise the error if the disk does not answer.
        """
        for content, error in (await self._write_small(holding_up)).items():
            if isinstance(content, PlainFile) and content.is_awaited:
                raise error
        return [each for each in holding_up if isinstance(each, KvFile)]

    async def _write_small(self, contents: Iterable[Content | None]) -> dict[Content | None, SymError]:
        """Sync the small plain files among the contents, several in a job. Return the errors of those that failed."""
        plain = dict.fromkeys(each for each in contents if isinstance(each, PlainFile))
        small = [each for each in plain if each.is_dirty and each.size <= SMALL_BYTES]
        errors = dict[Content | None, SymError]()
        for first in range(0, len(small), OTHERS_A_CUT):
            some = small[first : first + OTHERS_A_CUT]
            try:
                failed = await self.jobs.do(partial(sync_all, some))
            except Exception as error:  # noqa: BLE001 - as in `_write`
                failed = dict.fromkeys(some, as_ours(error))
            for content, ours in failed.items():
                self._failed(ours)
                errors[content] = ours
        return errors

    async def _write(self, content: Content | None) -> None:
        """Write the bytes of a file to the disk."""
        try:
            await self._write_now(content)
        except Exception as error:
            ours = as_ours(error)
            self._failed(ours)
            raise ours from error

    async def _write_now(self, content: Content | None) -> None:
        if isinstance(content, KvFile):
            await self.pages_out.write(content, content.table.length)
        elif isinstance(content, PlainFile) and content.is_dirty:
            await self.jobs.do(content.sync)

    async def _write_or_make_room(self, content: Content | None) -> None:
        """Write a file as `_write` does. If the disk is full, commit all removals and try once more."""
        try:
            await self._write(content)
        except SymError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._is_full = True
            await self._make_room()
            await self._write(content)
            self._is_full = False

    async def _make_room(self) -> None:
        """Commit all removals made until now, and wait until their blocks are free in the file system."""
        journal, number = self._journal, self._journal.number
        mark, last_pass = journal.num_passes, journal.last_dirty_pass
        is_over = False

        def num_kept() -> int:
            return sum(change.number <= number for change in self._committed)

        while not is_over:
            await self._end_first_syncs(self._cutter.unready(journal.first_operations()))
            has_some = await self._commit(num_kept, others=OTHERS_A_CUT, is_slice=True, is_apart=True)
            is_over = not has_some and self._has_looked(mark) and journal.num_dirty_passes >= last_pass
        await self.jobs.idle()

    def _has_looked(self, mark: int) -> bool:
        """Whether commits have looked at all operations since `journal.num_passes` was `mark`."""
        return not self._journal.is_in_pass or self._journal.num_passes > mark + 1

    # Commits

    async def _commit(
        self,
        num_left: Callable[[], int],
        inodes: tuple[Inode, ...] = (),
        others: int = 0,
        *,
        is_slice: bool = False,
        is_apart: bool = False,
    ) -> int:
        """Wait for a commit. Return the result of `num_left`, called after the commit and before the next cut."""
        asked = _Asked(inodes, others, num_left, is_slice, is_apart)
        self._asked.append(asked)
        self._something_asked.set()
        with trio.move_on_after(self.jobs.deadline_s):
            await asked.is_over.wait()
            if asked.error is not None:
                raise SymError(str(asked.error), asked.error.errno)
            return asked.found
        raise self.jobs.late()

    async def _commit_for_ever(self) -> None:
        while True:
            await self._something_asked.wait()
            asked, self._asked = self._asked[:SYNCS_A_CUT], self._asked[SYNCS_A_CUT:]
            if not self._asked:
                self._something_asked = trio.Event()
            self._committed = []
            await self._settle()
            error = await self._commit_once(asked)
            if error is not None:
                self._failed(error)
            for each in asked:
                each.error = error
                each.found = 0 if error is not None else each.num_left()
                each.is_over.set()
                await trio.lowlevel.checkpoint()  # each `num_left` may look at a whole slice

    async def _commit_once(self, asked: Sequence[_Asked]) -> SymError | None:
        """Make one commit. Return its error, or None."""
        try:
            self._state.index.require_commits()
        except SymError as refusal:
            return refusal
        cut = self._cutter.take(
            [inode for each in asked for inode in each.inodes],
            self._volume.tree.next_number,
            max(each.others for each in asked),
            is_slice=any(each.is_slice for each in asked),
            is_apart=self._is_full or any(each.is_apart for each in asked),
        )
        self._committing = cut  # if an exception ends the storage, `unsynced_names` finds the changes here
        self._backing.update(cut.new_backing)
        covered = self.pages_out.begin_sync()
        error = None if cut.is_empty and not covered.size else await self._make_durable(cut, covered)
        self._committing = Cut()
        self._journal.look_at_noted()
        return error

    async def _make_durable(self, cut: Cut, covered: IntArray) -> SymError | None:
        other_bytes = self._other_bytes()
        error = await self._error_of(self._sync_slots) if covered.size else None
        if error is not None:
            self.pages_out.sync_failed(covered)
        else:
            error = await self._error_of(lambda: self._write_index(cut))
        if error is not None:
            self._doubtful += self._cutter.failed(cut)
            return as_ours(error)
        self._num_commits += 1
        self._error = ""
        self._has_no_room = False
        self._cutter.succeeded(cut)
        self._committed = cut.changes
        for identity, slots in self._doubtful:
            self.slots[identity].need_no_more(slots)
        self._doubtful = []
        self._free(cut)
        self._disk_room.look_again(other_bytes)
        if self._state.index.has_spare:
            self._something_spare.set()
        return None

    async def _error_of(self, function: Callable[[], None]) -> Exception | None:
        """Call a function in a job. Return the function's error, or None."""
        job = self.jobs.start(function)
        await job.is_over.wait()
        return job.error

    def _sync_slots(self) -> None:
        try:
            self.pages_out.file.sync()
        except OSError as error:
            raise disk_error("sync", self.pages_out.file.path, error) from error

    def _write_index(self, cut: Cut) -> None:
        if cut.new_backing:
            try:
                sync_directory(self._state.files)
            except OSError as error:
                raise disk_error("sync", self._state.files, error) from error
        self._state.index.commit(cut.rows)

    def _free(self, cut: Cut) -> None:
        """Free the space that the rows of the index no longer need."""
        for name in cut.gone_backing:
            self._backing.discard(name)
            self._volume.forget_backing(name)
        for identity, slots in self.slots.items():
            freed = slots.take_freed()
            if freed.size:
                self._cutter.forget_slots(identity, freed)
                slots.hold(freed)
                self._give_back(identity, freed)

    def _give_back(self, identity: int, freed: IntArray) -> None:
        file, slots = self._files[identity], self.slots[identity]

        def give_back() -> None:
            file.give_back(freed.tolist(), slots.end)

        def given(job: object) -> None:
            slots.let_go(freed)
            error = getattr(job, "error", None)
            if error is not None:
                log.warning("freed space of %s stays where it is: %s", file.path, error)

        self.jobs.start(give_back, given)

    def disown(self, pages: IntArray, slots: IntArray) -> None:
        """Note that pages of one file have given up slots (a method of `SlotFiles`). All pages of a file have one
        identity.
        """
        first = int(pages[0])
        others = (identity for low, high, identity in self._others if low <= first < high)
        identity = next(others, self._own)
        self.slots[identity].disown(slots)
        if self.slots[identity].num_freed * self._files[identity].slot_bytes > GIVE_BACK_BYTES:
            self._journal.bell.ring()  # a removed file without a name rings no bell by itself

    def _note_left_out(self, inode: Inode, error: Exception) -> None:
        path = str(self._volume.tree.path_of(inode))
        log.error("%s", self._why_left_out(inode), extra={"file": path}, exc_info=error)

    def _failed(self, error: SymError) -> None:
        is_full = error.errno == errno.ENOSPC
        told = self._told
        if told is None or (str(told) != str(error) and not (is_full and told.errno == errno.ENOSPC)):
            limit = "no limit by --disk" if self._disk_limit_bytes is None else f"a limit of {self._disk_limit_bytes}"
            sums = f"; {self._used_bytes()} bytes are used, of {limit}" if is_full else ""
            log.error("not everything is on disk: %s%s", error, sums)
            self._told = error
        self._error = str(error)
        self._has_no_room = is_full


def _damage_of(kept: KeptRows) -> str:
    """Return a summary of the index's damage; empty if the index is whole."""
    if not kept.is_damaged:
        return ""
    found = [f"names that are refused: {len(kept.refused)}"] if kept.refused else []
    found += [f"files that no name leads to: {kept.num_unreachable}"] if kept.num_unreachable else []
    found += ["changes of the root directory's own attributes are not kept"] if kept.is_root_damaged else []
    found += [kept.refusal] if kept.refusal else []
    return f"the index is damaged: {'; '.join(found) or 'all files are whole'}; {SEE_FSCK}"
