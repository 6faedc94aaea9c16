"""Regular files that are open on the mount, and what changes under their handles.

Everything runs on the trio thread; slow parts run in workers. A file's lock is held by whatever opens it or changes
its content: so an open during an import waits, and sees the KV file.

A request waits for the disk until its deadline, which begins when it comes: so whoever waits for the lock behind it
gets that before a deadline of his own. Only imports, and readers that hash a KV file, hold it longer: the deadline of
who waits for those begins when they have ended (`OpenFile.excused_s`).
"""

from __future__ import annotations

import errno
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from kvfs.mount.disk_work import DiskWork
from kvfs.mount.eager import Eager, Mutex
from kvfs.mount.incoming import Refusal, take_in
from kvfs.mount.nodes import Nodes
from kvfs.mount.spans import Rooms
from kvfs.mount.turns import Turns, at_once
from kvfs.mount.views import Reader, Version, View, version_of
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.volume import Volume
from libsym.errors import Invalid, NotSupported, SymError

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
"""The most that one copy_file_range copies byte by byte; the caller loops. Bounds how long it holds the file."""

MAX_IDLE = 64
"""Backing files that stay open after their last handle: `cat` opens the same ones again and again."""

_KERNEL_CUT = 0xFFFFF000
"""No copy_file_range that reaches us is longer: the kernel cuts it here."""


@dataclass(slots=True, eq=False)
class Handle:
    """One open of a regular file."""

    file: OpenFile
    node: int
    """What the kernel opened: see `kvfs.mount.nodes`."""
    readable: bool
    writable: bool
    wrote: bool = False
    """Something was changed through it: its FLUSH tests the content."""
    closes: bool = False
    """A descriptor was closed since the last change: perhaps the last one."""
    direct: bool = False
    """It goes past the page cache, and so it can't be mapped for sharing."""
    own: Reader | None = None
    """What a direct handle reads, of a KV file."""
    keep_cache: bool = False
    """At open, the page cache holds what the handle is to see."""


@dataclass(slots=True)
class Fork:
    """A copy_file_range that made its target a fork at once, and answers for the rest piece by piece."""

    source: Handle
    size: int
    answered: int


@dataclass(slots=True, eq=False)
class OpenFile:
    """What the handles of one inode share."""

    inode: Inode
    lock: Mutex
    node: int
    """What a lookup is answered with: the newest version's."""
    handles: set[Handle] = field(default_factory=set)
    views: dict[int, View] = field(default_factory=dict)
    """By node."""
    direct: defaultdict[int, Counter[Version]] = field(default_factory=lambda: defaultdict(Counter))
    """By node: how many handles read each version past the page cache. A lookup must not look at every handle."""
    fork: Fork | None = None
    refusal: Refusal | None = None
    """Why the bytes as they are now are no image: not tested twice."""
    excused_s: float = -math.inf
    """When the lock was held last by somebody who waited for something else than the disk."""


class OpenFiles:
    """Every open regular file of one mount."""

    def __init__(self, volume: Volume, eager: Eager, nodes: Nodes, turns: Turns | None = None) -> None:
        self._volume = volume
        self._turns = turns or Turns(eager, at_once)
        self._nodes = nodes
        self._eager = eager
        self._disk = DiskWork(volume, eager)
        self._rooms = Rooms()
        self._files: dict[int, OpenFile] = {}
        self._idle: dict[PlainFile, None] = {}  # those that may be open below without a handle, the oldest first
        self._cached: dict[int, Version | None] = {}  # what the kernel's page cache holds, by node

    # Opening and closing

    async def open(self, inode: Inode, node: int, *, readable: bool, writable: bool, truncate: bool = False) -> Handle:
        """A new handle. A reader sees the file as it was when the kernel looked it up, until it closes it."""
        handle = self._new_handle(inode, node, readable=readable, writable=writable)
        try:
            async with handle.file.lock:
                if truncate:
                    self._volume.truncate(inode, 0)
                    self._is_truncated(handle.file, 0, node)
                    handle.wrote = True
                else:
                    self._require_bytes(inode)
                self._see(handle)
        except BaseException:
            self._drop(handle)
            raise
        return handle

    def _require_bytes(self, inode: Inode) -> None:
        """EIO: what should be there is not; the log said so at the start."""
        if isinstance(inode.content, PlainFile) and inode.content.is_lost:
            raise SymError(f"the bytes of {self._volume.tree.path_of(inode)} are lost")

    def _new_handle(self, inode: Inode, node: int, *, readable: bool, writable: bool) -> Handle:
        file = self._files.get(inode.number)
        if file is None:
            file = self._files[inode.number] = OpenFile(inode, Mutex(self._eager), node)
        if isinstance(inode.content, PlainFile):
            self._idle.pop(inode.content, None)
        handle = Handle(file, node, readable, writable)
        file.handles.add(handle)
        self._volume.tree.opened(inode)
        return handle

    async def flush(self, handle: Handle) -> None:
        """A descriptor of the handle was closed: raise if what was written is a broken image, and nothing shows that
        more will be written.
        """
        if handle.wrote:
            began_s = trio.current_time()
            handle.closes = True
            try:
                async with handle.file.lock:
                    content = handle.file.inode.content
                    if isinstance(content, PlainFile):
                        self._disk.require_rest(content)  # a program that was interrupted closes its files, and ends
                    await self._settle(handle.file, began_s)
            except Invalid:
                if not self._is_being_written(handle.file):
                    raise
            except trio.Cancelled:  # Ctrl-C: the bytes are what they are, and the release is not to begin again
                handle.wrote = False
                raise

    def _is_being_written(self, file: OpenFile) -> bool:
        """Whether parts of the file are missing, or another handle wrote and has not been closed since."""
        content = file.inode.content
        has_gaps = isinstance(content, PlainFile) and bool(content.gaps)
        return has_gaps or any(handle.wrote and not handle.closes for handle in file.handles)

    async def release(self, handle: Handle) -> None:
        """The handle's last descriptor was closed. If it was the last one that had written, this test is for good."""
        file, began_s = handle.file, trio.current_time()
        self._unsee(handle)  # before any await: the next open must not find a view that nobody uses
        try:
            if handle.wrote and file.inode.names and not any(other.wrote for other in file.handles - {handle}):
                async with file.lock:
                    await self._settle(file, began_s)
        except SymError as error:  # take_in has logged why; nobody is left to be told
            log.debug("inode %d stays a plain file: %s", file.inode.number, error)
        finally:
            self._drop(handle)

    def release_all(self) -> None:
        """The mount is gone, and with it every handle."""
        for file in tuple(self._files.values()):
            for handle in tuple(file.handles):
                self._drop(handle)
        while self._idle:
            self._close_idle()
        self._cached.clear()

    def node_of(self, inode: Inode) -> int:
        """What a lookup of the inode is answered with: another node than those of versions that are being read."""
        file = self._files.get(inode.number)
        if file is None:
            return inode.number
        if self._is_outdated(file):
            file.node = self._nodes.new_number()
        return file.node

    def _is_outdated(self, file: OpenFile) -> bool:
        """Whether somebody reads another version of the KV file through its newest node."""
        if not isinstance(file.inode.content, KvFile):
            return False
        now, view = version_of(file.inode), file.views.get(file.node)
        direct = file.direct.get(file.node)
        return (view is not None and view.reader.version != now) or (direct is not None and direct.keys() != {now})

    def forget(self, node: int) -> None:
        """The kernel no longer knows the node, so it caches nothing of it."""
        self._cached.pop(node, None)

    def _drop(self, handle: Handle) -> None:
        file = handle.file
        self._unsee(handle)
        file.handles.remove(handle)
        if not file.handles:
            del self._files[file.inode.number]
        self._volume.tree.closed(file.inode)
        content = file.inode.content  # none any more if that was all that led to it
        if not file.handles and isinstance(content, PlainFile):
            self._idle[content] = None
            if len(self._idle) > MAX_IDLE:
                self._close_idle()

    def _close_idle(self) -> None:
        content = next(iter(self._idle))
        del self._idle[content]
        content.close()

    # Reading

    async def read(self, handle: Handle, offset: int, size: int) -> bytes | memoryview:
        """As `pread(2)`; use the result before the next await."""
        reader = self._reader(handle)
        if reader is not None:
            return await reader.read(offset, size)
        content = handle.file.inode.content
        assert isinstance(content, PlainFile), "a KV file is read through a view"
        data = await self._disk.read(content, offset, size, trio.current_time() + self._disk.patience_s)
        if content is handle.file.inode.content:
            return data
        return await self.read(handle, offset, size)  # it has become a KV file meanwhile

    def shown(self, inode: Inode, node: int) -> tuple[int, int, int]:
        """Size, mtime and ctime for `stat`.

        While the page cache is in use they are those of what it holds: a new mtime would make the kernel drop it. Of
        the ctime, appends do not show before the view is closed; anything else does.
        """
        file = self._files.get(inode.number)
        view = None if file is None else file.views.get(node)
        if view is None:
            return self._volume.size_of(inode), inode.mtime_ns, inode.ctime_ns
        if inode.ctime_ns != inode.mtime_ns:  # not the content was changed last
            view.ctime_ns = inode.ctime_ns
        return view.reader.size, view.mtime_ns, view.ctime_ns

    def set_mtime_ns(self, inode: Inode, mtime_ns: int) -> None:
        """Somebody set the time: that is shown in any case."""
        file = self._files.get(inode.number)
        if file is not None:
            for view in file.views.values():
                view.mtime_ns = mtime_ns
        inode.mtime_ns = mtime_ns

    # Changing

    async def write(self, handle: Handle, offset: int, data: bytes | memoryview) -> None:
        """All of `data`, into a plain file. Taken before this waits for anything."""
        inode, began_s = handle.file.inode, trio.current_time()
        if handle.file.lock.held:
            data = bytes(data)
        async with handle.file.lock:
            await self._write(handle, offset, data, began_s)
        inode.modified()

    async def allocate(self, handle: Handle, offset: int, size: int) -> None:
        """As `posix_fallocate(3)`, of a plain file."""
        inode, began_s = handle.file.inode, trio.current_time()
        async with handle.file.lock:
            content = self._writable(handle)
            function = partial(content.allocate, offset, size)
            until_s = self._until(handle.file, began_s)
            await self._disk.change(inode, content, offset + size, function, until_s, start=max(content.size, offset))
        inode.modified()

    async def truncate(self, inode: Inode, node: int, size: int, handle: Handle | None) -> None:
        """As `truncate(2)`, or `ftruncate(2)` with a handle. What the file is may change while this waits."""
        began_s = trio.current_time()
        with self._opened_for_now(inode, node) as file:
            is_done = False
            while not is_done:
                content = inode.content
                if size and isinstance(content, KvFile):
                    is_done = await self._cut(file, content, size, node)
                else:
                    async with file.lock:
                        is_done = await self._truncate(file, size, node, began_s)
        if handle is not None:
            handle.wrote, handle.closes = True, False

    async def _cut(self, file: OpenFile, kv: KvFile, size: int, node: int) -> bool:
        """Entries, in their turn: without the lock, which whoever opens the file needs. False: it is another file."""
        inode, is_done = file.inode, False

        def cut() -> None:
            nonlocal is_done
            is_done = inode.content is kv
            if is_done:
                self._volume.truncate(inode, size)
                self._is_truncated(file, size, node)

        await self._turns.change(kv, self._volume.tree.path_of(inode), cut)
        return is_done

    async def _truncate(self, file: OpenFile, size: int, node: int, began_s: float) -> bool:
        """A plain file, or any file to nothing. False: it has become a KV file meanwhile."""
        inode = file.inode
        if size and isinstance(inode.content, KvFile):
            return False
        if size and isinstance(inode.content, PlainFile):
            function = partial(inode.content.resize, size)
            start, until_s = min(inode.content.size, size), self._until(file, began_s)
            is_cut = size < inode.content.size
            await self._disk.change(inode, inode.content, size, function, until_s, start=start, is_cut=is_cut)
            inode.modified()
        else:
            self._volume.truncate(inode, size)
        self._is_truncated(file, size, node)
        return True

    @contextmanager
    def _opened_for_now(self, inode: Inode, node: int) -> Iterator[OpenFile]:
        handle = self._new_handle(inode, node, readable=False, writable=False)
        try:
            yield handle.file
        finally:
            self._drop(handle)

    async def copy(self, source: Handle, source_offset: int, target: Handle, target_offset: int, size: int) -> int:
        """As `copy_file_range(2)`: a whole KV file becomes a fork at once, anything else is copied by the piece."""
        file, began_s = target.file, trio.current_time()
        async with file.lock:
            if isinstance(file.inode.content, KvFile):
                return self._continue_fork(file, source, source_offset, target_offset, size)
            assert isinstance(file.inode.content, PlainFile)
            reader = self._reader(source)
            at_start = source_offset == target_offset == file.inode.content.size == 0
            if reader is not None and at_start and self._is_whole(source, size):
                reader.fork_into(source.file.inode, file.inode)
                self._see_all(file)
                file.fork = Fork(source, reader.size, min(size, reader.size))
                return file.fork.answered
            data = await self.read(source, source_offset, min(size, _COPY_BYTES))
            if reader is not None:
                file.excused_s = trio.current_time()
            await self._write(target, target_offset, bytes(data), began_s)
            file.inode.modified()
            return len(data)

    def _is_whole(self, source: Handle, size: int) -> bool:
        """Whether a copy from the start means the whole file: the kernel cuts it at the size that it was shown."""
        return size >= self.shown(source.file.inode, source.node)[0] or size == _KERNEL_CUT

    def _continue_fork(self, file: OpenFile, source: Handle, source_offset: int, target_offset: int, size: int) -> int:
        fork = file.fork
        if fork is None or fork.source is not source or not source_offset == target_offset == fork.answered:
            raise self._unwritable(file.inode)
        count = min(size, fork.size - fork.answered)
        fork.answered += count
        return count

    async def _write(self, handle: Handle, offset: int, data: bytes | memoryview, began_s: float) -> None:
        content, file = self._writable(handle), handle.file
        await self._disk.write(file.inode, content, offset, data, self._until(file, began_s))

    def _until(self, file: OpenFile, began_s: float) -> float:
        """How long a request that came then may wait for the disk, now that it has the lock."""
        return max(began_s, file.excused_s) + self._disk.patience_s

    def _writable(self, handle: Handle) -> PlainFile:
        """What is about to be written; it will be tested when the handle is closed."""
        content = handle.file.inode.content
        if not isinstance(content, PlainFile):
            raise self._unwritable(handle.file.inode)
        handle.wrote, handle.closes = True, False
        return content

    def _is_truncated(self, file: OpenFile, size: int, node: int) -> None:
        file.fork = None
        view = file.views.get(node)
        if view is not None and (
            size == 0 or all(handle.writable for handle in view.users if isinstance(handle, Handle))
        ):
            # Emptied: as on any file system, readers see that (the kernel has emptied their page cache). Else readers
            # keep what they opened, but whoever could have truncated it himself sees what he did.
            self._close_view(file, node)
        self._see_all(file)

    async def _settle(self, file: OpenFile, began_s: float) -> None:
        """Make a plain file whose bytes are an image a KV file. The caller holds the lock."""
        if file.refusal is not None and file.refusal.still_holds(file.inode):
            raise file.refusal.again()
        is_excused = True
        try:
            if await take_in(self._volume, file.inode, self._disk, self._until(file, began_s)):
                self._see_all(file)
        except SymError as error:
            file.refusal = Refusal.of(file.inode, error)
            is_excused = error.errno != errno.ETIMEDOUT
            raise
        finally:
            if is_excused:
                file.excused_s = trio.current_time()

    def _unwritable(self, inode: Inode) -> NotSupported:
        path = self._volume.tree.path_of(inode)
        return NotSupported(f"{path} is a KV file: it can be truncated or replaced, but not written into")

    # Views

    def _reader(self, handle: Handle) -> Reader | None:
        if handle.own is not None:
            return handle.own
        view = handle.file.views.get(handle.node)
        return None if view is None else view.reader

    def _see(self, handle: Handle) -> None:
        """Give a handle that is being opened its view.

        One that may write to a KV file is direct: its writes are refused, but those to a shared mapping would be in
        the page cache by then, for everybody to read.
        """
        content = handle.file.inode.content
        if isinstance(content, KvFile):
            handle.direct = handle.writable
        if not handle.readable or content is None:
            return
        self._see_now(handle)
        if not handle.direct:
            reader = self._reader(handle)
            seen = version_of(handle.file.inode) if reader is None else reader.version
            handle.keep_cache = self._cached.get(handle.node) == seen
            self._cached[handle.node] = seen

    def _see_all(self, file: OpenFile) -> None:
        """The content was replaced: open handles go on with the new one, except readers past the cache."""
        for handle in file.handles:
            if handle.readable and (handle.writable or not handle.direct):
                self._see_now(handle)

    def _see_now(self, handle: Handle) -> None:
        """Let a handle read the content as it is now, or what its fellows in the page cache do."""
        if not handle.direct:
            self._join_view(handle)
            return
        self._close_own(handle)
        content = handle.file.inode.content
        if isinstance(content, KvFile):
            handle.own = Reader(self._volume, content, self._eager, self._rooms)
            handle.file.direct[handle.node][handle.own.version] += 1
            self._volume.heat.note(handle.file.inode, content)

    def _close_own(self, handle: Handle) -> None:
        """A handle reads past the page cache no more."""
        own, handle.own = handle.own, None
        if own is None:
            return
        versions = handle.file.direct[handle.node]
        versions[own.version] -= 1
        if not versions[own.version]:
            del versions[own.version]
        if not versions:
            del handle.file.direct[handle.node]
        own.close()

    def _join_view(self, handle: Handle) -> None:
        inode, views = handle.file.inode, handle.file.views
        if handle.node not in views:
            if not isinstance(inode.content, KvFile):
                return
            reader = Reader(self._volume, inode.content, self._eager, self._rooms)
            self._volume.heat.note(inode, inode.content)
            views[handle.node] = View(reader, inode.mtime_ns, inode.ctime_ns)
        views[handle.node].users.add(handle)

    def _unsee(self, handle: Handle) -> None:
        """Take a handle's view away; the last user of a view closes it."""
        if handle.writable and not handle.direct and isinstance(handle.file.inode.content, KvFile):
            # It was opened when the file was plain: what it wrote since, into a mapping, may be in the page cache.
            self._cached.pop(handle.node, None)
        self._close_own(handle)
        view = handle.file.views.get(handle.node)
        if view is not None:
            view.users.discard(handle)
            if not view.users:
                self._close_view(handle.file, handle.node)

    def _close_view(self, file: OpenFile, node: int) -> None:
        file.views.pop(node).reader.close()
