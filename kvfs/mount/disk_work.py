"""Work below plain files that waits for the disk: in workers, and not for ever.

A disk may be slow, or it may hang: then a call to it never comes back, and its thread is stuck. A request waits for a
worker until a deadline, or a signal, and then leaves it behind: *left*. The worker goes on. On its way back it still
settles what it did, on the owner's thread: the charge, the times. Until then

- the file is charged for what it may become, and has its old size (see `kvfs.names.plain`);
- other changes of the file, and its test for an image, wait for that change, each until its own deadline. An earlier
  write can't overwrite a later one. Reads go on, and so does work that needs no disk: emptying the file, which gives it
  another backing file, removing it, its attributes;
- the pages of an import stay its own: the worker may yet write to them.

A program that got ETIMEDOUT or EINTR for a write can't know whether it was done, as on NFS. If the worker does it, the
file's mtime says so then, and the kernel drops what it had cached.

Threads are our own, not from trio's limiter, whose threads have other uses. Up to MAX_THREADS may be left behind; of
one file, MAX_THREADS_OF_A_FILE. `trio.to_thread` takes more than twice as long, and does not report on left threads.

Most calls only copy bytes to or from memory, and take less time than a task that waits for them. The owner's thread
therefore stays for a moment after it has asked, and takes the answer itself if it comes. With that, 3,700 writes of
4 KiB are done a second instead of 1,600. If no answer comes, the thread does not stay again for IN_VAIN_S: a disk that
hangs takes less than a hundredth of its time.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import outcome
import trio

from kvfs.images.header import ByteSource
from kvfs.mount.buffers import Buffers
from kvfs.mount.eager import Eager
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.sums import EXTENT_BYTES, num_extents
from kvfs.volume import Volume
from libsym.errors import SymError

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

MAX_THREADS = 32
MAX_THREADS_OF_A_FILE = 4

INLINE_BYTES = 64 << 10
"""Size up to which bytes in memory are read or written at once: copying more takes longer than a worker does."""

MOMENT_S = 0.3e-3
"""A worker needs some 0.1 ms to wake up, to copy a few KiB, and to wake us up."""

MOST_HELD = 32
"""Files of which the rest of the extent is held that was read last: a reader that goes on has its next bytes there."""

IN_VAIN_S = 50e-3
"""For so long nobody stays for a moment after one has done so in vain."""

INTERRUPT_GRACE_S = 1.0
"""A signal ends a request only if the disk does not answer for so long: no program expects one to end a write(2) to a
file, but whoever presses Ctrl-C, or kills it, wants it to end."""


class _Stopped(Exception):  # noqa: N818 - no error
    """An import that nobody waits for ends."""


class _Job(Generic[_Result]):
    """A call that a worker makes."""

    __slots__ = ("answer", "content", "done", "function", "is_awaited", "is_left", "is_long", "met", "settle")

    def __init__(
        self,
        content: PlainFile,
        function: Callable[[], _Result],
        settle: Callable[[_Job[_Result]], None] = lambda _job: None,
        *,
        is_long: bool = False,
    ) -> None:
        self.content = content
        self.function = function
        self.settle = settle
        """Called when it has ended, or if it never begins."""
        self.is_long = is_long
        """Whether it looks, now and then, whether it is left."""
        self.is_left = False
        """Whether nobody waits for it any more."""
        self.answer: outcome.Outcome[_Result] | None = None
        """The outcome of the worker's call."""
        self.is_awaited = False
        """Whether the owner's thread waits for `met`. Both under `DiskWork._meeting`, until it has come back."""
        self.met = threading.Lock()
        """Not to be had before the worker has come back."""
        self.met.acquire()
        self.done = trio.Event()

    def end(self) -> None:
        """Settle the job, which has its answer or will not begin."""
        try:
            self.settle(self)
        except Exception:
            log.exception("after %r of %s", self.function, self.content.path)
        del self.function, self.settle  # they may hold what was to be written; and this job, in a circle
        self.done.set()

    def take(self) -> outcome.Outcome[_Result]:
        """Hand over the answer: frames of an error in it hold this job, so the job must not hold the error."""
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer


class _Watched:
    """A plain file as a worker imports it. It says since when the worker has been waiting for the disk."""

    def __init__(self, content: PlainFile, now: Callable[[], float]) -> None:
        self._content = content
        self._now = now
        self.asked_s: float | None = now()
        """None: it is not waiting. At first it waits for a thread."""

    @property
    def size(self) -> int:
        return self._content.size

    def read_at(self, offset: int, size: int) -> bytes:
        self.asked_s = self._now()
        try:
            return self._content.read_at(offset, size)
        finally:
            self.asked_s = None

    def read_into(self, offset: int, room: memoryview) -> int:
        self.asked_s = self._now()
        try:
            return self._content.read_into(offset, room)
        finally:
            self.asked_s = None


class DiskWork:
    """The workers for plain files of one mount. Deadlines are points of trio's clock."""

    def __init__(self, volume: Volume, eager: Eager) -> None:
        self._volume = volume
        self._eager = eager
        self._queue: deque[_Job[Any]] = deque()
        self._at_work: Counter[PlainFile] = Counter()
        """Threads, by file."""
        self._changes: dict[PlainFile, _Job[Any]] = {}
        """Jobs that change a file, or import it, just now."""
        self._held: dict[PlainFile, tuple[int, int, bytes]] = {}
        """Verified bytes that nobody has asked for, in the order of reads: by file its `changes` then, and where they
        begin.
        """
        self._buffers = Buffers()
        self._meeting = threading.Lock()
        self._in_vain_until_s = -math.inf

    @property
    def patience_s(self) -> float:
        """Time that a request waits for the disk."""
        return self._volume.disk.deadline_s

    async def leave(self) -> None:
        """From here on the caller is a task, and may wait for something else than a disk."""
        await self._eager.leave()

    # Reading

    async def read(self, content: PlainFile, offset: int, size: int, until_s: float) -> bytes | memoryview:
        """As `pread(2)`; EIO: some of the bytes are not as they were synced. Use the result before the next await."""
        stop = min(offset + size, content.size)
        is_small = stop - offset <= INLINE_BYTES
        if is_small and content.sums.is_verified(offset, stop):
            data_there = content.read_nowait(offset, size)
            if data_there is not None:
                return data_there
        held = self._held.get(content)
        if held is not None and held[0] == content.changes and held[1] <= offset:
            begin, end = offset - held[1], stop - held[1]
            if begin < end <= len(held[2]):
                return memoryview(held[2])[begin:end]
        while not content.sums.is_verified(offset, stop):
            changes, start = content.changes, offset - offset % EXTENT_BYTES
            if content.sums.is_verified(offset, min(stop, start + EXTENT_BYTES)):
                start = offset
            data = await self._verify(content, start, stop, until_s)
            if content.changes == changes and len(data) >= stop - start:
                if not is_small:
                    self._hold(content, changes, stop, data[stop - start :])
                return data[offset - start : stop - start]
            stop = min(offset + size, content.size)
        room = self._buffers.take(max(stop - offset, 0))
        data = await self.call(content, partial(content.read_to, offset, room), until_s)
        self._buffers.lend(room)
        return data

    def _hold(self, content: PlainFile, changes: int, start: int, data: memoryview) -> None:
        """Keep the rest of an extent for who reads on."""
        self._held.pop(content, None)
        if data:
            self._held[content] = changes, start, bytes(data)
        if len(self._held) > MOST_HELD:
            del self._held[next(iter(self._held))]

    async def _verify(self, content: PlainFile, start: int, stop: int, until_s: float) -> memoryview:
        """Read to the end of the last extent, or raise EIO. Extents that begin there are compared with their sums."""
        room = self._buffers.take(num_extents(stop) * EXTENT_BYTES - start)
        found = await self.call(content, partial(content.verified, start, room), until_s)
        self._buffers.lend(room)
        sums = content.sums
        for extent, expected in found.good:
            sums.fits(extent, expected)
        for extent, expected in found.damaged:
            if sums.expected(extent) == expected and not content.is_gone:  # else it was changed meanwhile
                raise self._damaged(content, extent * EXTENT_BYTES, expected.num_bytes)
        return found.data

    def _damaged(self, content: PlainFile, start: int, num_bytes: int) -> SymError:
        path = str(self._volume.tree.path_of(self._volume.tree.get(content.inode)))
        error = SymError(
            f"damaged on disk: {path}: bytes {start} to {start + num_bytes} are not as they were synced", errno.EIO
        )
        log.error("%s", error, extra={"file": path})
        return error

    async def call(self, content: PlainFile, function: Callable[[], _Result], until_s: float) -> _Result:
        """Have a worker do something to the file that changes no byte."""
        return await self._answer_to(_Job(content, function), lambda: until_s - trio.current_time())

    # Changing: one at a time, the caller sees to that as long as it waits

    async def write(
        self, inode: Inode, content: PlainFile, offset: int, data: bytes | memoryview, until_s: float
    ) -> None:
        """Write all of `data`, which is copied before this waits for anything."""
        stop = offset + len(data)
        is_small = len(data) <= INLINE_BYTES and self._volume.disk.nowait.writes
        if is_small and content not in self._changes and not content.sums.guards(offset, stop):
            content.sums.begin(min(offset, content.size), stop)
            try:
                with self._volume.charged_for(inode, content, stop):
                    written = content.write_nowait(offset, data)
            finally:
                content.sums.end()
            if written == len(data):
                return
            offset += written
            data = data[written:]
        copy = self._buffers.take(len(data))
        copy[:] = data
        await self.change(inode, content, stop, partial(content.write_at, offset, copy), until_s, start=offset)
        self._buffers.give(copy)  # else a worker that was left behind may yet have it

    async def change(
        self,
        inode: Inode,
        content: PlainFile,
        size: int,
        function: Callable[[], None],
        until_s: float,
        *,
        start: int,
        is_cut: bool = False,
    ) -> None:
        """Have a worker change the file from `start` on, which becomes no longer than `size`. `is_cut`: it ends there.

        What it keeps of a damaged extent is EIO: its sum would say nothing any more.
        """
        await self.at_rest(content, until_s)
        sums, charge = content.sums, self._volume.charged_for(inode, content, size)
        start = min(start, content.size)  # a change behind the end fills what is between
        stop = max(content.size, sums.size) if is_cut else size
        is_guarded = is_cut or sums.guards(start, stop)
        while is_guarded and (edges := sums.unverified_edges(start, stop)):
            await self._verify(content, edges[0] * EXTENT_BYTES, (edges[0] + 1) * EXTENT_BYTES, until_s)
        sums.begin(start, stop)
        try:
            while is_guarded and sums.needs_mark(start, stop, is_cut=is_cut):
                await self._eager.leave()
                sums.ask(start, stop, is_cut=is_cut)
                await self._volume.storage.mark(content)
            charge.__enter__()
        except BaseException:
            sums.end()
            raise

        def settle(job: _Job[None]) -> None:
            del self._changes[content]
            charge.__exit__(None, None, None)
            sums.end()
            if inode.content is content and isinstance(job.answer, outcome.Error):
                inode.note_change()  # a part may have been done: of a write, the bytes that the disk had room for
            if job.is_left and job.answer is not None and inode.content is content:
                inode.modified()
                if not inode.opens:
                    content.close()  # the last handle went before the worker opened it

        job = self._changes[content] = _Job(content, function, settle)
        await self._answer_to(job, lambda: until_s - trio.current_time())

    async def at_rest(self, content: PlainFile, until_s: float) -> None:
        """Return when nothing that was left behind changes the file any more."""
        job = self._changes.get(content)
        if job is not None:
            await self._eager.leave()
            with trio.CancelScope(deadline=until_s):
                await job.done.wait()
            if not job.done.is_set():
                raise self._timed_out(content)

    def require_rest(self, content: PlainFile) -> None:
        """Raise if something that was left behind changes the file: somebody has waited for that, it is enough."""
        if content in self._changes:
            raise self._timed_out(content)

    # Importing

    async def long_job(
        self,
        inode: Inode,
        content: PlainFile,
        function: Callable[[ByteSource, Callable[[], None]], _Result],
        undo: Callable[[], None] = lambda: None,
    ) -> _Result:
        """Have a worker read the file, which is at rest: for minutes, if the disk answers each call in time.

        The function gets a source and a checkpoint, to be called often: it raises what must pass through. If this
        raises, `undo` has been called, or will be when the worker comes back.
        """
        now = trio.lowlevel.current_clock().current_time  # any thread may ask it
        source = _Watched(content, now)

        def settle(job: _Job[_Result]) -> None:
            del self._changes[content]
            if job.is_left or not isinstance(job.answer, outcome.Value):
                undo()

        def checkpoint() -> None:
            if job.is_left:
                raise _Stopped

        def work() -> _Result:
            source.asked_s = None
            return function(source, checkpoint)

        def left_s() -> float:
            asked_s = source.asked_s
            return self.patience_s - (0.0 if asked_s is None else now() - asked_s)

        job = _Job(content, work, settle, is_long=True)
        await self._eager.leave()
        limiter = self._eager.long_jobs(inode.uid)
        try:
            await limiter.acquire()
        except BaseException:
            undo()
            raise
        try:
            source.asked_s = now()
            self._changes[content] = job
            return await self._answer_to(job, left_s)
        finally:
            limiter.release()  # a thread that was left behind takes no processor

    # Workers

    async def _answer_to(self, job: _Job[_Result], left_s: Callable[[], float]) -> _Result:
        """Have a worker do it, and wait while time is left."""
        self._queue.append(job)
        if left_s() > 0:
            self._start(not job.is_long and trio.current_time() > self._in_vain_until_s)
        if job.is_awaited and self._comes_at_once(job):
            return job.take().unwrap()
        await self._eager.leave()
        try:
            while not job.done.is_set():
                patience_s = left_s()
                if patience_s <= 0:
                    self._leave(job)
                    raise self._timed_out(job.content)
                with trio.move_on_after(patience_s):
                    await job.done.wait()
        except trio.Cancelled:
            if await self._must_leave(job):
                self._leave(job)
                raise
        return job.take().unwrap()

    def _comes_at_once(self, job: _Job[Any]) -> bool:
        """Wait for a worker for a moment."""
        job.met.acquire(timeout=MOMENT_S)
        with self._meeting:
            job.is_awaited = False
            if job.answer is None:
                self._in_vain_until_s = trio.current_time() + IN_VAIN_S
                return False
        self._ended(job)
        return True

    async def _must_leave(self, job: _Job[Any]) -> bool:
        """Whether a request that got a signal is to end without an answer."""
        if job.done.is_set():
            return False
        job.is_left = job.is_long
        with trio.CancelScope(shield=True) as grace:
            grace.deadline = trio.current_time() + (0 if job in self._queue else INTERRUPT_GRACE_S)
            await job.done.wait()
        return job.is_left or not job.done.is_set()

    def _leave(self, job: _Job[Any]) -> None:
        job.is_left = True
        if job in self._queue:
            self._queue.remove(job)
            job.end()

    def _start(self, is_awaited: bool = False) -> None:
        """Give what waits to threads, as far as there may be more. `is_awaited`: the one that was added last."""
        while self._queue and self._at_work.total() < MAX_THREADS:
            job = next((job for job in self._queue if self._at_work[job.content] < MAX_THREADS_OF_A_FILE), None)
            if job is None:
                return
            job.is_awaited = is_awaited and job is self._queue[-1]
            self._queue.remove(job)
            self._at_work[job.content] += 1
            come_back = partial(self._come_back, trio.lowlevel.current_trio_token(), job)
            try:
                trio.lowlevel.start_thread_soon(job.function, come_back)
            except RuntimeError as error:  # the system gives us no more threads
                come_back(outcome.Error(SymError(f"no worker for the disk: {error}", errno.EAGAIN)))

    def _come_back(self, token: trio.lowlevel.TrioToken, job: _Job[Any], answer: outcome.Outcome[Any]) -> None:
        """In the worker, at its end."""
        with self._meeting:
            job.answer = answer
            is_awaited = job.is_awaited
        if is_awaited:
            job.met.release()
            return
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(self._ended, job)

    def _ended(self, job: _Job[Any]) -> None:
        self._at_work[job.content] -= 1
        if not self._at_work[job.content]:
            del self._at_work[job.content]
        if job.is_left:
            self._log_late(job)
        job.end()
        self._start()

    def _log_late(self, job: _Job[Any]) -> None:
        error = job.answer.error if isinstance(job.answer, outcome.Error) else None
        if error is None or isinstance(error, (SymError, _Stopped)):
            log.info("the disk has answered for %s, when nobody waited any more", job.content.path)
        else:
            log.error("%r of %s failed", job.function, job.content.path, exc_info=error)

    def _timed_out(self, content: PlainFile) -> SymError:
        error = SymError(f"the disk under {self._volume.backing_dir} does not answer", errno.ETIMEDOUT)
        log.warning("%s: %s was given up after %g s", error, content.path.name, self.patience_s)
        return error
