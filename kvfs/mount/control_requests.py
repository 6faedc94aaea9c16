"""The mount with the control files in it: requests for those numbers are answered here, all others as ever.

Control files go past the page cache (direct I/O): their bytes are made when they are asked for.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from kvfs.control.directory import Attributes, ControlTree
from kvfs.control.handles import ControlHandle
from kvfs.mount import wire
from kvfs.mount.eager import Eager
from kvfs.mount.handlers import DOTS, KvOperations
from kvfs.mount.open_files import Handle
from kvfs.names.inode import Credentials
from kvfs.volume import Volume
from libsym.errors import NotPermitted, NotSupported, SymError

_GONE = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(slots=True)
class _ControlListing:
    """An open directory of control files: names and numbers as they were at opendir or rewinddir."""

    number: int
    entries: tuple[tuple[bytes, int], ...] = ()


class ControlledOperations(KvOperations):
    """The handlers of one mount that has a `.symphony`."""

    def __init__(self, volume: Volume, answers: wire.Answers, eager: Eager, control: ControlTree) -> None:
        super().__init__(volume, answers, eager)
        self._control = control
        self._open_controls: dict[int, ControlHandle] = {}
        self._open_listings: dict[int, _ControlListing] = {}

    def dispose(self) -> None:
        self._control.close()
        self._open_controls.clear()
        self._open_listings.clear()
        super().dispose()

    # Names

    def lookup(self, parent: int, name: bytes) -> int:
        if self._control.owns(parent) or self._control.is_entrance(parent, name):
            found = self._control.lookup(parent, name)
            return self._answers.entry(_wired(found), found.number)
        return super().lookup(parent, name)

    def forget(self, number: int, num_lookups: int) -> None:
        if not self._control.owns(number):
            super().forget(number, num_lookups)

    def mknod(self, parent: int, name: bytes, mode: int, device: int, uid: int, gid: int) -> int:
        self._require_changeable(parent)
        return super().mknod(parent, name, mode, device, uid, gid)

    def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> int:
        self._require_changeable(parent)
        return super().symlink(parent, name, target, uid, gid)

    def link(self, number: int, new_parent: int, new_name: bytes) -> int:
        self._require_changeable(number, new_parent)
        return super().link(number, new_parent, new_name)

    def unlink(self, parent: int, name: bytes) -> int:
        self._require_removable(parent, name)
        return super().unlink(parent, name)

    def rmdir(self, parent: int, name: bytes) -> int:
        self._require_removable(parent, name)
        return super().rmdir(parent, name)

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> int:
        self._require_removable(parent, name)
        self._require_removable(new_parent, new_name)
        return super().rename(parent, name, new_parent, new_name, flags)

    def _require_changeable(self, *numbers: int) -> None:
        if any(map(self._control.owns, numbers)):
            raise NotPermitted("names of control files can't be changed here; change those of the mount itself")

    def _require_removable(self, parent: int, name: bytes) -> None:
        self._require_changeable(parent)
        if self._control.is_entrance(parent, name):
            raise NotPermitted(".symphony belongs to the file system: it can be neither moved nor removed")

    # Attributes

    def getattr(self, number: int) -> int:
        if self._control.owns(number):
            return self._answers.attr(_wired(self._control.attributes(number)))
        return super().getattr(number)

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
        if not self._control.owns(number):
            return await super().setattr(number, fields, fh, mode, uid, gid, size, atime_ns, mtime_ns)
        behind = self._control.inode_behind(number)
        if fields & wire.SET_UID:
            self._volume.change_owner(behind, uid)
        if fields & wire.SET_SIZE:
            self._control.truncate(number, size)
        self.set_others(behind, fields, mode, gid, atime_ns, mtime_ns)
        return self._answers.attr(_wired(self._control.attributes(number)))

    def statfs(self, number: int) -> int:
        return super().statfs(self._control.inode_around(number).number if self._control.owns(number) else number)

    def getxattr(self, number: int, name: bytes, room: int) -> int:
        return super().getxattr(self._behind(number), name, room)

    def listxattr(self, number: int, room: int) -> int:
        return super().listxattr(self._behind(number), room)

    def setxattr(self, number: int, name: bytes, value: bytes, flags: int, uid: int) -> int:
        return super().setxattr(self._behind(number), name, value, flags, uid)

    def removexattr(self, number: int, name: bytes, uid: int) -> int:
        return super().removexattr(self._behind(number), name, uid)

    def _behind(self, number: int) -> int:
        """The inode whose extended attributes these are: those of a text are those of its KV file."""
        if not self._control.owns(number):
            return number
        try:
            return self._control.inode_behind(number).number
        except NotPermitted:
            raise NotSupported("control files have no extended attributes") from None

    # Files

    async def create(self, parent: int, name: bytes, mode: int, flags: int, uid: int, gid: int, pid: int) -> int:
        if not self._control.owns(parent):
            return await super().create(parent, name, mode, flags, uid, gid, pid)
        await self._eager.leave()
        handle, attributes = await self._control.create(parent, name, mode, flags, Credentials(uid, gid), pid)
        return self._answers.created(_wired(attributes), self._opened(handle), wire.OPEN_DIRECT_IO)

    async def open(self, number: int, flags: int, uid: int, pid: int) -> int:
        if not self._control.owns(number):
            return await super().open(number, flags, uid, pid)
        await self._eager.leave()
        handle = await self._control.open(number, flags, pid)
        return self._answers.opened(self._opened(handle), wire.OPEN_DIRECT_IO)

    async def read(self, fh: int, offset: int, size: int) -> int:
        handle = self._open_controls.get(fh)
        if handle is None:
            return await super().read(fh, offset, size)
        await self._eager.leave()
        return self._answers.data(await self._control.read(handle, offset, size))

    async def write(self, fh: int, offset: int, data: memoryview) -> int:
        handle = self._open_controls.get(fh)
        if handle is None:
            return await super().write(fh, offset, data)
        kept = bytes(data)  # the request's own memory is used again as soon as this waits
        await self._eager.leave()
        return self._answers.count(await self._control.write(handle, offset, kept))

    async def flush(self, fh: int, pid: int) -> int:
        handle = self._open_controls.get(fh)
        if handle is None:
            return await super().flush(fh, pid)
        await self._eager.leave()
        await self._control.flush(handle, pid)
        return 0

    def fsync(self, fh: int) -> int:
        return 0 if fh in self._open_controls else super().fsync(fh)

    async def release(self, fh: int) -> int:
        handle = self._open_controls.pop(fh, None)
        if handle is None:
            return await super().release(fh)
        await self._eager.leave()
        await self._control.release(handle)
        return 0

    def _file(self, fh: int) -> Handle:
        """For copy_file_range: `cp` reads and writes when it is not supported."""
        if fh in self._open_controls:
            raise NotSupported("texts are copied by reading and writing")
        return super()._file(fh)

    def _opened(self, handle: ControlHandle) -> int:
        number = self.new_number()
        self._open_controls[number] = handle
        return number

    # Directories

    def opendir(self, number: int) -> int:
        if not self._control.owns(number):
            return super().opendir(number)
        fh = self.new_number()
        self._open_listings[fh] = _ControlListing(number)
        return self._answers.opened(fh)

    def readdir(self, fh: int, start: int, room: int) -> int:
        listing = self._open_listings.get(fh)
        if listing is None:
            return super().readdir(fh, start, room)
        if start == 0:
            dots = [(name, listing.number) for name in DOTS]
            listing.entries = (*dots, *self._control.listing(listing.number))
        answer = []
        for place, (name, number) in enumerate(listing.entries[start:], start):
            try:
                attributes = self._control.attributes(number)
            except SymError as error:
                if error.errno not in _GONE:
                    raise
                continue
            room -= wire.listing_entry_bytes(name)
            if room < 0:
                break
            answer.append(wire.listing_entry(name, _wired(attributes), number, place + 1))
        return self._answers.data(b"".join(answer))

    def releasedir(self, fh: int) -> int:
        return 0 if self._open_listings.pop(fh, None) else super().releasedir(fh)

    def fsyncdir(self, fh: int) -> int:
        return 0 if fh in self._open_listings else super().fsyncdir(fh)


def _wired(attributes: Attributes) -> wire.Attributes:
    return wire.attributes(
        attributes.number,
        mode=attributes.mode,
        nlink=attributes.nlink,
        uid=attributes.uid,
        gid=attributes.gid,
        size=attributes.size,
        atime_ns=attributes.atime_ns,
        mtime_ns=attributes.mtime_ns,
        ctime_ns=attributes.ctime_ns,
    )
