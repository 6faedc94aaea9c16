"""Regular files that are open on the mount, and the changes that their handles see.

The code runs on the trio thread, except for slow work, which workers do. A task holds a file's lock while it opens the
file or changes its content. So an open during an import waits, and then sees the KV file.

A request waits for the disk until a deadline, which is counted from the request's arrival. So a request that waits for
the lock gets the lock before its own deadline. Only an import, or a reader that hashes a KV file, may hold the lock
longer. The deadline of a request that waits for such work is counted from the end of the work (`OpenInode.excused_s`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import ESTALE, ETIMEDOUT
from functools import partial

import trio

from kvfs.mount.disk_work import DiskWork
from kvfs.mount.eager import Eager, Mutex
from kvfs.mount.incoming import Refusal, take_in
from kvfs.mount.nodes import Nodes
from kvfs.mount.spans import Rooms
from kvfs.mount.views import Reader, Version, View, version_of
from kvfs.mount.waiting_changes import WaitingChanges, at_once
from kvfs.names.content import Elsewhere, KvFile
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.volume.volume import Volume
from libsym.errors import Invalid, NotSupported, SymError

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
"""The most bytes that one copy_file_range copies, which bounds the time for which the lock is held. Programs repeat the
call.
"""

MAX_IDLE = 64
"""The most backing files that stay open without a handle, because programs like `cat` open the same files again and
again.
"""

_KERNEL_CUT = 0xFFFFF000
"""The longest copy_file_range that the kernel passes on. The kernel cuts longer requests to this size."""


@dataclass(slots=True, eq=False)
class Handle:
    """An open regular file: the result of one open(2)."""

    file: OpenInode
    node: int
    """The node that the kernel has opened: see `kvfs.mount.nodes`."""
    readable: bool
    writable: bool
    wrote: bool = False
    """Whether the content was changed through the handle. Then a FLUSH of the handle tests the content."""
    closes: bool = False
    """Whether a descriptor was closed since the last change. It may have been the last descriptor."""
    direct: bool = False
    """Whether the handle bypasses the page cache. Then MAP_SHARED is refused."""
    own: Reader | None = None
    """The reader that a direct handle of a KV file does not share; None: the handle has no reader of its own."""
    num_lost: int = 0
    """Number of contents of a file with a shared name that were lost before the handle was opened: see `Agreement`."""
    keep_cache: bool = False
    """Whether the page cache has the right version for the handle at the open, so that the kernel may keep it."""


@dataclass(slots=True)
class Fork:
    """A copy_file_range that made its target a fork of the source. Later calls of the same copy change nothing."""

    source: Handle
    size: int
    answered: int


@dataclass(slots=True, eq=False)
class OpenInode:
    """State that all handles of one inode share."""

    inode: Inode
    lock: Mutex
    node: int
    """The newest version's node, which answers lookups."""
    handles: set[Handle] = field(default_factory=set)
    views: dict[int, View] = field(default_factory=dict)
    """Views, by node."""
    direct: defaultdict[int, Counter[Version]] = field(default_factory=lambda: defaultdict(Counter))
    """Number of handles that bypass the page cache, by node and version. With this count a lookup need not visit every
    handle.
    """
    fork: Fork | None = None
    refusal: Refusal | None = None
    """The reason why the present bytes are not an image. The refusal prevents a second test of the same bytes."""
    excused_s: float = -math.inf
    """When the lock was last held by a request that waited for something other than the disk."""


class OpenFiles:
    """Every open regular file of one mount."""

    def __init__(self, volume: Volume, eager: Eager, nodes: Nodes, changes: WaitingChanges | None = None) -> None:
        self._volume = volume
        self._changes = changes or WaitingChanges(eager, at_once)
        self._nodes = nodes
        self._eager = eager
        self._disk = DiskWork(volume, eager)
        self._rooms = Rooms()
        self._files: dict[int, OpenInode] = {}
        self._idle: dict[PlainFile, None] = {}  # files that may have a descriptor but no handle; the oldest first
        self._cached: dict[int, Version | None] = {}  # the version that the kernel's page cache has, by node

    # Opening and closing

    async def open(self, inode: Inode, node: int, *, readable: bool, writable: bool, truncate: bool = False) -> Handle:
        """Open a file. A reader sees the file as it was at the kernel's lookup, until the handle is closed."""
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
        """Raise EIO if the file's bytes are lost. The daemon has logged the loss at its start."""
        if isinstance(inode.content, PlainFile) and inode.content.is_lost:
            raise SymError(f"the bytes of {self._volume.tree.path_of(inode)} are lost")

    def _new_handle(self, inode: Inode, node: int, *, readable: bool, writable: bool) -> Handle:
        file = self._files.get(inode.number)
        if file is None:
            file = self._files[inode.number] = OpenInode(inode, Mutex(self._eager), node)
        if isinstance(inode.content, PlainFile):
            self._idle.pop(inode.content, None)
        handle = Handle(file, node, readable, writable)
        if writable and self._volume.tree.agreement is not None:
            self._volume.tree.agreement.begin_writing(inode)
            handle.num_lost = self._volume.tree.agreement.num_lost(inode)
        file.handles.add(handle)
        self._volume.tree.opened(inode)
        return handle

    async def flush(self, handle: Handle) -> None:
        """Test the content when a descriptor is closed. Raise if the content claims to be an image, is invalid, and
        seems complete.
        """
        if handle.wrote:
            self._require_kept(handle)
            began_s = trio.current_time()
            handle.closes = True
            try:
                async with handle.file.lock:
                    content = handle.file.inode.content
                    if isinstance(content, PlainFile):
                        self._disk.require_rest(content)  # an interrupted program must be able to close and end
                    await self._settle(handle.file, began_s)
                self._refuse_plain(handle.file)
            except Invalid:
                if not self._is_being_written(handle.file):
                    raise
            except trio.Cancelled:  # Ctrl-C: the bytes stay, and the release must not test them again
                handle.wrote = False
                raise

    async def settle_shared(self, handle: Handle) -> None:
        """Test the content of a file with a shared name before a sync, as at a close: other machines get KV files only.

        ESTALE: what was written through the handle is lost.
        """
        shared = self._volume.tree.agreement
        if shared is not None and shared.knows(handle.file.inode):
            await self.flush(handle)

    def _require_kept(self, handle: Handle) -> None:
        shared, inode = self._volume.tree.agreement, handle.file.inode
        if shared is not None and handle.num_lost != shared.num_lost(inode):
            path = self._volume.tree.path_of(inode)
            raise SymError(f"{path}: another machine has written the file, and what was written here is lost", ESTALE)

    def _refuse_plain(self, file: OpenInode) -> None:
        """Raise NotSupported for a plain file with a shared name. Other machines never see its bytes."""
        content, shared = file.inode.content, self._volume.tree.agreement
        if not isinstance(content, PlainFile) or not content.size or self._is_being_written(file):
            return
        if shared is not None and shared.knows(file.inode):
            path = self._volume.tree.path_of(file.inode)
            raise NotSupported(f"{path}: what was written is no KV file, and a fleet has only these")

    def _is_being_written(self, file: OpenInode) -> bool:
        """Whether parts of the file are missing, or a handle has written to the file and has closed no descriptor
        since.
        """
        content = file.inode.content
        has_gaps = isinstance(content, PlainFile) and bool(content.gaps)
        return has_gaps or any(handle.wrote and not handle.closes for handle in file.handles)

    async def release(self, handle: Handle) -> None:
        """Drop a handle whose last descriptor was closed. If this is the last handle that wrote, test the content
        again.
        """
        file, began_s = handle.file, trio.current_time()
        self._unsee(handle)  # before any await: the next open must not find an unused view
        try:
            if handle.wrote and file.inode.names and not any(other.wrote for other in file.handles - {handle}):
                async with file.lock:
                    await self._settle(file, began_s)
        except SymError as error:  # `take_in` has logged the reason, and no program waits for the answer
            log.debug("inode %d stays a plain file: %s", file.inode.number, error)
        finally:
            self._drop(handle)

    def release_all(self) -> None:
        """Drop every handle, because the mount is gone."""
        for file in tuple(self._files.values()):
            for handle in tuple(file.handles):
                self._drop(handle)
        while self._idle:
            self._close_idle()
        self._cached.clear()

    def node_of(self, inode: Inode) -> int:
        """Return the node for a lookup of the inode. If readers of the newest node see an older version, make a new
        node.
        """
        file = self._files.get(inode.number)
        if file is None:
            return inode.number
        if self._is_outdated(file):
            file.node = self._nodes.new_number()
        return file.node

    def is_outdated(self, inode: Inode, node: int) -> bool:
        """Return whether a new reader through this node would see an older version of a file with a shared name."""
        file, shared = self._files.get(inode.number), self._volume.tree.agreement
        view = None if file is None or shared is None or not shared.knows(inode) else file.views.get(node)
        return view is not None and view.reader.version != version_of(inode)

    def _is_outdated(self, file: OpenInode) -> bool:
        """Return whether readers see an older version of the KV file through its newest node."""
        if not isinstance(file.inode.content, KvFile | Elsewhere):
            return False
        now, view = version_of(file.inode), file.views.get(file.node)
        direct = file.direct.get(file.node)
        return (view is not None and view.reader.version != now) or (direct is not None and direct.keys() != {now})

    def forget(self, node: int) -> None:
        """Forget a node that the kernel no longer knows, and so no longer caches."""
        self._cached.pop(node, None)

    def _drop(self, handle: Handle) -> None:
        file = handle.file
        if handle.writable and self._volume.tree.agreement is not None:
            self._volume.tree.agreement.end_writing(file.inode)
        self._unsee(handle)
        file.handles.remove(handle)
        if not file.handles:
            del self._files[file.inode.number]
        self._volume.tree.closed(file.inode)
        content = file.inode.content  # None if this was the last reference to the file
        if not file.handles and isinstance(content, PlainFile):
            self._idle[content] = None
            if len(self._idle) > MAX_IDLE:  # half of them, because the thread that closes costs more than a close
                for _ in range(MAX_IDLE // 2):
                    self._close_idle()

    def _close_idle(self) -> None:
        content = next(iter(self._idle))
        del self._idle[content]
        content.close()

    # Reading

    async def read(self, handle: Handle, offset: int, size: int) -> bytes | memoryview:
        """Read as `pread(2)` does. Use the result before the next await."""
        reader = self._reader(handle)
        if reader is not None:
            return await reader.read(offset, size)
        content = handle.file.inode.content
        if not isinstance(content, PlainFile):
            assert self._volume.tree.agreement is not None, "a KV file is read through a view"
            return b""  # the handle is of an empty file, of which another machine has synced the first version since
        data = await self._disk.read(content, offset, size, trio.current_time() + self._disk.patience_s)
        if content is handle.file.inode.content:
            return data
        return await self.read(handle, offset, size)  # the file has become a KV file meanwhile

    def shown(self, inode: Inode, node: int) -> tuple[int, int, int]:
        """Return size, mtime and ctime for `stat`.

        While handles use the page cache, `stat` shows size and mtime of the cached version, because a new mtime would
        make the kernel drop the cache. The ctime shows all changes except changes of the content. Changes of the
        content change the ctime only after the view is closed.
        """
        file = self._files.get(inode.number)
        view = None if file is None else file.views.get(node)
        if view is None:
            return self._volume.size_of(inode), inode.mtime_ns, inode.ctime_ns
        if inode.ctime_ns != inode.mtime_ns:  # the last change did not concern the content
            view.ctime_ns = inode.ctime_ns
        return view.reader.size, view.mtime_ns, view.ctime_ns

    def set_mtime_ns(self, inode: Inode, mtime_ns: int) -> None:
        """Set the mtime at a user's request. `stat` then shows this mtime for the views of readers, too."""
        file = self._files.get(inode.number)
        if file is not None:
            for view in file.views.values():
                view.mtime_ns = mtime_ns
        inode.mtime_ns = mtime_ns

    # Changing

    async def write(self, handle: Handle, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` to a plain file. The data is copied before this method waits."""
        inode, began_s = handle.file.inode, trio.current_time()
        if handle.file.lock.held:
            data = bytes(data)
        async with handle.file.lock:
            await self._write(handle, offset, data, began_s)
        inode.modified()

    async def allocate(self, handle: Handle, offset: int, size: int) -> None:
        """Reserve room in a plain file as `posix_fallocate(3)` does."""
        inode, began_s = handle.file.inode, trio.current_time()
        async with handle.file.lock:
            content = self._writable(handle)
            function = partial(content.allocate, offset, size)
            until_s = self._until(handle.file, began_s)
            await self._disk.change(inode, content, offset + size, function, until_s, start=max(content.size, offset))
        inode.modified()

    async def truncate(self, inode: Inode, node: int, size: int, handle: Handle | None) -> None:
        """Truncate as `truncate(2)` does, or as `ftruncate(2)` does if there is a handle. The content may be replaced
        meanwhile.
        """
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

    async def _cut(self, file: OpenInode, kv: KvFile, size: int, node: int) -> bool:
        """Cut a KV file when no call appends to it. Return False if the content was replaced meanwhile.

        The file's lock stays free, so opens need not wait for appends.
        """
        inode, is_done = file.inode, False

        def cut() -> None:
            nonlocal is_done
            is_done = inode.content is kv
            if is_done:
                self._volume.truncate(inode, size)
                self._is_truncated(file, size, node)

        await self._changes.change(kv, self._volume.tree.path_of(inode), cut)
        return is_done

    async def _truncate(self, file: OpenInode, size: int, node: int, began_s: float) -> bool:
        """Truncate a plain file, or empty any file. Return False if the file has become a KV file meanwhile."""
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
    def _opened_for_now(self, inode: Inode, node: int) -> Iterator[OpenInode]:
        handle = self._new_handle(inode, node, readable=False, writable=False)
        shared = self._volume.tree.agreement
        if shared is not None:
            shared.begin_writing(inode)
        try:
            yield handle.file
        finally:
            if shared is not None:
                shared.end_writing(inode)
            self._drop(handle)

    async def copy(self, source: Handle, source_offset: int, target: Handle, target_offset: int, size: int) -> int:
        """Copy as `copy_file_range(2)` does. A copy of a whole KV file is a fork, made at once. Other files are copied
        piece by piece.
        """
        file, began_s = target.file, trio.current_time()
        async with file.lock:
            if isinstance(file.inode.content, KvFile):
                return self._continue_fork(file, source, source_offset, target_offset, size)
            if not isinstance(file.inode.content, PlainFile):
                raise SymError(f"{self._volume.tree.path_of(file.inode)} has another content now", ESTALE)
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
        """Whether a copy from the start covers the whole file. The kernel shortens a copy to the size that `stat`
        showed.
        """
        return size >= self.shown(source.file.inode, source.node)[0] or size == _KERNEL_CUT

    def _continue_fork(self, file: OpenInode, source: Handle, source_offset: int, target_offset: int, size: int) -> int:
        fork = file.fork
        if fork is None or fork.source is not source or not source_offset == target_offset == fork.answered:
            raise self._unwritable(file.inode)
        count = min(size, fork.size - fork.answered)
        fork.answered += count
        return count

    async def _write(self, handle: Handle, offset: int, data: bytes | memoryview, began_s: float) -> None:
        content, file = self._writable(handle), handle.file
        await self._disk.write(file.inode, content, offset, data, self._until(file, began_s))

    def _until(self, file: OpenInode, began_s: float) -> float:
        """Return the time until which a request may wait for the disk. The request arrived at `began_s`, and has just
        got the lock.
        """
        return max(began_s, file.excused_s) + self._disk.patience_s

    def _writable(self, handle: Handle) -> PlainFile:
        """Return the plain file that a handle may write to. From now on, a FLUSH of the handle tests the content."""
        content = handle.file.inode.content
        if not isinstance(content, PlainFile):
            raise self._unwritable(handle.file.inode)
        handle.wrote, handle.closes = True, False
        return content

    def _is_truncated(self, file: OpenInode, size: int, node: int) -> None:
        file.fork = None
        view = file.views.get(node)
        if view is not None and (
            size == 0 or all(handle.writable for handle in view.users if isinstance(handle, Handle))
        ):
            # Readers see that a file was emptied, as on any file system, because the kernel has emptied the page cache.
            # After another truncation, readers keep the version that they opened, unless all handles of the view may
            # write.
            self._close_view(file, node)
        self._see_all(file)

    async def _settle(self, file: OpenInode, began_s: float) -> None:
        """Turn a plain file into a KV file if its bytes are an image. The caller holds the lock."""
        if file.refusal is not None and file.refusal.still_holds(file.inode):
            raise file.refusal.again()
        is_excused = True
        try:
            if await take_in(self._volume, file.inode, self._disk, self._until(file, began_s)):
                self._see_all(file)
        except SymError as error:
            file.refusal = Refusal.of(file.inode, error)
            is_excused = error.errno != ETIMEDOUT
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
        """Give a view, or a reader of its own, to a handle that is being opened.

        A handle that may write to a KV file bypasses the page cache. Writes through the handle are refused. But a write
        to a shared mapping could not be refused: all readers would see it in the page cache.
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

    def _see_all(self, file: OpenInode) -> None:
        """Show the new content to open handles, except to readers that bypass the page cache."""
        for handle in file.handles:
            if handle.readable and (handle.writable or not handle.direct):
                self._see_now(handle)

    def _see_now(self, handle: Handle) -> None:
        """Give a direct handle a reader of the current content, or let another handle join the view of its node."""
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
        """Close a direct handle's own reader."""
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
        """Take the handle's view away. The last user of a view closes the view."""
        if handle.writable and not handle.direct and isinstance(handle.file.inode.content, KvFile):
            # The handle was opened when the file was plain. The page cache may have bytes that were written to a
            # mapping.
            self._cached.pop(handle.node, None)
        self._close_own(handle)
        view = handle.file.views.get(handle.node)
        if view is not None:
            view.users.discard(handle)
            if not view.users:
                self._close_view(handle.file, handle.node)

    def _close_view(self, file: OpenInode, node: int) -> None:
        file.views.pop(node).reader.close()
