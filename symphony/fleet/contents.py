"""Contents of a fleet's files: the right to write, the last version, and its sync."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace

import trio

from kvfs.fs import FileSystem
from kvfs.names.content import Elsewhere, KvFile
from kvfs.names.plain import PlainFile
from libsym.errors import Busy, NotFound, NotSupported, SymError, TimedOut
from symphony.fleet.etcd import has_revision, has_value, putting, removing
from symphony.fleet.following import RETRY_S, Follower
from symphony.fleet.membership import Membership
from symphony.fleet.mirror import Item, Mirror
from symphony.fleet.records import Keys, NameRecord
from symphony.fleet.versions import Draft, Versions

log = logging.getLogger(__name__)

MAX_TRIES = 8
"""Maximum number of transactions for one change, if others change the same record each time."""


class Contents:
    """The contents of a fleet's files on this machine."""

    def __init__(
        self, fs: FileSystem, keys: Keys, mirror: Mirror, follower: Follower, membership: Membership, versions: Versions
    ) -> None:
        self._fs, self._keys, self._mirror, self._follower = fs, keys, mirror, follower
        self._membership, self._versions = membership, versions
        self._written: dict[str, Item] = {}
        """Files that may have a content that is not synced, or a right to write that is here."""
        self._closed: dict[str, Item] = {}
        """Files whose last writing handle was closed."""
        self._something_closed = trio.Event()

    def note_written(self, item: Item) -> None:
        """Note a file that somebody may write here, until it is synced and the right to write is given back."""
        self._written[item.ident] = item

    def note_closed(self, item: Item) -> None:
        """Sync a file soon, and give the right to write back, unless a handle needs it."""
        if not item.writers and (item.right or not item.is_synced or self._is_mine(item)):
            self._written[item.ident] = self._closed[item.ident] = item
            self._something_closed.set()

    def note_right(self, item: Item) -> None:
        """Note that etcd says who may write a file. A right of this machine that no call waits for is given back: the
        call that took it was cancelled, or its answer was lost.
        """
        if not item.right and not item.lock.locked():
            self.note_closed(item)

    def _is_mine(self, item: Item) -> bool:
        return self._mirror.writing.get(item.ident) == self._membership.name

    async def open(self, item: Item, *, writable: bool, is_emptied: bool) -> None:
        """Bring the last version here, and the right to write it. `is_emptied`: the version is not needed.

        A read waits for no lock: reads go on while a sync, or an open to write, waits for etcd.
        """
        if writable and not item.right:
            async with item.lock:
                if not item.right:
                    await self._take(item)
        if isinstance(item.inode.content, Elsewhere) and not is_emptied:
            await self._bring(item)

    async def sync(self, item: Item) -> None:
        """Make the present content of a file the version of all machines. ESTALE: another content has taken its place
        meanwhile.
        """
        content = item.inode.content
        if content is not None:
            async with item.lock:
                await self._publish(item)
            if isinstance(content, KvFile) and item.inode.content is not content:
                raise self._lost(item)

    async def sync_all(self) -> None:
        """Sync all files that were written here, apart from plain files. A file that can't be synced
        holds up no other file.
        """
        failures = list[SymError]()
        for item in tuple(self._written.values()):
            if isinstance(item.inode.content, KvFile):
                try:
                    await self.sync(item)
                except SymError as error:
                    log.warning("fleet: %s", error)
                    failures.append(error)
        if failures:
            what = f"{len(failures)} files of the fleet are not synced: the log names them"
            raise SymError(what, failures[0].errno or errno.EIO)

    def require_lease(self) -> int:
        """Return the lease of this machine. TimedOut: etcd does not list this machine."""
        lease = self._membership.lease
        if not self._membership.serves:
            raise NotSupported("this daemon has no `peer_listen`, so it can't write files of the fleet")
        if not lease:
            raise TimedOut("etcd does not list this machine now, so it can't write files of the fleet")
        return lease

    async def _take(self, item: Item) -> None:
        """Take the right to write. Busy: another machine has it."""
        key, mine = self._keys.right(item.ident), self._membership.name
        for _ in range(MAX_TRIES):
            writer = self._mirror.writing.get(item.ident, "")
            if writer not in {"", mine}:
                path = self._mirror.path_of(item)
                raise Busy(f"{path} is open for writing on the machine {writer}: try again when it is closed there")
            # A right that a daemon of this machine had before its restart ends with the old lease, or now.
            is_free = has_value(key, mine.encode()) if writer else has_revision(key, 0)
            compare = [is_free, has_revision(self._keys.inode(item.ident), item.revision)]
            lease = self.require_lease()
            held, revision = await self._follower.commit(compare, [putting(key, mine.encode(), lease)])
            if held and not self._has_lost(item, revision):
                item.right, item.lease, self._mirror.writing[item.ident] = revision, lease, mine
                return
            await self._follower.look()
            if self._mirror.by_ident.get(item.ident) is not item:
                raise NotFound("another machine has removed the file")
        raise Busy(f"{self._mirror.path_of(item)}: other machines write it all the time: try again")

    def _has_lost(self, item: Item, right: int) -> bool:
        """Whether the right that this machine got in the revision `right` has ended, as the watch says."""
        return self._follower.seen >= right and not self._is_mine(item)

    async def _bring(self, item: Item) -> None:
        """Replace the content by the version of the record, from this machine's disk or from a peer."""
        while isinstance(item.inode.content, Elsewhere):
            tag, owner = item.record.tag, item.record.uid
            try:
                version = await self._versions.open(item.ident, tag, [*item.record.machines], owner)
            except SymError:
                await self._follower.look()
                if tag == item.record.tag:
                    raise
                continue  # a newer version has replaced it meanwhile
            try:
                if tag == item.record.tag and isinstance(item.inode.content, Elsewhere):
                    content = self._fs.volume.show_fork(item.inode, version.inode, version.content)
                    item.synced = content, content.changes
                    self._mirror.set_times(item)
            finally:
                self._fs.kv_close(version)

    async def _publish(self, item: Item) -> None:
        """Make the present content the version of all machines. The caller has the lock.

        NotSupported: the content is no KV file. EIO: too few machines have it on disk. ESTALE: another machine has
        synced a newer version, while this machine was cut off.
        """
        inode, content = item.inode, item.inode.content
        if item.is_synced:
            return
        if not item.right:
            await self._take_again(item)
        right = item.right
        record = replace(item.record, mtime_ns=max(0, inode.mtime_ns), tag="", num_entries=0, size=0, machines=())
        seen = content, 0
        if isinstance(content, KvFile):
            seen, volume = (content, content.changes), self._fs.volume
            num_entries, size = content.table.length, volume.image_bytes(content)
            draft = await self._draft(item, content)
            record = replace(
                record,
                tag=draft.tag,
                num_entries=num_entries,
                size=size,
                machines=tuple(each for each in draft.machines if each not in self._membership.drained),
                identity=dict(volume.model.identity),
                bits=volume.bits,
            )
        elif not isinstance(content, PlainFile) or content.size:
            raise NotSupported(f"{self._mirror.path_of(item)} is no KV file: a fleet has only these")
        await self._replace_record(item, record, right)
        item.draft = None
        if inode.content is content:
            item.synced = seen

    async def _draft(self, item: Item, content: KvFile) -> Draft:
        """Return a version of the present content that enough machines have: a new one, or one of a failed sync."""
        draft = item.draft
        if draft is None or draft.made_of != (content, content.changes):
            if draft is not None:
                self._versions.drop(item.ident, draft.tag)
            draft = item.draft = await self._versions.make(item.ident, item.inode)
        listed = {self._membership.name, *self._membership.present}
        draft.machines = [each for each in draft.machines if each in listed]  # others may have left the fleet since
        await self._versions.spread(draft, self._versions.count)
        return draft

    async def _replace_record(self, item: Item, record: NameRecord, right: int) -> None:
        """Replace the record while this machine has the right that it got in the revision `right`."""
        key = self._keys.inode(item.ident)
        for _ in range(MAX_TRIES):
            if item.right != right:
                break
            now = item.record
            record = replace(record, generation=now.generation + 1, mode=now.mode, uid=now.uid, gid=now.gid)
            compare = [has_revision(self._keys.right(item.ident), right), has_revision(key, item.revision)]
            held, revision = await self._follower.commit(compare, [putting(key, record.encoded())])
            if held:
                if revision > item.revision:  # else the watch was faster, and may have brought a newer record
                    item.record, item.revision = record, revision
                if now.tag != record.tag:  # else an earlier sync had succeeded, and its answer was lost
                    self._versions.drop(item.ident, now.tag)
                return
            await self._follower.look()
        if item.right == right:
            item.right = 0  # the next sync asks for it again
        item.draft = None
        raise self._lost(item)

    async def _take_again(self, item: Item) -> None:
        """Take the right to write that this machine had. ESTALE: another machine has had it meanwhile."""
        content = item.inode.content
        await self._follower.look()
        try:
            if item.inode.content is content:
                await self._take(item)
        except Busy:
            raise self._lost(item) from None
        if item.inode.content is not content:
            raise self._lost(item)

    def _lost(self, item: Item) -> SymError:
        path = self._mirror.path_of(item)
        return SymError(
            f"{path}: this machine was cut off from etcd, and another machine writes the file", errno.ESTALE
        )

    async def close_for_ever(self) -> None:
        """Sync the files whose last writing handle was closed, and give their rights back."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._something_closed.wait()
                self._something_closed, closed, self._closed = trio.Event(), self._closed, {}
                for item in closed.values():
                    nursery.start_soon(self._close, item)

    async def _close(self, item: Item) -> None:
        is_said = False
        while not await self._gives_back(item, is_said=is_said):
            is_said = True
            await trio.sleep(RETRY_S)

    async def _gives_back(self, item: Item, *, is_said: bool = False) -> bool:
        """Sync a file, and give the right to write back. Return False, and log the reason, if this fails."""
        path = self._mirror.path_of(item)
        try:
            async with item.lock:
                await self._give_back(item)
        except SymError as error:
            if error.errno == errno.ESTALE:
                log.warning("%s: %s; what was written here is lost", path, error, extra={"file": path})
                if not self._is_gone(item):
                    self._mirror.show(item)
                return True
            if not is_said:
                log.warning("%s is closed, but not synced yet: %s", path, error, extra={"file": path})
            return False
        return True

    async def close(self, limit_s: float) -> None:
        """Sync the files that are open for writing here, and give their rights back."""
        with trio.move_on_after(limit_s):
            async with trio.open_nursery() as nursery:
                for item in tuple(self._written.values()):
                    item.writers = 0
                    nursery.start_soon(self._gives_back, item)

    async def _give_back(self, item: Item) -> None:
        while not item.is_synced:
            if item.writers or self._is_gone(item):
                return
            content = item.inode.content
            if isinstance(content, PlainFile) and content.size:
                path = self._mirror.path_of(item)
                text = "%s gets its last version again: what was written is no KV file"
                log.warning(text, path, extra={"file": path})
                self._mirror.show(item)
            await self._publish(item)
        if item.writers or self._is_gone(item):
            return
        self._written.pop(item.ident, None)
        right, item.right = item.right, 0  # an open from now on takes the right again
        if not right and not self._is_mine(item):
            return
        key = self._keys.right(item.ident)
        still = has_revision(key, right) if right else has_value(key, self._membership.name.encode())
        try:
            await self._follower.commit([still], [removing(key)])
        except SymError:
            self._written[item.ident] = item
            if right and not self._has_lost(item, right):
                item.right = right
            raise

    def _is_gone(self, item: Item) -> bool:
        is_gone = self._mirror.by_ident.get(item.ident) is not item
        if is_gone:
            self._written.pop(item.ident, None)
        return is_gone
