"""The handlers of `.symphony`. They answer the same requests as `kvfs.mount.handlers`, for inodes and handles with
numbers from CONTROL_ROOT up.

Control files bypass the page cache (direct I/O), because their bytes are made on demand. The daemon does not record
which control files the kernel knows, so the kernel may forget them at any time.
"""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass
from functools import partial

from kvfs.control.directory import CONTROL_ROOT, ControlTree
from kvfs.control.handles import ControlHandle
from kvfs.mount import wire
from kvfs.mount.eager import Eager
from kvfs.mount.handlers import FileHandlers
from kvfs.mount.waiting_changes import WaitingChanges
from kvfs.names.content import KvFile
from kvfs.names.inode import Credentials
from kvfs.names.order import DOTS
from kvfs.pages.holdings import Holdings, Kind
from kvfs.volume.volume import Volume
from libsym.errors import Invalid, NotPermitted, NotSupported, SymError

_GONE = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(slots=True)
class _Listing:
    """An open directory of control files. `end`: the place at which the listing ends."""

    number: int
    end: int = 0


class ControlHandlers:
    """The handlers of one mount's control files. The numbers of open handles begin at CONTROL_ROOT, too."""

    def __init__(
        self,
        control: ControlTree,
        volume: Volume,
        answers: wire.Answers,
        eager: Eager,
        files: FileHandlers,
        changes: WaitingChanges,
    ) -> None:
        self._control = control
        self._volume = volume
        self._answers = answers
        self._eager = eager
        self._files = files
        self._changes = changes
        self._handles: dict[int, ControlHandle] = {}
        self._payers: dict[int, Holdings] = {}
        """The holdings that each handle and each listing is charged to."""
        self._listings: dict[int, _Listing] = {}
        self._numbers = itertools.count(CONTROL_ROOT)

    # Names

    def lookup(self, parent: int, name: bytes) -> int:
        found = self._control.lookup(parent, name)
        return self._answers.entry(wire.attributes(*found), found.number)

    def refuse_change(self, *_arguments: object) -> int:
        raise NotPermitted("names of control files can't be changed here; change those of the mount itself")

    mknod = symlink = link = unlink = rmdir = rename = refuse_change

    def readlink(self, _number: int) -> int:
        raise Invalid("no control file is a symbolic link")

    # Attributes

    def getattr(self, number: int) -> int:
        return self._answers.attr(wire.attributes(*self._control.attributes(number)))

    async def setattr(
        self,
        number: int,
        fields: int,
        _fh: int | None,
        mode: int,
        uid: int,
        gid: int,
        size: int,
        atime_ns: int,
        mtime_ns: int,
    ) -> int:
        behind = self._control.inode_behind(number)
        self._files.require_settled(behind, fields, mode, uid, gid, is_emptied=False)
        if fields & wire.SET_UID:
            self._volume.change_owner(behind, uid)
        if fields & wire.SET_SIZE:
            cut = partial(self._control.truncate, number, size)
            if isinstance(behind.content, KvFile):  # else `cut` raises an error
                await self._changes.change(behind.content, self._volume.tree.path_of(behind), cut)
            else:
                cut()
        self._files.set_others(behind, fields, mode, gid, atime_ns, mtime_ns)
        return self.getattr(number)

    def statfs(self, number: int) -> int:
        return self._files.statfs(self._control.inode_around(number).number)

    async def getxattr(self, number: int, name: bytes, room: int) -> int:
        return await self._files.getxattr(self._behind(number), name, room)

    async def listxattr(self, number: int, room: int) -> int:
        return await self._files.listxattr(self._behind(number), room)

    async def setxattr(self, number: int, name: bytes, value: bytes, flags: int, uid: int) -> int:
        return await self._files.setxattr(self._behind(number), name, value, flags, uid)

    async def removexattr(self, number: int, name: bytes, uid: int) -> int:
        return await self._files.removexattr(self._behind(number), name, uid)

    def _behind(self, number: int) -> int:
        """Return the inode whose extended attributes a control file shows: the KV file's inode if the control file is a
        text.
        """
        try:
            return self._control.inode_behind(number).number
        except NotPermitted:
            raise NotSupported("control files have no extended attributes") from None

    # Files

    async def create(self, parent: int, name: bytes, mode: int, flags: int, uid: int, gid: int, pid: int) -> int:
        await self._eager.leave()
        payer = self._payer(uid)
        handle, attributes = await self._control.create(parent, name, mode, flags, Credentials(uid, gid), pid)
        return self._answers.created(wire.attributes(*attributes), self._opened(handle, payer), wire.OPEN_DIRECT_IO)

    async def open(self, number: int, flags: int, uid: int, pid: int) -> int:
        await self._eager.leave()
        payer = self._payer(uid)
        handle = await self._control.open(number, flags, uid, pid)
        return self._answers.opened(self._opened(handle, payer), wire.OPEN_DIRECT_IO)

    async def read(self, fh: int, offset: int, size: int) -> int:
        await self._eager.leave()
        return self._answers.data(await self._handles[fh].read(offset, size))

    async def write(self, fh: int, offset: int, data: memoryview) -> int:
        kept = bytes(data)  # the memory of the request is reused once this handler waits
        await self._eager.leave()
        return self._answers.count(await self._handles[fh].write(offset, kept))

    async def flush(self, fh: int, pid: int) -> int:
        await self._eager.leave()
        await self._handles[fh].flush(pid)
        return 0

    async def release(self, fh: int) -> int:
        handle = self._handles.pop(fh)
        self._payers.pop(fh).let_go(Kind.OPEN)
        await self._eager.leave()
        await handle.release()
        return 0

    async def copy_file_range(self, *_arguments: int) -> int:
        raise NotSupported("texts are copied by reading and writing")  # `cp` then does that

    fallocate = flock = copy_file_range

    def _payer(self, uid: int) -> Holdings:
        """Return the holdings of the user. Raise OverQuota if the user may open no more files."""
        payer = self._volume.pool.accounts.of(uid).holdings
        payer.require(Kind.OPEN)
        return payer

    def _opened(self, handle: ControlHandle, payer: Holdings) -> int:
        number = self._charged(payer)
        self._handles[number] = handle
        return number

    def _charged(self, payer: Holdings) -> int:
        """Return the number of a new handle, which is charged to the payer."""
        number = next(self._numbers)
        self._payers[number] = payer
        payer.charge(Kind.OPEN)
        return number

    # Directories

    def opendir(self, number: int) -> int:
        fh = self._charged(self._payer(self._files.caller))
        self._listings[fh] = _Listing(number)
        return self._answers.opened(fh)

    def readdir(self, fh: int, start: int, room: int) -> int:
        listing = self._listings[fh]
        if start == 0 or not listing.end:
            listing.end = self._control.end_of_listing(listing.number)
        dots = ((place, name, listing.number) for place, name in DOTS[start:])
        found = self._control.listing(listing.number, start, listing.end)
        answer = []
        for place, name, number in itertools.chain(dots, found):
            try:
                attributes = self._control.attributes(number)
            except SymError as error:
                if error.errno not in _GONE:
                    raise
                continue
            room -= wire.listing_entry_bytes(name)
            if room < 0:
                break
            answer.append(wire.listing_entry(name, wire.attributes(*attributes), number, place + 1))
        return self._answers.data(b"".join(answer))

    def releasedir(self, fh: int) -> int:
        del self._listings[fh]
        self._payers.pop(fh).let_go(Kind.OPEN)
        return 0

    async def fsync(self, fh: int) -> int:
        """Sync the KV file behind a text."""
        await self._eager.leave()
        await self._handles[fh].sync()
        return 0

    async def fsyncdir(self, _fh: int) -> int:
        """Do nothing, because these directories are not stored."""
        return 0
