"""The names of a fleet: `/kv/fleet` is the same tree on every machine, because etcd has the truth.

A change of names is a transaction in etcd. A watch brings the changes of all machines in the order of their revisions,
and a task makes them here. If a change is this daemon's own, the call that waits for it makes the change instead.

On the disk of this machine are only versions of files: see `symphony.fleet.versions`. At a start, the names come from
etcd.
"""

from __future__ import annotations

import stat
from dataclasses import replace
from typing import Any
from uuid import uuid4

import trio

from kvfs.fs import FileSystem
from kvfs.names.agreement import Grant, Look, Make, Need, Open, Remove, Rename, SetMode
from kvfs.names.content import Elsewhere
from kvfs.names.inode import Inode, shown
from libsym.errors import Invalid, NotSupported
from symphony.fleet.contents import Contents
from symphony.fleet.draining import Draining
from symphony.fleet.etcd import Etcd, has_revision, has_value, is_empty, is_there, putting, removing
from symphony.fleet.following import Follower, OwnChange
from symphony.fleet.membership import Membership
from symphony.fleet.mirror import Mirror, is_reserved
from symphony.fleet.records import TYPES, Keys, NameRecord, quoted
from symphony.fleet.upkeep import Upkeep
from symphony.fleet.versions import Versions


class _Permit(OwnChange):
    """The grant of what a call needs: see `kvfs.names.agreement.Grant`."""

    def __init__(self, names: FleetNames, need: Need, ident: str = "") -> None:
        """`ident`: of the inode that the call makes."""
        super().__init__()
        self.need, self.ident, self.lease = need, ident, 0
        self._opened = need.inode if isinstance(need, Open) else None
        self._names = names

    def covers(self, need: Need) -> bool:
        return need == self.need and not self.over.is_set()

    def is_used(self, inode: Inode) -> None:
        if isinstance(self.need, Make):
            self._names.made(self, inode)
            self._opened = inode
        self.over.set()

    def end(self) -> None:
        self.over.set()
        if self._opened is not None:
            self._names.end_open(self._opened)


class FleetNames:
    """The names of a fleet. Satisfies `kvfs.names.agreement.Agreement`."""

    def __init__(self, fs: FileSystem, etcd: Etcd, fleet: str, membership: Membership, versions: Versions) -> None:
        """Make `/kv/fleet`. Exists: the directory is there, and has files of this machine."""
        self._keys, self._machine, self._membership = Keys(fleet), membership.name, membership
        self._mirror = mirror = Mirror(
            fs,
            self._keys,
            versions,
            lambda item: self._contents.note_right(item),  # noqa: PLW0108 - `_contents` is made later
        )
        self._follower = Follower(etcd, self._keys, membership.name, mirror)
        self._contents = Contents(fs, self._keys, mirror, self._follower, membership, versions)
        self.draining = Draining(self._keys, mirror, self._follower, membership, versions.count)
        self._upkeep = Upkeep(self._keys, mirror, self._follower, membership, versions, self.draining)
        self.root, self.local = mirror.root, mirror.local
        fs.volume.tree.agreement = self

    @property
    def trouble(self) -> str:
        """Reason why changes of other machines do not arrive. Empty: they arrive."""
        return self._follower.trouble

    @property
    def num_names(self) -> int:
        return len(self._mirror.by_ident) - 1

    def version_of(self, inode: Inode) -> tuple[str, NameRecord] | None:
        """Return the last version of a file, as IDENT.TAG and its record. None: the file is not of the fleet."""
        item = self._mirror.by_number.get(inode.number)
        return None if item is None else (item.version, item.record)

    async def run(self) -> None:
        """Follow the changes of all machines for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follower.run)
            nursery.start_soon(self._follower.probe_for_ever)
            nursery.start_soon(self._contents.close_for_ever)
            nursery.start_soon(self._upkeep.run)

    async def close(self, limit_s: float) -> None:
        """Sync the files that are open for writing here, and give their rights back."""
        await self._contents.close(limit_s)

    # ---- Agreement

    def knows(self, inode: Inode) -> bool:
        return inode.number in self._mirror.by_number

    def is_open(self, inode: Inode, *, writable: bool) -> bool:
        del writable  # the machine that may write has the newest content, once an open has brought it
        item = self._mirror.by_number[inode.number]
        is_sure = item.right and item.lease == self._membership.lease
        return bool(is_sure) and not isinstance(inode.content, Elsewhere)

    def begin_writing(self, inode: Inode) -> None:
        item = self._mirror.by_number.get(inode.number)
        if item is not None:
            item.writers += 1
            self._contents.note_written(item)

    def end_writing(self, inode: Inode) -> None:
        item = self._mirror.by_number.get(inode.number)
        if item is not None:
            item.writers -= 1
            self._contents.note_closed(item)

    def num_lost(self, inode: Inode) -> int:
        item = self._mirror.by_number.get(inode.number)
        return 0 if item is None else item.num_lost

    def end_open(self, inode: Inode) -> None:
        """Note the end of a call that may have opened a file for writing."""
        item = self._mirror.by_number.get(inode.number)
        if item is not None:
            self._contents.note_closed(item)

    async def sync_all(self) -> None:
        await self._contents.sync_all()

    async def sync(self, inode: Inode) -> None:
        await self._contents.sync(self._mirror.item(inode))

    async def settle(self, need: Need) -> Grant | None:
        match need:
            case Look():
                await self._follower.look()
                return _Permit(self, need)
            case Open():
                return await self._settle_open(need)
            case SetMode():
                await self._set_mode(need)
                return None
        return await self._change(need)

    async def _settle_open(self, need: Open) -> Grant | None:
        await self._follower.look()
        item = self._mirror.by_number.get(need.inode.number)
        permit, is_done = _Permit(self, need), False
        try:
            if item is not None:  # else it was removed, which the call will see
                await self._contents.open(item, writable=need.writable, is_emptied=need.is_emptied)
            is_done = True
            return permit
        finally:
            if not is_done:
                permit.end()

    async def _change(self, need: Make | Remove | Rename) -> Grant | None:
        permit = _Permit(self, need, uuid4().hex if isinstance(need, Make) else "")
        compare, then = self._transaction(need, permit)
        return permit if await self._follower.commit_own(compare, then, permit) else None

    def made(self, permit: _Permit, inode: Inode) -> None:
        """Note the inode that a call has made by its permit."""
        need = permit.need
        assert isinstance(need, Make)
        item = self._mirror.add(permit.ident, inode, _record(need), permit.revision)
        if inode.file_type == stat.S_IFREG:
            item.right, item.lease = permit.revision, permit.lease
            self._mirror.writing[item.ident] = self._machine

    def _transaction(self, need: Make | Remove | Rename, permit: _Permit) -> tuple[list[Any], list[Any]]:
        """Return the comparisons and the changes of a need."""
        keys = self._keys
        if isinstance(need, Make | Rename):
            self._require_possible(need)
        match need:
            case Make():
                record, parent, ident = _record(need), self._mirror.ident(need.directory), permit.ident
                key = keys.name(parent, need.name)
                then = [putting(keys.inode(ident), record.encoded()), putting(key, ident.encode())]
                if record.type == "file":
                    permit.lease = self._contents.require_lease()
                    then.append(putting(keys.right(ident), self._machine.encode(), permit.lease))
                return [is_there(keys.inode(parent)), has_revision(key, 0)], then
            case Remove(directory, name, inode):
                removed, key = self._mirror.ident(inode), keys.name(self._mirror.ident(directory), name)
                return (
                    [has_value(key, removed.encode()), is_empty(keys.entries(removed))],
                    [removing(key), *self._removing(removed)],
                )
        moved, old = self._mirror.ident(need.moved), keys.name(self._mirror.ident(need.source), need.name)
        parent = self._mirror.ident(need.target)
        new = keys.name(parent, need.new_name)
        compare = [has_value(old, moved.encode()), is_there(keys.inode(parent))]
        then = [removing(old), putting(new, moved.encode())]
        if need.replaced is None:
            compare.append(has_revision(new, 0))
        else:
            replaced = self._mirror.ident(need.replaced)
            compare += [has_value(new, replaced.encode()), is_empty(keys.entries(replaced))]
            then += self._removing(replaced)
        if need.moved.is_directory and need.source is not need.target:
            compare.append(has_revision(keys.moves, self._mirror.moves))
            then.append(putting(keys.moves, moved.encode()))
        return compare, then

    def _require_possible(self, need: Make | Rename) -> None:
        directory, name = (need.directory, need.name) if isinstance(need, Make) else (need.target, need.new_name)
        if directory is self.root and is_reserved(name):
            raise Invalid(f"{shown(name)}: no file of the fleet can have this name there")

    def _removing(self, ident: str) -> list[Any]:
        return [removing(self._keys.inode(ident)), removing(self._keys.right(ident))]

    async def _set_mode(self, need: SetMode) -> None:
        item = self._mirror.item(need.inode)
        key, record = self._keys.inode(item.ident), replace(item.record, mode=need.mode, uid=need.uid, gid=need.gid)
        held, revision = await self._follower.commit(
            [has_revision(key, item.revision)], [putting(key, record.encoded())]
        )
        await (self._follower.reach(revision) if held else self._follower.look())


def _record(need: Make) -> NameRecord:
    """Return the record of an inode that is made. NotSupported: a fleet has no files of this type."""
    for name, file_type in TYPES.items():
        if file_type == need.file_type:
            return NameRecord(name, need.mode, need.uid, need.gid, quoted(need.target))
    raise NotSupported("a fleet has directories, KV files and symbolic links, and no other files")
