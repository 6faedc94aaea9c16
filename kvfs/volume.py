"""Names and pages together: what every inode's content is, and how it changes.

The gate's calls (`kvfs.fs`) and the mount (`kvfs.mount.handlers`) both stand on this. A regular file is plain or KV and
can become the other. A plain file whose bytes are a whole image becomes a KV file (`finish_import`); an empty plain
file becomes a fork (`fork_into`). A KV file that is truncated to nothing becomes an empty plain file.

Owned by the daemon's trio thread; nothing here awaits.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfs.alarms import Alarms
from kvfs.expiry import Expiry
from kvfs.images.format import ImageFormat
from kvfs.images.header import ImagePlan
from kvfs.images.importer import ImageImport, Survey, survey
from kvfs.images.model_facts import ModelFacts
from kvfs.images.snapshot import Snapshot
from kvfs.names.content import KvFile
from kvfs.names.domains import Domains
from kvfs.names.inode import Inode
from kvfs.names.locks import FileLocks
from kvfs.names.plain import PlainFile
from kvfs.names.retention import FileAdvice
from kvfs.names.tree import Tree, domain_below
from kvfs.pages.accounts import Account
from kvfs.pages.assemble import Assembly, Piece
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import Busy, Invalid, IsDirectory, OverQuota

MAX_FILES = 1 << 31
"""What `df -i` shows as the total: nothing here limits the number of files but memory."""

QUOTA_BLOCK_BYTES = 512
"""In which `df` counts in a domain; elsewhere a block is a page: so the sums come out exactly."""

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


@dataclass(frozen=True, slots=True)
class Space:
    """What statfs(2) says: of the pool, or of a domain."""

    block_bytes: int
    num_bytes: int
    free_bytes: int
    available_bytes: int
    """Of the free ones: those that quotas around the domain, and the pool, have left, too."""
    num_files: int
    free_files: int


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
        self._changing: set[PlainFile] = set()  # charged for what they are to become, not for what they are
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
            with self.charged_for(inode, content, size):
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
        elif isinstance(inode.content, PlainFile):
            new.require_plain(inode.content.charged)
            new.charge_plain(inode.content.charged)
            old.charge_plain(-inode.content.charged)
        old.refund_files()
        new.charge_files()
        inode.account = new

    def _plain(self, inode: Inode) -> PlainFile:
        return PlainFile(self._backing_dir, f"{inode.number}.plain")

    @contextmanager
    def charged_for(self, inode: Inode, content: PlainFile, size: int) -> Iterator[None]:
        """While a plain file is made so long, it is charged for it; or OverQuota before. Then for what it became."""
        growth = max(size, content.size) - content.charged
        if growth > 0:
            _account(inode).require_plain(growth)
        self._charge(inode, content, content.charged + growth)
        self._changing.add(content)
        try:
            yield
        finally:
            self._changing.discard(content)
            self._charge(inode, content, content.size)

    def _charge(self, inode: Inode, content: PlainFile, num_bytes: int) -> None:
        _account(inode).charge_plain(num_bytes - content.charged)
        content.charged = num_bytes

    def _replace(self, inode: Inode, content: PlainFile | KvFile) -> None:
        self._give_up_content(inode)
        inode.content = content

    def _discard(self, inode: Inode) -> None:
        """Nothing leads to the inode's content any more."""
        self._expiry.forget(inode)
        self._give_up_content(inode)

    def _give_up_content(self, inode: Inode) -> None:
        content, inode.content = inode.content, None
        if isinstance(content, KvFile):
            self.release_kv(content)
        elif isinstance(content, PlainFile):
            self._charge(inode, content, 0)
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

    def begin_import(self, plan: ImagePlan, inode: Inode, surveyed: Survey | None = None) -> ImageImport:
        """Take the pages that an image needs, or OverQuota or NoSpace; then it may be surveyed, and begun once more.

        From now on the import's own pages are charged in place of as many of the plain file's bytes. The rest of the
        bytes stay charged: should the import fail, the file needs no room that others could have taken meanwhile.
        """
        content = inode.content
        assert isinstance(content, PlainFile)
        self._charge(inode, content, 0)
        try:
            incoming = ImageImport(self.pool, plan, _payer(inode), surveyed)
        except BaseException:
            self._charge(inode, content, content.size)
            raise
        self._charge(inode, content, max(0, content.size - incoming.num_own_pages * self.pool.page_bytes))
        self._imports.add(incoming)
        self._changing.add(content)
        return incoming

    def survey_import(self, plan: ImagePlan, inode: Inode) -> Callable[..., Survey]:
        """For a worker, which gives it the source and a checkpoint: which pages of an image are there already."""
        return partial(survey, self.pool, plan, _payer(inode))

    def abandon_import(self, incoming: ImageImport, inode: Inode) -> None:
        self._imports.remove(incoming)
        incoming.abandon()
        self._stays_plain(inode)

    def _stays_plain(self, inode: Inode) -> None:
        content = inode.content
        assert isinstance(content, PlainFile)
        self._changing.remove(content)
        self._charge(inode, content, content.size)

    def finish_import(self, incoming: ImageImport, inode: Inode) -> None:
        """Make the plain file that was imported a KV file. Its times stay: its bytes are the same."""
        content = inode.content
        assert isinstance(content, PlainFile)
        self._imports.remove(incoming)
        self._charge(inode, content, 0)
        try:
            table = incoming.finish().hand_over(_payer(inode))  # the file may have changed hands meanwhile
        except OverQuota:
            self._stays_plain(inode)
            raise
        self._changing.remove(content)
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
                self._give_up_content(inode)

    # The books

    def statistics(self) -> VolumeStatistics:
        return VolumeStatistics(
            page_bytes=self.pool.page_bytes,
            num_pages=self.pool.num_pages,
            num_free_pages=self.pool.num_free,
            num_files=len(self.tree),
            num_names=self.tree.num_names,
        )

    def space_around(self, inode: Inode) -> Space:
        """What there is for what lies where the inode does, or in it."""
        now = self.statistics()
        around = domain_below(inode)
        domains = () if around is None else tuple(each for each in around.chain() if each.is_domain)
        free = available = now.free_bytes
        block_bytes, num_bytes = now.page_bytes, now.capacity_bytes
        num_files, free_files = MAX_FILES, MAX_FILES - now.num_files
        for each in reversed(domains):  # the innermost limit is the one that shows
            limits = each.limits
            if limits.num_bytes is not None:
                block_bytes, num_bytes = QUOTA_BLOCK_BYTES, limits.num_bytes
                free = max(0, num_bytes - each.num_bytes)
            if limits.num_files is not None:
                num_files, free_files = limits.num_files, max(0, limits.num_files - each.num_files)
        if around is not None and around.num_free_bytes is not None:
            available = min(available, around.num_free_bytes)
        return Space(block_bytes, num_bytes, free, available, num_files, free_files)

    def check(self) -> None:
        """Raise AssertionError unless names, versions and pages account for each other."""
        self.tree.check()
        self._expiry.check()
        plain = [(inode, inode.content) for inode in self.tree if isinstance(inode.content, PlainFile)]
        for inode, content in plain:
            is_right = content.charged == content.size or content in self._changing
            assert is_right, f"inode {inode.number} has {content.size} bytes, {content.charged} are charged"
        self.pool.accounts.check_plain((_account(inode), content.charged) for inode, content in plain)
        shown = {inode.content for inode in self.tree if isinstance(inode.content, KvFile)}
        assert shown <= self._kv_files, "an inode shows a version that was given back"
        tables = [kv.table for kv in self._kv_files]
        sources = [source for assembly in self._assemblies for source in assembly.sources]
        self.pool.check(tables, sources, self._snapshots, self._imports, self._assemblies)

    @property
    def num_kv_versions(self) -> int:
        """Versions of KV files that have a user, named or not."""
        return len(self._kv_files)


def _account(inode: Inode) -> Account:
    """The account that an inode's content is charged to."""
    assert inode.account is not None, f"inode {inode.number} has no content any more"
    return inode.account


def _payer(inode: Inode) -> int:
    """The number of that account."""
    return _account(inode).number
