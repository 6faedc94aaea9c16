# ruff: noqa: ARG002 - pyfuse3 calls the handlers with arguments that some have no use for
"""The mount's face: each request of the kernel, translated.

The only file that raises FUSEError. The kernel checks permissions (`default_permissions`). What LIPs change behind its
back it must not remember: names and attributes are valid for no time at all.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio

from kvfs import xattrs
from kvfs.content import KvFile
from kvfs.inode import Inode
from kvfs.open_files import Handle, OpenFiles
from kvfs.shim import CopyRequest, pyfuse3
from kvfs.tree import MAX_NAME_BYTES
from kvfs.volume import Volume
from libsym.errors import BadHandle, NotPermitted, NotSupported, SymError

log = logging.getLogger(__name__)

_MAX_FILES = 1 << 31
"""What `df -i` shows as the total: nothing here limits the number of files but memory."""

_KV_BLOCK_BYTES = 1 << 20
"""What programs are told to read at a time: the largest read that the kernel passes on."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _errno_of(error: Exception, request: str, arguments: Sequence[object]) -> int:
    """What to answer; anything but a SymError is a defect of ours, and must not end the mount."""
    if isinstance(error, SymError):
        return error.errno or errno.EIO
    log.error("request %s%r failed", request, tuple(arguments), exc_info=error)
    return errno.EIO


def _request(
    handler: Callable[Concatenate[KvOperations, _Arguments], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[KvOperations, _Arguments], Coroutine[Any, Any, _Result]]:
    """Turn whatever a handler raises into the one exception that pyfuse3 survives."""

    @functools.wraps(handler)
    async def guarded(self: KvOperations, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return await handler(self, *args, **kwargs)
        except Exception as error:  # nothing may end pyfuse3's loop
            raise pyfuse3.FUSEError(_errno_of(error, handler.__name__, args)) from error

    return guarded


@dataclass(slots=True)
class _Listing:
    """An open directory: its names as they were at opendir or rewinddir, so that changes shift nobody's place."""

    directory: Inode
    names: tuple[bytes, ...] = ()


class KvOperations(pyfuse3.Operations):
    """The handlers of one mount. `num_handles` are open; `dispose` when the mount is gone."""

    supports_dot_lookup = True
    enable_writeback_cache = False  # LIPs read and change the same files: bytes must not wait in the kernel

    def __init__(self, volume: Volume) -> None:
        super().__init__()
        self._volume = volume
        self._tree = volume.tree
        self._files = OpenFiles(volume)
        self._copies: trio.Nursery | None = None
        self._handles: dict[int, Handle | _Listing] = {}
        self._next_handle = 1

    @property
    def num_handles(self) -> int:
        return len(self._handles)

    async def serve(self, max_requests: int) -> None:
        """Answer requests until the file system is unmounted."""
        async with trio.open_nursery() as self._copies:
            await pyfuse3.main(max_tasks=max_requests)
            self._copies.cancel_scope.cancel()

    def dispose(self) -> None:
        """Give up what the kernel held: it will not tell any more."""
        self._files.release_all()
        for handle in self._handles.values():
            if isinstance(handle, _Listing):
                self._tree.closed(handle.directory)
        self._handles.clear()
        for inode in self._tree:
            if inode.lookups:
                self._tree.forget(inode, inode.lookups)

    # Names

    @_request
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._looked_up(self._tree.child(self._tree.get(parent_inode), name))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for number, num_lookups in inode_list:
            try:
                inode = self._tree.get(number)
                self._tree.forget(inode, num_lookups)
                if not inode.lookups:
                    self._files.forget(number)
            except Exception:
                log.exception("can't forget %d lookups of inode %d", num_lookups, number)

    @_request
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if stat.S_ISREG(mode):
            return self._looked_up(self._make_plain(parent_inode, name, mode, ctx))
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            raise NotPermitted("device files can't be made here")
        return self._make(parent_inode, name, mode, ctx)

    @_request
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._make(parent_inode, name, mode, ctx)

    @_request
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        entry = self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx)
        inode = self._tree.get(entry.st_ino)
        inode.target = target
        return self._attributes(inode)

    @_request
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return self._tree.get(inode).target

    @_request
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        target = self._tree.get(inode)
        self._tree.link(target, self._tree.get(new_parent_inode), new_name)
        return self._looked_up(target)

    @_request
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.unlink(self._tree.get(parent_inode), name)

    @_request
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.rmdir(self._tree.get(parent_inode), name)

    @_request
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        source, target = self._tree.get(parent_inode_old), self._tree.get(parent_inode_new)
        self._tree.rename(source, name_old, target, name_new, flags)

    # Attributes

    @_request
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(self._tree.get(inode))

    @_request
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self._tree.get(inode)
        if fields.update_size:  # first: it alone can fail
            await self._files.truncate(node, attr.st_size, None if fh is None else self._file(fh))
        if fields.update_mode:
            node.mode = attr.st_mode & 0o7777
        if fields.update_uid:
            node.uid = attr.st_uid
            if isinstance(node.content, KvFile):
                node.content.table.owner = node.uid
        if fields.update_gid:
            node.gid = attr.st_gid
        if fields.update_atime:
            node.atime_ns = attr.st_atime_ns
        if fields.update_mtime:
            self._files.set_mtime_ns(node, attr.st_mtime_ns)
        node.changed()
        return self._attributes(node)

    @_request
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        now = self._volume.statistics()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = now.page_bytes  # a block is a page: so the sums come out exactly
        data.f_blocks = now.num_pages
        data.f_bfree = data.f_bavail = now.num_free_pages
        data.f_files = _MAX_FILES
        data.f_ffree = data.f_favail = _MAX_FILES - now.num_files
        data.f_namemax = MAX_NAME_BYTES
        return data

    @_request
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        return xattrs.get(self._tree.get(inode), name, self._volume.model)

    @_request
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return xattrs.names(self._tree.get(inode))

    @_request
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        xattrs.put(self._tree.get(inode), name, value)

    @_request
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        xattrs.remove(self._tree.get(inode), name)

    # Files

    @_request
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        directory = self._tree.get(parent_inode)
        if name in directory.entries and not flags & os.O_EXCL:
            # A LIP made it since the kernel looked. ESTALE makes the kernel look again, and check its permissions.
            raise SymError("the name was made meanwhile", errno.ESTALE)
        inode = self._make_plain(parent_inode, name, mode, ctx)
        info = await self._open(inode, flags)
        return info, self._looked_up(inode)

    @_request
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return await self._open(self._tree.get(inode), flags)

    @_request
    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:  # type: ignore[override] # saves a copy
        return await self._files.read(self._file(fh), off, size)

    @_request
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        await self._files.write(self._file(fh), off, buf)
        return len(buf)

    @_request
    async def flush(self, fh: int) -> None:
        await self._files.flush(self._file(fh))

    @_request
    async def fsync(self, fh: int, datasync: bool) -> None:
        """As on tmpfs: names and KV live in memory, so there is nothing that could be made to last."""
        self._file(fh)

    @_request
    async def release(self, fh: int) -> None:
        await self._files.release(self._file(fh))
        del self._handles[fh]

    def copy_file_range(self, request: CopyRequest) -> None:
        """From the shim, in the middle of pyfuse3's loop: answered by a task."""
        assert self._copies is not None
        self._copies.start_soon(self._copy_file_range, request)

    async def _copy_file_range(self, request: CopyRequest) -> None:
        try:
            source, target = self._file(request.source), self._file(request.target)
            count = await self._files.copy(source, request.source_offset, target, request.target_offset, request.size)
        except Exception as error:  # noqa: BLE001 - nothing may end the mount
            request.reply_error(_errno_of(error, "copy_file_range", (request,)))
        else:
            request.reply_count(count)

    # Directories

    @_request
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        directory = self._tree.get(inode)
        self._tree.opened(directory)
        return self._new_handle(_Listing(directory))

    @_request
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._listing(fh)
        directory = listing.directory
        if start_id == 0:
            listing.names = (b".", b"..", *directory.entries)
        for place in range(start_id, len(listing.names)):
            name = listing.names[place]
            inode = self._tree.child(directory, name) if name in {b".", b".."} else directory.entries.get(name)
            if inode is None:
                continue  # removed since
            if not pyfuse3.readdir_reply(token, name, self._attributes(inode), place + 1):
                return
            if name not in {b".", b".."}:
                inode.lookups += 1

    @_request
    async def releasedir(self, fh: int) -> None:
        self._tree.closed(self._listing(fh).directory)
        del self._handles[fh]

    @_request
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """See `fsync`."""
        self._listing(fh)

    # Parts

    def _make_plain(self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> Inode:
        return self._volume.make_plain(self._tree.get(parent_inode), name, mode, ctx.uid, ctx.gid)

    def _make(self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        directory = self._tree.get(parent_inode)
        inode = self._tree.make(directory, name, stat.S_IFMT(mode), mode=mode, uid=ctx.uid, gid=ctx.gid)
        return self._looked_up(inode)

    def _looked_up(self, inode: Inode) -> pyfuse3.EntryAttributes:
        inode.lookups += 1
        return self._attributes(inode)

    def _attributes(self, inode: Inode) -> pyfuse3.EntryAttributes:
        size = self._files.shown_size(inode)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode.number
        entry.entry_timeout = entry.attr_timeout = 0
        entry.st_mode = inode.file_type | inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_size = size
        entry.st_blocks = -(-size // 512)  # in full: less would be a hole to `cp`, and its bytes lost
        if isinstance(inode.content, KvFile):
            entry.st_blksize = _KV_BLOCK_BYTES
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = self._files.shown_mtime_ns(inode)
        entry.st_ctime_ns = self._files.shown_ctime_ns(inode)
        return entry

    async def _open(self, inode: Inode, flags: int) -> pyfuse3.FileInfo:
        if inode.content is None:
            if not inode.names:  # a LIP removed it since the kernel looked: ESTALE makes the kernel look again
                raise SymError(f"inode {inode.number} was removed meanwhile", errno.ESTALE)
            raise NotSupported(f"inode {inode.number} is not a regular file")
        access = flags & os.O_ACCMODE
        handle = await self._files.open(
            inode,
            readable=access != os.O_WRONLY,
            writable=access != os.O_RDONLY,
            truncate=bool(flags & os.O_TRUNC),
        )
        return pyfuse3.FileInfo(fh=self._new_handle(handle), direct_io=handle.direct, keep_cache=handle.keep_cache)

    def _new_handle(self, handle: Handle | _Listing) -> int:
        number = self._next_handle
        self._next_handle += 1
        self._handles[number] = handle
        return number

    def _file(self, fh: int) -> Handle:
        handle = self._handles.get(fh)
        if not isinstance(handle, Handle):
            raise BadHandle(f"{fh} is no open file")
        return handle

    def _listing(self, fh: int) -> _Listing:
        handle = self._handles.get(fh)
        if not isinstance(handle, _Listing):
            raise BadHandle(f"{fh} is no open directory")
        return handle
