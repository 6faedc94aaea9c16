"""The names of a fleet as they are on this machine: the tree below `/kv/fleet`, made from records in etcd."""

from __future__ import annotations

import logging
import stat
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from kvfs.fs import FileSystem
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from libsym.errors import Exists, NotFound
from symphony.fleet.etcd import Change
from symphony.fleet.records import ROOT, Keys, NameRecord, name_of, record_of, unquoted
from symphony.fleet.versions import DIRECTORY, VERSIONS, Draft, Versions

log = logging.getLogger(__name__)

_FLEET = b"user.fleet"
A_TURN = 64
"""Number of changes, or of files, before other tasks may run."""
MOVING = b".moving-"
"""Beginning of the names of inodes that are between two places."""


def is_reserved(name: bytes) -> bool:
    """Whether no inode of the fleet can have this name in the root."""
    return name == VERSIONS or name.startswith(MOVING)


@dataclass(slots=True, eq=False)
class Item:
    """An inode of the fleet, as it is here."""

    ident: str
    inode: Inode
    record: NameRecord
    revision: int
    """Revision of the record."""
    right: int = 0
    """Revision in which this machine got the right to write. 0: it has no right."""
    lease: int = 0
    """Lease with which the right ends."""
    writers: int = 0
    """Number of open handles that may write."""
    num_lost: int = 0
    """Number of contents that were not synced when another machine's version took their place."""
    draft: Draft | None = None
    """The version of a sync that is under way, or has failed."""
    synced: tuple[object, int] | None = None
    """The content that equals the version of the record, and its count of changes."""
    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while the content, or the right to write, is changed."""

    @property
    def version(self) -> str:
        """The version of the record: see `symphony.fleet.versions`."""
        return f"{self.ident}.{self.record.tag}"

    @property
    def is_synced(self) -> bool:
        """Whether the content is the version of the record. Directories and symbolic links have no content."""
        content = self.inode.content
        if isinstance(content, KvFile):
            return self.synced == (content, content.changes)
        return not isinstance(content, PlainFile) or not (content.size or self.record.size)


class Mirror:
    """The inodes of a fleet, and who may write them."""

    def __init__(self, fs: FileSystem, keys: Keys, versions: Versions, note_right: Callable[[Item], None]) -> None:
        """Make `/kv/fleet`. Exists: the directory is there, and has files of this machine.

        `note_right`: function to call when etcd has said who may write a file.
        """
        self._note_right = note_right
        self._fs, self._tree, self._keys, self._versions = fs, fs.volume.tree, keys, versions
        self.root, self.local = self._directories()
        self.by_ident, self.by_number = dict[str, Item](), dict[int, Item]()
        self.add(ROOT, self.root, NameRecord("dir", self.root.mode, self.root.uid, self.root.gid), 0)
        self.writing: dict[str, str] = {}
        """Machines that have the right to write, by ident of the file."""
        self.moves = 0
        """Revision of the last move of a directory."""
        self.owns_versions = False
        """Whether the versions of this machine are of this fleet. Versions of another one may be all that is left."""

    def _directories(self) -> tuple[Inode, Inode]:
        tree, top = self._tree, self._tree.root
        root = top.entries.get(DIRECTORY)
        if root is None:
            root = tree.make(top, DIRECTORY, stat.S_IFDIR, mode=0o755, uid=top.uid, gid=top.gid)
        if not root.is_directory or root.entries.keys() - {VERSIONS}:
            raise Exists("/fleet of the mount has files of this machine: move them away, the fleet's names go there")
        if root.domain is None:
            if root.entries:
                raise Exists("/fleet/.versions of the mount exists, and /fleet is no domain: move them away")
            self._fs.volume.domains.begin(root)
        local = root.entries.get(VERSIONS)
        if local is None:
            local = tree.make(root, VERSIONS, stat.S_IFDIR, mode=0o700, uid=top.uid, gid=top.gid)
        return root, local

    def item(self, inode: Inode) -> Item:
        item = self.by_number.get(inode.number)
        if item is None:
            raise NotFound("another machine has removed the file")
        return item

    def path_of(self, item: Item) -> str:
        return str(self._tree.path_of(item.inode))

    def ident(self, inode: Inode) -> str:
        return self.item(inode).ident

    def note_fleet(self) -> None:
        """Compare the fleet's tag with the one that this machine has noted at its versions, or note it."""
        tag = self.by_ident[ROOT].record.tag.encode()
        if not self.local.entries and self.local.xattrs.get(_FLEET) != tag:
            self.local.note(_FLEET, tag)
        self.owns_versions = self.local.xattrs.get(_FLEET) == tag
        if not self.owns_versions:
            log.warning("/fleet/.versions of the mount has files of another fleet, or of a lost etcd: they are kept")

    async def apply(self, changes: Sequence[Change]) -> None:
        """Make the changes of complete transactions. If they are many, other tasks run between them."""
        new, places, gone = dict[str, tuple[NameRecord, int]](), dict[str, tuple[str, bytes]](), list[Item]()
        for number, change in enumerate(changes):
            if number % A_TURN == A_TURN - 1:
                await trio.lowlevel.cancel_shielded_checkpoint()
            text = None if change.value is None else change.value.decode(errors="replace")
            match self._keys.parts(change.key):
                case ["i", ident]:
                    item, record = self.by_ident.get(ident), record_of(change.value or b"")
                    if change.value is None:
                        gone += [item] if item is not None and item.ident != ROOT else []
                    elif record is None:
                        log.warning("fleet: %s is no record of this release", change.key)
                    elif item is None:
                        new[ident] = record, change.revision
                    else:
                        self._update(item, record, change.revision)
                case ["n", parent, quoted_name] if text is not None and (name := name_of(quoted_name)):
                    if text != ROOT and (parent != ROOT or not is_reserved(name)):
                        places[text] = parent, name
                case ["w", ident]:
                    self._set_right(ident, text, change.revision)
                case ["d"]:
                    self.moves = change.revision
        await self._place(places, new, gone)
        for item in gone:
            self._forget(item)
        for change in changes:
            match self._keys.parts(change.key):
                case ["w", ident] if change.value is not None and (item := self.by_ident.get(ident)) is not None:
                    self._note_right(item)

    async def _place(
        self, places: dict[str, tuple[str, bytes]], new: Mapping[str, tuple[NameRecord, int]], gone: list[Item]
    ) -> None:
        """Give inodes their places. Inodes that move or go leave their old places first, so all places are free."""
        tree = self._tree
        moving = [self.by_ident[ident] for ident in places if ident in self.by_ident and not self._is_at(ident, places)]
        for item in (*moving, *gone):
            if item.inode.names:
                ((number, name),) = item.inode.names
                tree.rename(tree.get(number), name, self.root, MOVING + item.ident.encode())
        children = defaultdict[str, list[str]](list)
        for ident, (parent, _) in places.items():
            children[parent].append(ident)
        pending = [ident for ident, (parent, _) in places.items() if parent not in places]
        num_put = 0
        while pending:
            num_put += 1
            if num_put % A_TURN == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
            ident = pending.pop()
            pending += children.get(ident, ())
            directory = self.by_ident.get(places[ident][0])
            if directory is not None:
                self._put(directory.inode, places[ident][1], ident, new)
        for item in reversed(gone):
            for number, name in tuple(item.inode.names):
                remove = tree.rmdir if item.inode.is_directory else tree.unlink
                remove(tree.get(number), name)

    def _put(self, directory: Inode, name: bytes, ident: str, new: Mapping[str, tuple[NameRecord, int]]) -> None:
        item, tree = self.by_ident.get(ident), self._tree
        if item is not None and item.inode.names:
            ((number, old),) = item.inode.names
            if (number, old) != (directory.number, name):
                tree.rename(tree.get(number), old, directory, name)
        elif ident in new:
            record, revision = new[ident]
            owner = {"mode": record.mode, "uid": record.uid, "gid": record.gid}
            if record.type == "file":
                inode = self._fs.volume.make_plain(directory, name, **owner)
            else:
                inode = tree.make(directory, name, record.file_type, target=unquoted(record.target), **owner)
            inode.mode, inode.gid = record.mode, record.gid  # whatever the directory's setgid bit has added
            self.show(self.add(ident, inode, record, revision))

    def _is_at(self, ident: str, places: Mapping[str, tuple[str, bytes]]) -> bool:
        parent, name = places[ident]
        directory = self.by_ident.get(parent)
        return directory is not None and (directory.inode.number, name) in self.by_ident[ident].inode.names

    def add(self, ident: str, inode: Inode, record: NameRecord, revision: int) -> Item:
        item = self.by_ident[ident] = self.by_number[inode.number] = Item(ident, inode, record, revision)
        return item

    def _forget(self, item: Item) -> None:
        del self.by_ident[item.ident], self.by_number[item.inode.number]
        self._versions.drop(item.ident, item.record.tag)

    def _update(self, item: Item, record: NameRecord, revision: int) -> None:
        """Take a record that a machine has written. The machine that may write has the newest content already."""
        if revision <= item.revision:
            return
        inode, old = item.inode, item.record
        item.record, item.revision = record, revision
        inode.mode, inode.gid = record.mode, record.gid
        self._fs.volume.change_owner(inode, record.uid)
        inode.changed()
        if record.tag != old.tag:
            if not item.right:
                self.show(item)
            self._versions.drop(item.ident, old.tag)

    def show(self, item: Item) -> None:
        """Show the version of the record, which an open brings here."""
        record, volume, content = item.record, self._fs.volume, item.inode.content
        is_own = isinstance(content, KvFile) and item.synced != (content, content.changes)
        if is_own or (isinstance(content, PlainFile) and content.size):
            item.num_lost += 1
        if record.size:
            volume.show_elsewhere(item.inode, record.num_entries, record.size)
        elif item.inode.file_type == stat.S_IFREG:
            volume.truncate(item.inode, 0)
        self.set_times(item)

    def set_times(self, item: Item) -> None:
        if item.record.mtime_ns:
            item.inode.mtime_ns = item.record.mtime_ns

    def _set_right(self, ident: str, machine: str | None, revision: int) -> None:
        item = self.by_ident.get(ident)
        if machine is not None:
            self.writing[ident] = machine
        else:
            self.writing.pop(ident, None)
        if item is not None and revision > item.right:
            item.right = 0
