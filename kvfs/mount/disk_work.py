"""Disk work for plain files: workers make the calls that may wait for the disk, and each request has a deadline.

A disk may be slow, or it may hang. If it hangs, a call never returns, and its thread is stuck. A request waits for a
worker until a deadline or a signal. Then the request ends, and its job counts as *left*, while the worker continues.
When the worker returns, the owner's thread settles the job: it corrects the charge and the times. Until then

- the file is charged for the largest size that the job may give it, and shows its old size (see `kvfs.names.plain`);
- other changes of the file, and its test for an image, wait for the left job, each until its own deadline. So an
  earlier write can't overwrite a later one. Reads go on, and so does work that needs no disk: emptying the file (which
  gives it another backing file), removing the file, and changing its attributes;
- an import keeps its pages, because the worker may still write to them.

A program that got ETIMEDOUT or EINTR for a write can't know whether the write was done, as on NFS. If the worker writes
later, the file gets a new mtime at that time, and the kernel drops its cached pages of the file.

The threads are not those of trio's default limiter, which other code needs. At most MAX_THREADS may be at work or
stuck, and at most MAX_THREADS_OF_A_FILE of them for one file. `trio.to_thread` takes more than twice as long, and does
not report the end of abandoned threads.

The owner's thread itself reads, verifies and writes few bytes, where the kernel or `kvfs.names.plain` has them in
memory. Most other calls only copy bytes to or from memory, too, which takes less time than starting a task to wait for
them. So after the owner's thread has started a worker, the owner's thread blocks for a moment. If the worker answers in
this moment, no task is needed. This way 3,700 writes of 4 KiB are done a second instead of 1,600. If the worker does
not answer, the owner's thread does not block again for IN_VAIN_S. So a disk that hangs takes less than a hundredth of
the thread's time.
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
from kvfs.names.sums import EXTENT_BYTES, Verified, num_extents
from kvfs.volume.volume import Volume
from libsym.errors import SymError

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

MAX_THREADS = 32
MAX_THREADS_OF_A_FILE = 4

INLINE_BYTES = 64 << 10
"""Up to this size, bytes in memory are copied without a worker. A larger copy takes longer than waking a worker."""

MOMENT_S = 0.3e-3
"""How long the owner's thread blocks for a worker. A worker takes some 0.1 ms to wake up, copy a few KiB and answer."""

MOST_HELD = 32
"""The most files for which `_held` keeps the unread rest of an extent, because a sequential reader needs these bytes
next.
"""

IN_VAIN_S = 50e-3
"""Time for which the owner's thread does not block again after it has blocked in vain."""

INTERRUPT_GRACE_S = 1.0
"""A signal ends a request only if the disk has not answered for this time. No program expects a signal to interrupt a
write(2) to a file. But a user who presses Ctrl-C or kills the program wants the program to end.
"""


class _Stopped(Exception):  # noqa: N818 - not an error
    """Exception that ends an import when no request waits for the import any more."""


class _Job(Generic[_Result]):
    """A call for a worker to make."""

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
        """Function to call when the job has ended, or when it will never begin."""
        self.is_long = is_long
        """Whether the job's function checks from time to time whether the job is left."""
        self.is_left = False
        """Whether the request has stopped waiting for the job."""
        self.answer: outcome.Outcome[_Result] | None = None
        """The outcome of the worker's call."""
        self.is_awaited = False
        """Whether the owner's thread blocks for `met`. While the worker runs, `_meeting` guards this flag and
        `answer`.
        """
        self.met = threading.Lock()
        """Lock that is free once the worker has returned."""
        self.met.acquire()
        self.done = trio.Event()

    def end(self) -> None:
        """Settle the job, which has its answer or will never begin."""
        try:
            self.settle(self)
        except Exception:
            log.exception("after %r of %s", self.function, self.content.path)
        del self.function, self.settle  # they may hold the written data, or this job in a cycle
        self.done.set()

    def take(self) -> outcome.Outcome[_Result]:
        """Return the answer, and drop this job's reference to it. The frames of an error refer to the job, so a
        reference from the job to the error would be a cycle.
        """
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer


class _Watched:
    """A plain file that a worker imports. This object records when the worker began to wait for the disk."""

    def __init__(self, content: PlainFile, now: Callable[[], float]) -> None:
        self._content = content
        self._now = now
        self.asked_s: float | None = now()
        """When the present wait for the disk began; None: the worker does not wait for the disk. The wait for a thread
        counts, too.
        """

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
    """The workers for plain files of one mount. Deadlines are times of trio's clock."""

    def __init__(self, volume: Volume, eager: Eager) -> None:
        self._volume = volume
        self._eager = eager
        self._queue: deque[_Job[Any]] = deque()
        self._at_work: Counter[PlainFile] = Counter()
        """Number of threads at work, by file."""
        self._changes: dict[PlainFile, _Job[Any]] = {}
        """The job that changes or imports a file now, by file."""
        self._held: dict[PlainFile, tuple[int, int, bytes]] = {}
        """Verified bytes for the next read of a file; the file read last is the last item. For each file: its `changes`
        when the bytes were read, the offset of the bytes, and the bytes.
        """
        self._buffers = Buffers()
        self._meeting = threading.Lock()
        self._in_vain_until_s = -math.inf

    @property
    def patience_s(self) -> float:
        """How long a request waits for the disk."""
        return self._volume.disk.deadline_s

    async def leave(self) -> None:
        """Make the caller a task. From here on, the caller may wait for other things than a disk."""
        await self._eager.leave()

    # Reading

    async def read(self, content: PlainFile, offset: int, size: int, until_s: float) -> bytes | memoryview:
        """Read as `pread(2)` does, or raise EIO for damaged bytes. Use the result before the next await."""
        stop = min(offset + size, content.size)
        is_small = stop - offset <= INLINE_BYTES
        if is_small and (data_there := self._read_nowait(content, offset, stop)) is not None:
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

    def _read_nowait(self, content: PlainFile, offset: int, stop: int) -> bytes | memoryview | None:
        """Read few bytes that are in memory. None: only a worker can read or verify them."""
        sums = content.sums
        if sums.is_verified(offset, stop):
            return content.read_nowait(offset, stop - offset)
        start, end = offset - offset % EXTENT_BYTES, min(num_extents(stop) * EXTENT_BYTES, content.size)
        found = content.verified_nowait(start, end) if end - start <= INLINE_BYTES else None
        if found is None:
            return None
        self._note_verified(content, found)
        return found.data[offset - start : stop - start] if sums.is_verified(offset, stop) else None

    def _hold(self, content: PlainFile, changes: int, start: int, data: memoryview) -> None:
        """Hold the rest of an extent for a sequential reader."""
        self._held.pop(content, None)
        if data:
            self._held[content] = changes, start, bytes(data)
        if len(self._held) > MOST_HELD:
            del self._held[next(iter(self._held))]

    async def _verify(self, content: PlainFile, start: int, stop: int, until_s: float) -> memoryview:
        """Read bytes up to the end of the last extent, and compare the extents with their sums. Raise EIO if an extent
        differs.
        """
        room = self._buffers.take(num_extents(stop) * EXTENT_BYTES - start)
        found = await self.call(content, partial(content.verified, start, room), until_s)
        self._buffers.lend(room)
        self._note_verified(content, found)
        return found.data

    def _note_verified(self, content: PlainFile, found: Verified) -> None:
        """Note which extents match their sums. Raise EIO if an extent differs."""
        sums = content.sums
        for extent, expected in found.good:
            sums.fits(extent, expected)
        for extent, expected in found.damaged:
            if sums.expected(extent) == expected and not content.is_gone:  # else the file was changed meanwhile
                raise self._damaged(content, extent * EXTENT_BYTES, expected.num_bytes)

    def _damaged(self, content: PlainFile, start: int, num_bytes: int) -> SymError:
        path = str(self._volume.tree.path_of(self._volume.tree.get(content.inode)))
        error = SymError(
            f"damaged on disk: {path}: bytes {start} to {start + num_bytes} are not as they were synced", errno.EIO
        )
        log.error("%s", error, extra={"file": path})
        return error

    async def call(self, content: PlainFile, function: Callable[[], _Result], until_s: float) -> _Result:
        """Have a worker call a function that changes no bytes of the file."""
        return await self._answer_to(_Job(content, function), lambda: until_s - trio.current_time())

    # Changes. Callers make one change of a file at a time. During such a change, a left job may still be changing the
    # file, too.

    async def write(
        self, inode: Inode, content: PlainFile, offset: int, data: bytes | memoryview, until_s: float
    ) -> None:
        """Write all of `data`, which is copied before this method waits.

        A file without a name is not held in memory, because the write-back does not write it.
        """
        stop = offset + len(data)
        is_small = len(data) <= INLINE_BYTES and content.writes_nowait and (content.exists or bool(inode.names))
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
        self._buffers.give(copy)  # not in a `finally`: a worker that was left behind may still use it

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
        """Have a worker change bytes from `start` on. The file may have up to `size` bytes afterwards. `is_cut`: the
        change cuts the file to `size` bytes.

        Raise EIO if the change keeps a part of a damaged extent, because a new sum would hide the damage.
        """
        await self.at_rest(content, until_s)
        sums, charge = content.sums, self._volume.charged_for(inode, content, size)
        start = min(start, content.size)  # a change beyond the end also fills the bytes before it
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
                inode.note_change()  # a part of the change may be done, for example if the disk became full
            if job.is_left and job.answer is not None and inode.content is content:
                inode.modified()
                if not inode.opens:
                    content.close()  # the last handle was closed before the worker opened the backing file

        job = self._changes[content] = _Job(content, function, settle)
        await self._answer_to(job, lambda: until_s - trio.current_time())

    async def at_rest(self, content: PlainFile, until_s: float) -> None:
        """Wait until no left job changes the file any more."""
        job = self._changes.get(content)
        if job is not None:
            await self._eager.leave()
            with trio.CancelScope(deadline=until_s):
                await job.done.wait()
            if not job.done.is_set():
                raise self._timed_out(content)

    def require_rest(self, content: PlainFile) -> None:
        """Raise ETIMEDOUT if a left job still changes the file. An earlier request has waited for that job in vain."""
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
        """Have a worker read the file, which no job is changing. The work may take minutes, if the disk answers each
        call in time.

        `function` gets a source and a checkpoint. It must call the checkpoint often, and must not catch its exceptions.
        If this method raises, `undo` has been called, or will be called when the worker returns.
        """
        now = trio.lowlevel.current_clock().current_time  # any thread may call this
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
            limiter.release()  # a thread that was left behind uses no CPU time

    # Workers

    async def _answer_to(self, job: _Job[_Result], left_s: Callable[[], float]) -> _Result:
        """Give the job to a worker, and wait for the answer as long as `left_s` is positive."""
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
        """Block until the worker returns, but only for a moment. Return whether the worker has returned."""
        job.met.acquire(timeout=MOMENT_S)
        with self._meeting:
            job.is_awaited = False
            if job.answer is None:
                self._in_vain_until_s = trio.current_time() + IN_VAIN_S
                return False
        self._ended(job)
        return True

    async def _must_leave(self, job: _Job[Any]) -> bool:
        """Whether a request that got a signal has to leave its job. Before the decision, wait for the answer for a
        moment.
        """
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
        """Start threads for queued jobs, within the limits. `is_awaited`: the caller will block for the last job."""
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
            except RuntimeError as error:  # the system refuses another thread
                come_back(outcome.Error(SymError(f"no worker for the disk: {error}", errno.EAGAIN)))

    def _come_back(self, token: trio.lowlevel.TrioToken, job: _Job[Any], answer: outcome.Outcome[Any]) -> None:
        """Hand the answer to the owner's thread. The worker calls this at its end."""
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
            log.info("the disk has answered for %s after the request was given up", job.content.path)
        else:
            log.error("%r of %s failed", job.function, job.content.path, exc_info=error)

    def _timed_out(self, content: PlainFile) -> SymError:
        error = SymError(f"the disk under {self._volume.backing_dir} does not answer", errno.ETIMEDOUT)
        log.warning("%s: %s was given up after %g s", error, content.path.name, self.patience_s)
        return error
