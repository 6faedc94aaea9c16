"""The handlers of the mount's files: each translates one kind of request of the kernel.

Each handler packs its answer and returns the length (`kvfs.mount.wire`), or raises a SymError, which
`kvfs.mount.requests` turns into an errno. The kernel checks permissions (`default_permissions`). The kernel asks for
names each time, because programs change them by calls that the kernel does not see. `kvfs.mount.grants` decides which
attributes the kernel may keep.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvfs.facts import xattrs
from kvfs.mount import wire
from kvfs.mount.eager import Eager
from kvfs.mount.grants import Grants
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import Handle, OpenFiles
from kvfs.mount.waiting_changes import PATIENCE_S, WaitingChanges
from kvfs.mount.wire import Answers
from kvfs.names.content import KvFile
from kvfs.names.inode import Credentials, Inode, require_owner, shown
from kvfs.names.order import DOTS, FIRST_PLACE
from kvfs.names.plain import PlainFile
from kvfs.names.tree import MAX_NAME_BYTES
from kvfs.pages.holdings import Holdings, Kind
from kvfs.volume.volume import Volume
from libsym.errors import BadHandle, Exists, NotSupported, OverQuota, SymError

log = logging.getLogger(__name__)

_BLOCK_BYTES = 4096
_KV_BLOCK_BYTES = 1 << 20
"""The read size that `stat` recommends for KV files: the largest read that the kernel passes on."""

_XATTR_CREATE, _XATTR_REPLACE = 1, 2
"""Flags of setxattr(2)."""

DESCRIPTORS_PART = 8
"""Each user may have 1 / DESCRIPTORS_PART of the daemon's descriptors as open plain files."""


_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Listing:
    """An open directory. Names made since opendir or rewinddir have places from `end` on: see `kvfs.names.order`."""

    directory: Inode
    end: int = 0


class FileHandlers:
    """The handlers of one mount's files. Call `dispose` when the mount is gone."""

    def __init__(
        self,
        volume: Volume,
        answers: Answers,
        eager: Eager,
        changes: WaitingChanges,
        caller: Callable[[], int],
        grants: Grants,
    ) -> None:
        """`caller`: returns the uid of the request that has just begun."""
        self._volume = volume
        self._accounts = volume.pool.accounts
        self._caller = caller
        self._tree = volume.tree
        self._answers = answers
        self._eager = eager
        self._grants = grants
        self._nodes = Nodes(volume.tree, self._payer)
        self._files = OpenFiles(volume, eager, self._nodes, changes)
        self._handles: dict[int, Handle | _Listing] = {}
        self._held: dict[int, tuple[Holdings, Kind]] = {}
        """For each handle, the holdings that it is charged to, and the kind of the charge."""
        self._next_handle = 0

    @property
    def num_handles(self) -> int:
        return len(self._handles)

    @property
    def caller(self) -> int:
        """The uid of the request that has just begun."""
        return self._caller()

    def dispose(self) -> None:
        """Drop all references that the kernel held. The mount is gone, so the kernel will not release them."""
        self._tree.lost.clear()
        for number, handle in self._handles.items():
            if isinstance(handle, _Listing):
                self._tree.closed(handle.directory)
            else:
                self._volume.locks.release(handle.file.inode.number, _lock_owner(number))
            self._let_go(number)
        self._files.release_all()
        self._handles.clear()
        for inode in self._tree:
            inode.holder = None
            if inode.lookups:
                self._tree.forget(inode, inode.lookups)

    # Names

    def lookup(self, parent: int, name: bytes) -> int:
        if name == b".":  # name_to_handle_at and NFS look up the node of a file handle by this name
            return self._entry(self._nodes.inode(parent), parent)
        inode = self._tree.child(self._tree.get(parent), name)
        node = self._files.node_of(inode)
        if name == b"..":  # perhaps the root, of which the kernel keeps no attributes
            return self._entry(inode, node)
        return self._entry(inode, node, self._grants.valid_s(inode, node))

    def looked_up(self, number: int, num_lookups: int) -> None:
        """Count lookups that C has answered."""
        self._tree.get(number).lookups += num_lookups

    def forget(self, number: int, num_lookups: int) -> None:
        try:
            inode = self._nodes.inode(number)
            is_forgotten = self._nodes.forget(number, num_lookups)
            if is_forgotten:
                self._files.forget(number)
            if number == inode.number:
                self._grants.forgotten(inode, is_known=not is_forgotten)
        except Exception:
            log.exception("can't forget %d lookups of inode %d", num_lookups, number)

    def mknod(self, parent: int, name: bytes, mode: int, device: int, uid: int, gid: int) -> int:
        """Make a file of any type, or a directory. The kernel decides who may make devices; the mount is nodev."""
        directory = self._tree.get(parent)
        if stat.S_ISREG(mode):
            return self._made(self._volume.make_plain(directory, name, mode, uid, gid))
        inode = self._tree.make(directory, name, stat.S_IFMT(mode), mode=mode, uid=uid, gid=gid)
        inode.device = device
        return self._made(inode)

    def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> int:
        directory = self._tree.get(parent)
        return self._made(self._tree.make(directory, name, stat.S_IFLNK, mode=0o777, uid=uid, gid=gid, target=target))

    def readlink(self, number: int) -> int:
        return self._answers.data(self._nodes.inode(number).target)

    def link(self, number: int, new_parent: int, new_name: bytes, uid: int) -> int:
        """Make a hard link. Its name is charged to the file's account, so only the file's owner or root may make a
        link.
        """
        inode = self._nodes.inode(number)
        require_owner(inode, Credentials(uid, 0), shown(new_name))
        self._tree.link(inode, self._tree.get(new_parent), new_name)
        return self._entry(inode, number)

    def unlink(self, parent: int, name: bytes) -> int:
        with self._removing():
            self._tree.unlink(self._tree.get(parent), name)
        return 0

    def rmdir(self, parent: int, name: bytes) -> int:
        with self._removing():
            self._tree.rmdir(self._tree.get(parent), name)
        return 0

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> int:
        with self._removing():
            self._tree.rename(self._tree.get(parent), name, self._tree.get(new_parent), new_name, flags)
        return 0

    @contextmanager
    def _removing(self) -> Iterator[None]:
        self._tree.is_kernels = True
        try:
            yield
        finally:
            self._tree.is_kernels = False

    # Attributes

    def getattr(self, number: int) -> int:
        inode = self._nodes.inode(number)
        is_root = inode is self._tree.root
        return self._answers.attr(self._attributes(inode, number), self._grants.valid_s(inode, number), for_c=is_root)

    async def setattr(
        self,
        number: int,
        fields: int,
        fh: int | None,
        mode: int,
        uid: int,
        gid: int,
        size: int,
        atime_ns: int,
        mtime_ns: int,
    ) -> int:
        inode = self._nodes.inode(number)
        self.require_settled(inode, fields, mode, uid, gid, is_emptied=not size)
        if fields & wire.SET_UID:  # first, because this can fail; the kernel sets no size together with an owner
            self._volume.change_owner(inode, uid)
        if fields & wire.SET_SIZE:
            await self._files.truncate(inode, number, size, None if fh is None else self._file(fh))
        self.set_others(inode, fields, mode, gid, atime_ns, mtime_ns)
        return self._answers.attr(self._attributes(inode, number))

    def require_settled(self, inode: Inode, fields: int, mode: int, uid: int, gid: int, *, is_emptied: bool) -> None:
        """Raise Unsettled if other machines have to agree on the new attributes."""
        self._tree.require_mode(
            inode,
            mode & 0o7777 if fields & wire.SET_MODE else inode.mode,
            uid if fields & wire.SET_UID else inode.uid,
            gid if fields & wire.SET_GID else inode.gid,
        )
        if fields & wire.SET_SIZE:
            self._tree.require_open(inode, writable=True, is_emptied=is_emptied)

    def set_others(self, inode: Inode, fields: int, mode: int, gid: int, atime_ns: int, mtime_ns: int) -> None:
        """Set mode, group and times. These changes never fail."""
        if fields & wire.SET_MODE:
            inode.mode = mode & 0o7777
        if fields & wire.SET_GID:
            inode.gid = gid
        if fields & wire.SET_ATIME:
            inode.atime_ns = atime_ns
        if fields & wire.SET_MTIME:
            self._files.set_mtime_ns(inode, mtime_ns)
        inode.changed()
        if fields & (wire.SET_MODE | wire.SET_GID | wire.SET_UID):
            self._tree.is_moved(inode)

    def statfs(self, number: int) -> int:
        """Answer with the total and free bytes of the pool, or of the domain around the inode."""
        space = self._volume.space_around(self._nodes.inode(number))
        return self._answers.statfs(
            block_bytes=space.block_bytes,
            num_blocks=space.num_bytes // space.block_bytes,
            num_free=space.free_bytes // space.block_bytes,
            num_available=space.available_bytes // space.block_bytes,
            num_files=space.num_files,
            num_free_files=space.free_files,
            name_bytes=MAX_NAME_BYTES,
        )

    async def getxattr(self, number: int, name: bytes, room: int) -> int:
        inode = self._nodes.inode(number)
        get = partial(xattrs.get, self._volume, inode, name)
        value = await self._with_away(inode, get) if xattrs.has_away(inode, name) else get()
        return self._attribute_data(value, room)

    async def listxattr(self, number: int, room: int) -> int:
        inode = self._nodes.inode(number)
        get = partial(xattrs.names, self._volume, inode)
        names = await self._with_away(inode, get) if xattrs.has_away(inode) else get()
        return self._attribute_data(b"".join(name + b"\0" for name in names), room)

    async def setxattr(self, number: int, name: bytes, value: bytes, flags: int, uid: int) -> int:
        inode = self._nodes.inode(number)

        def put() -> None:
            if flags & _XATTR_CREATE and xattrs.has(self._volume, inode, name):
                raise Exists(f"attribute {name.decode(errors='replace')} is set already")
            if flags & _XATTR_REPLACE:
                xattrs.get(self._volume, inode, name)  # ENODATA if the attribute does not exist
            if name != xattrs.TIER:
                xattrs.put(self._volume, inode, name, value, uid)

        if xattrs.are_large_with(inode, value):
            storage = self._volume.storage
            if storage.is_behind or not xattrs.has_memory(inode, name, value):
                await self._eager.leave()
                await storage.catch_up()
        if xattrs.has_away(inode, name):
            await self._with_away(inode, put)
        else:
            put()
        if name == xattrs.TIER:
            await self._eager.leave()
            await xattrs.move(self._volume, inode, value, uid, PATIENCE_S)
        return 0

    async def removexattr(self, number: int, name: bytes, uid: int) -> int:
        inode = self._nodes.inode(number)
        remove = partial(xattrs.remove, self._volume, inode, name, uid)
        if xattrs.has_away(inode, name):
            await self._with_away(inode, remove)
        else:
            remove()
        return 0

    async def _with_away(self, inode: Inode, work: Callable[[], _Result]) -> _Result:
        """Bring into memory the attributes that only the index has, and run `work`. Afterwards free the memory of the
        attributes, unless `work` has changed them.
        """
        await self._eager.leave()
        await self._volume.storage.bring_xattrs(inode)
        try:
            return work()
        finally:
            inode.xattrs.put_away()

    # Files

    async def create(self, parent: int, name: bytes, mode: int, flags: int, uid: int, gid: int, _pid: int) -> int:
        directory = self._tree.get(parent)
        if name in directory.entries and not flags & os.O_EXCL:
            # A program has made the name since the kernel's lookup. ESTALE makes the kernel repeat the lookup and check
            # permissions.
            raise SymError("the name was made meanwhile", errno.ESTALE)
        self._require_descriptor(uid)
        inode = self._volume.make_plain(directory, name, mode, uid, gid)
        fh, open_flags = await self._open(inode, inode.number, flags, uid)
        self._nodes.looked_up(inode.number, inode)
        return self._answers.created(self._attributes(inode, inode.number), fh, open_flags)

    async def open(self, number: int, flags: int, uid: int, _pid: int) -> int:
        inode = self._nodes.inode(number)
        opened = await self._open(inode, number, flags, uid)
        if flags & os.O_TRUNC and uid:  # the kernel drops the setuid and setgid bits at a write, but not at O_TRUNC
            inode.mode &= ~(stat.S_ISUID | (stat.S_ISGID if inode.mode & stat.S_IXGRP else 0))
        return self._answers.opened(*opened)

    async def read(self, fh: int, offset: int, size: int) -> int:
        return self._answers.data(await self._files.read(self._file(fh), offset, size))

    async def write(self, fh: int, offset: int, data: memoryview) -> int:
        size = len(data)
        await self._files.write(self._file(fh), offset, data)
        return self._answers.count(size)

    async def flush(self, fh: int, _pid: int) -> int:
        """Flush a handle, because thread `_pid` closes one of its descriptors."""
        await self._files.flush(self._file(fh))
        return 0

    async def fsync(self, fh: int) -> int:
        handle = self._file(fh)
        await self._files.settle_shared(handle)
        return await self._sync(handle.file.inode)

    async def _sync(self, inode: Inode) -> int:
        await self._eager.leave()
        await self._volume.sync(inode)
        return 0

    async def release(self, fh: int) -> int:
        handle = self._file(fh)
        del self._handles[fh]
        self._let_go(fh)
        self._volume.locks.release(handle.file.inode.number, _lock_owner(fh))
        await self._files.release(handle)
        return 0

    async def copy_file_range(self, fh: int, offset: int, target_fh: int, target_offset: int, size: int) -> int:
        """Copy a range of bytes, for example for `cp`. A copy of a whole KV file becomes a fork."""
        source, target = self._file(fh), self._file(target_fh)
        return self._answers.count(await self._files.copy(source, offset, target, target_offset, size))

    async def fallocate(self, fh: int, mode: int, offset: int, size: int) -> int:
        """Reserve room like `fallocate(2)` with mode 0. The kernel has checked RLIMIT_FSIZE."""
        if mode:
            raise NotSupported(f"fallocate: mode {mode:#x} is not known here, only 0")
        await self._files.allocate(self._file(fh), offset, size)
        return 0

    async def flock(self, fh: int, operation: int) -> int:
        """Take or release the lock of the open file. Calls of programs use the same lock."""
        number, locks, owner = self._file(fh).file.inode.number, self._volume.locks, _lock_owner(fh)
        if operation & fcntl.LOCK_UN:
            locks.release(number, owner)
            return 0
        exclusive = bool(operation & fcntl.LOCK_EX)
        try:
            locks.acquire_nowait(number, owner, exclusive=exclusive)
        except SymError:
            if operation & fcntl.LOCK_NB:
                raise
            self._held[fh][0].require(Kind.REQUEST)
            await self._eager.leave()
            await locks.acquire(number, owner, exclusive=exclusive)
        return 0

    # Directories

    def opendir(self, number: int) -> int:
        directory = self._nodes.inode(number)
        holdings = self._payer()
        holdings.require(Kind.OPEN)
        self._tree.require_fresh(directory)
        self._tree.opened(directory)
        return self._answers.opened(self._new_handle(_Listing(directory), holdings))

    def readdir(self, fh: int, start: int, room: int) -> int:
        listing = self._listing(fh)
        directory, order = listing.directory, self._tree.order(listing.directory)
        if start == 0 or not listing.end:
            listing.end = order.end
        dots = ((place, name, self._tree.child(directory, name)) for place, name in DOTS[start:])
        answer = list[bytes]()
        for place, name, inode in itertools.chain(dots, order.between(start, listing.end)):
            room -= wire.listing_entry_bytes(name)
            if room < 0:
                break
            node = 0 if inode.is_damaged else self._files.node_of(inode)  # 0: the kernel will look the name up
            valid_s = 0
            if place >= FIRST_PLACE and node:
                try:
                    self._nodes.looked_up(node, inode)
                except OverQuota:
                    if not answer:
                        raise
                    break  # lookups of the earlier names are counted already, so the kernel must get these names
                valid_s = self._grants.valid_s(inode, node)
            answer.append(wire.listing_entry(name, self._attributes(inode, node), node, place + 1, valid_s))
        return self._answers.data(b"".join(answer))

    def releasedir(self, fh: int) -> int:
        self._tree.closed(self._listing(fh).directory)
        del self._handles[fh]
        self._let_go(fh)
        return 0

    async def fsyncdir(self, fh: int) -> int:
        """Sync the directory, with the names in it."""
        return await self._sync(self._listing(fh).directory)

    # Parts of handlers

    def _made(self, inode: Inode) -> int:
        return self._entry(inode, inode.number)

    def _entry(self, inode: Inode, node: int, valid_s: int = 0) -> int:
        self._nodes.looked_up(node, inode)
        return self._answers.entry(self._attributes(inode, node), node, valid_s)

    def _attributes(self, inode: Inode, node: int) -> wire.Attributes:
        size, mtime_ns, ctime_ns = self._files.shown(inode, node)
        return wire.attributes(
            inode.number,
            inode.file_type | inode.mode,
            inode.nlink,
            inode.uid,
            inode.gid,
            size,
            inode.atime_ns,
            mtime_ns,
            ctime_ns,
            inode.device,
            _KV_BLOCK_BYTES if type(inode.content) is KvFile else _BLOCK_BYTES,
        )

    def _attribute_data(self, value: bytes, room: int) -> int:
        """Answer getxattr(2) or listxattr(2): the length if `room` is 0, else the bytes if they fit."""
        if not room:
            return self._answers.count(len(value))
        if len(value) > room:
            raise SymError(f"the attribute has {len(value)} bytes, there is room for {room}", errno.ERANGE)
        return self._answers.data(value)

    async def _open(self, inode: Inode, node: int, flags: int, uid: int) -> tuple[int, int]:
        """Open a file. Return the new handle's number, and the flags for the kernel."""
        if inode.content is None:
            if not inode.names:  # a program has removed the file by a call: ESTALE makes the kernel repeat the lookup
                raise SymError(f"inode {inode.number} was removed meanwhile", errno.ESTALE)
            raise NotSupported(f"inode {inode.number} is not a regular file")
        holdings, kind = self._accounts.of(uid).holdings, Kind.OPEN
        if isinstance(inode.content, PlainFile):
            kind = Kind.PLAIN
            self._require_descriptor(uid)
        holdings.require(kind)
        access, is_emptied = flags & os.O_ACCMODE, bool(flags & os.O_TRUNC)
        self._tree.require_open(inode, writable=access != os.O_RDONLY or is_emptied, is_emptied=is_emptied)
        if self._files.is_outdated(inode, node):  # another machine has synced a version since the kernel's lookup
            raise SymError(f"inode {inode.number} has another content now", errno.ESTALE)
        handle = await self._files.open(
            inode,
            node,
            readable=access != os.O_WRONLY,
            writable=access != os.O_RDONLY,
            truncate=is_emptied,
        )
        open_flags = (
            (wire.OPEN_DIRECT_IO if handle.direct else 0)
            | (wire.OPEN_KEEP_CACHE if handle.keep_cache else 0)
            | (0 if handle.wrote or handle.writable else wire.OPEN_NOFLUSH)
        )
        return self._new_handle(handle, holdings, kind), open_flags

    def _new_handle(self, handle: Handle | _Listing, holdings: Holdings, kind: Kind = Kind.OPEN) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = handle
        self._held[self._next_handle] = holdings, kind
        holdings.charge(kind)
        return self._next_handle

    def _let_go(self, fh: int) -> None:
        holdings, kind = self._held.pop(fh)
        holdings.let_go(kind)

    def _payer(self) -> Holdings:
        return self._accounts.of(self.caller).holdings

    def _require_descriptor(self, uid: int) -> None:
        """Raise OverQuota if the user has open all plain files that one user may have open. Other users get the
        remaining descriptors.
        """
        holdings = self._accounts.of(uid).holdings
        holdings.require(Kind.PLAIN)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_PART
        if holdings.core.num_of[Kind.PLAIN] >= most and not self._accounts.is_exempt(uid):
            raise OverQuota(f"uid {uid} has {most} plain files open, its share of the daemon's descriptors: close some")

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


def _lock_owner(fh: int) -> tuple[str, int]:
    return "mount", fh
