"""Names and pages together: what every inode's content is, and how it changes.

The gate's calls (`kvfs.fs`) and the mount (`kvfs.fuse`) both stand on this. A regular file is plain or KV and can
become the other: a plain file whose bytes are a whole image becomes a KV file (`finish_import`), an empty plain file
becomes a fork (`fork_into`), and a KV file that is truncated to nothing becomes an empty plain file.

Owned by the daemon's trio thread; nothing here awaits.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.accounts import Account
from kvfs.advice import FileAdvice
from kvfs.alarms import Alarms
from kvfs.assemble import Assembly, Piece
from kvfs.content import KvFile
from kvfs.domains import Domains
from kvfs.expiry import Expiry
from kvfs.header import ImagePlan
from kvfs.image import ImageFormat
from kvfs.importer import ImageImport
from kvfs.inode import Inode
from kvfs.locks import FileLocks
from kvfs.pages import PagePool
from kvfs.plain import PlainFile
from kvfs.protocols import ModelFacts
from kvfs.snapshot import Snapshot
from kvfs.table import PageTable
from kvfs.tree import Tree
from libsym.errors import Busy, Invalid, IsDirectory

DIRECTORY_BYTES = 4096
"""What `stat` says of a directory's size; it means nothing."""


@dataclass(frozen=True, slots=True)
class VolumeStatistics:
    """The pool's room and the tree's population: what `df` shows."""

    page_bytes: int
    num_pages: int
    num_free_pages: int
    num_files: int
    """Inodes of any kind, the root included."""
    num_names: int

    @property
    def capacity_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        return self.num_free_pages * self.page_bytes


class Volume:
    """One tree over one pool. Backing files of plain files lie in `backing_dir`, which nobody else may use."""

    def __init__(self, pool: PagePool, model: ModelFacts, backing_dir: Path, uid: int, gid: int) -> None:
        self.pool = pool
        self.model = model
        self.image_format = ImageFormat(model)
        self.tree = Tree(pool.accounts, uid, gid, self._discard, idle=self._note_idle)
        self.alarms = Alarms()
        """What happens at a time; somebody has to `run` them."""
        self._expiry = Expiry(self.tree, self.alarms)
        self.domains = Domains(self.tree, pool.accounts)
        self.locks = FileLocks()
        self._backing_dir = backing_dir
        self._kv_files: set[KvFile] = set()
        self._snapshots: set[Snapshot] = set()
        self._imports: set[ImageImport] = set()
        self._assemblies: set[Assembly] = set()
        backing_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in backing_dir.glob("*.plain"):  # of a daemon that was killed; its names died with it
            leftover.unlink()

    # Content

    def make_plain(self, directory: Inode, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        """An empty plain file under a new name."""
        inode = self.tree.make(directory, name, stat.S_IFREG, mode=mode, uid=uid, gid=gid)
        inode.content = self._plain(inode)
        return inode

    def new_kv(self, table: PageTable) -> KvFile:
        """A KV file's first version, with one user."""
        kv = KvFile(table)
        self._kv_files.add(kv)
        return kv

    def release_kv(self, kv: KvFile) -> None:
        """One user of a version less; the last one frees its pages."""
        if kv.release():
            self._kv_files.remove(kv)

    def size_of(self, inode: Inode) -> int:
        """What `stat` says: an image's size for a KV file."""
        if isinstance(inode.content, KvFile):
            return self.image_format.image_bytes(inode.content.table.length)
        if isinstance(inode.content, PlainFile):
            return inode.content.size
        return DIRECTORY_BYTES if inode.is_directory else len(inode.target)

    def truncate(self, inode: Inode, size: int) -> None:
        """As `truncate(2)`. A KV file keeps the entries whose image fits; at 0 it becomes an empty plain file."""
        content = inode.content
        if inode.is_directory:
            raise IsDirectory(f"{self.tree.path_of(inode)} is a directory")
        if content is None:
            raise Invalid(f"{self.tree.path_of(inode)} is not a regular file")
        if isinstance(content, PlainFile):
            content.resize(size)
        elif size == 0:
            self._replace(inode, self._plain(inode))
        else:
            num_entries = self.image_format.entries_for(size)
            self.truncate_kv(content, min(num_entries, content.table.length), self.tree.path_of(inode))
        inode.modified()

    def truncate_kv(self, kv: KvFile, num_entries: int, what: str) -> None:
        """Keep the first entries of one version."""
        if kv.table.reservation is not None:
            raise Busy(f"{what}: a step is appending to it; try again when it is over")
        if num_entries != kv.table.length:
            kv.table.truncate(num_entries)
            kv.changes += 1
            kv.cuts += 1
            kv.fewest = min(kv.fewest, num_entries)

    def empty_kv(self, inode: Inode) -> None:
        """Give a KV file a new, empty version; whoever has the old one open keeps it."""
        assert isinstance(inode.content, KvFile)
        self._replace(inode, self.new_kv(PageTable(self.pool, _payer(inode))))
        inode.modified()

    def fork_into(self, snapshot: Snapshot, inode: Inode) -> None:
        """Make a plain file, which must be empty, a fork of what a reader sees, or raise OverQuota."""
        assert isinstance(inode.content, PlainFile)
        assert inode.content.size == 0
        owner = _payer(inode)
        pages = snapshot.held_pages().copy()
        self.pool.retain(pages, owner)
        table = PageTable.adopt(self.pool, owner, pages, snapshot.layout.num_entries)
        self._replace(inode, self.new_kv(table))
        inode.modified()

    def change_owner(self, inode: Inode, uid: int) -> None:
        """As `chown(2)`: the charge moves along, or OverQuota and nothing has changed. In a domain none moves."""
        old = inode.account
        if old is not None and not old.is_domain and uid != inode.uid:
            self._charge_another(inode, old, self.pool.accounts.of(uid))
        inode.uid = uid

    def advise(self, inode: Inode, advice: FileAdvice) -> None:
        """Set what is to become of a file; its TTL runs from now on."""
        inode.advice = advice
        inode.changed()
        self._expiry.note_use(inode)

    def _note_idle(self, inode: Inode) -> None:
        self._expiry.note_use(inode)

    def _charge_another(self, inode: Inode, old: Account, new: Account) -> None:
        new.require_files(1 if inode.domain is None else 1 + inode.domain.num_files)
        if inode.domain is not None:
            new.adopt(inode.domain)
        elif isinstance(inode.content, KvFile):
            inode.content.table.change_owner(new.number)
        old.refund_files()
        new.charge_files()
        inode.account = new

    def _plain(self, inode: Inode) -> PlainFile:
        return PlainFile(self._backing_dir, f"{inode.number}.plain")

    def _replace(self, inode: Inode, content: PlainFile | KvFile) -> None:
        old, inode.content = inode.content, content
        if isinstance(old, KvFile):
            self.release_kv(old)
        elif isinstance(old, PlainFile):
            old.discard()

    def _discard(self, inode: Inode) -> None:
        """Nothing leads to the inode's content any more."""
        self._expiry.forget(inode)
        content, inode.content = inode.content, None
        if isinstance(content, KvFile):
            self.release_kv(content)
        elif isinstance(content, PlainFile):
            content.discard()

    # Images

    def open_snapshot(self, kv: KvFile) -> Snapshot:
        """A reader's view of the image as it is now."""
        snapshot = Snapshot(kv.table, self.image_format)
        kv.hits += 1
        self._snapshots.add(snapshot)
        return snapshot

    def close_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        snapshot.close()

    def begin_import(self, plan: ImagePlan, inode: Inode) -> ImageImport:
        """Take the pages that an image needs, or OverQuota or NoSpace."""
        incoming = ImageImport(self.pool, plan, _payer(inode))
        self._imports.add(incoming)
        return incoming

    def abandon_import(self, incoming: ImageImport) -> None:
        self._imports.remove(incoming)
        incoming.abandon()

    def finish_import(self, incoming: ImageImport, inode: Inode) -> None:
        """Make the plain file that was imported a KV file. Its times stay: its bytes are the same."""
        self._imports.remove(incoming)
        table = incoming.finish().hand_over(_payer(inode))  # the file may have changed hands meanwhile
        self._replace(inode, self.new_kv(table))

    # Entries of other files

    def begin_assembly(self, owner: int, pieces: Sequence[Piece], *, rebase: bool) -> Assembly:
        """Hold the sources of a new file as they are now."""
        assembly = Assembly(self.pool, owner, pieces, rebase=rebase, max_positions=self.model.max_positions)
        self._assemblies.add(assembly)
        return assembly

    def abandon_assembly(self, assembly: Assembly) -> None:
        self._assemblies.remove(assembly)
        assembly.abandon()

    def finish_assembly(self, assembly: Assembly) -> PageTable:
        self._assemblies.remove(assembly)
        return assembly.finish()

    def close(self) -> None:
        """The daemon ends, and with it every name: remove the backing files."""
        for inode in self.tree:
            if isinstance(inode.content, PlainFile):
                inode.content.discard()

    # The books

    def statistics(self) -> VolumeStatistics:
        return VolumeStatistics(
            page_bytes=self.pool.page_bytes,
            num_pages=self.pool.num_pages,
            num_free_pages=self.pool.num_free,
            num_files=len(self.tree),
            num_names=self.tree.num_names,
        )

    def check(self) -> None:
        """Raise AssertionError unless names, versions and pages account for each other."""
        self.tree.check()
        self._expiry.check()
        shown = {inode.content for inode in self.tree if isinstance(inode.content, KvFile)}
        assert shown <= self._kv_files, "an inode shows a version that was given back"
        tables = [kv.table for kv in self._kv_files]
        sources = [source for assembly in self._assemblies for source in assembly.sources]
        self.pool.check(tables, sources, self._snapshots, self._imports, self._assemblies)

    @property
    def num_kv_versions(self) -> int:
        """Versions of KV files that have a user, named or not."""
        return len(self._kv_files)


def _payer(inode: Inode) -> int:
    """The number of the account that an inode's content is charged to."""
    assert inode.account is not None, f"inode {inode.number} has no content any more"
    return inode.account.number
