"""Names and pages together: the content of every inode, and its changes.

The gate's calls (`kvfs.fs`) and the mount (`kvfs.mount.handlers`) both use this module. A regular file is plain or KV,
and can become the other. A plain file whose bytes are a whole image becomes a KV file (`finish_import`). An empty plain
file becomes a fork (`fork_into`). A KV file that is truncated to nothing becomes an empty plain file.

Owned by the daemon's trio thread. Only two methods wait: `room_for_import`, and `close`, which waits for the disk.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvfs._pages import ffi, lib
from kvfs.base.alarms import Alarms
from kvfs.images.format import ImageFormat
from kvfs.images.header import ByteSource, ImagePlan, parse_header
from kvfs.images.importer import ImageImport, Survey, num_pages_to_take, survey
from kvfs.images.model_facts import ModelFacts, mismatch
from kvfs.images.snapshot import Snapshot
from kvfs.names.content import OWN, Content, Elsewhere, KvFile, Marks
from kvfs.names.disk import Disk
from kvfs.names.domains import Domains
from kvfs.names.inode import NOT_KEPT, Changes, Inode
from kvfs.names.locks import FileLocks
from kvfs.names.plain import PlainFile, backing_name
from kvfs.names.removals import Descriptor, Removals
from kvfs.names.retention import FileAdvice
from kvfs.names.tree import Tree, domain_below
from kvfs.pages.accounts import Account
from kvfs.pages.assemble import Assembly, SourceRanges
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ROW, PagePool, pages_for
from kvfs.pages.table import PageTable, Reservation
from kvfs.pages.turns import turns_within
from kvfs.tiers.pager import Pager
from kvfs.tiers.tickets import Engine, NoEngine, NoPressure, Pressure
from kvfs.volume.expiry import Expiry
from kvfs.volume.heat import Heat
from kvfs.volume.pins import Pins
from kvfs.volume.served import Served, Serving
from kvfs.volume.storage import InMemory, Storage
from libsym.errors import Busy, Invalid, IsDirectory, NotSupported, OverQuota, SymError

log = logging.getLogger(__name__)

MAX_FILES = 1 << 31
"""The number of inodes that `df -i` shows. Only memory limits the number of files."""

QUOTA_BLOCK_BYTES = 512
"""Block size that `df` uses in a domain. Elsewhere a block is a page, so that sizes are whole numbers of blocks."""

DIRECTORY_BYTES = 4096
"""Size that `stat` shows for each directory: a constant without a meaning."""


@dataclass(frozen=True, slots=True)
class VolumeStatistics:
    """Figures of `df`: room in the pool, and numbers of files."""

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
    """Figures of statfs(2), of the pool or of a domain."""

    block_bytes: int
    num_bytes: int
    free_bytes: int
    available_bytes: int
    """Free bytes within all limits: the quotas around the domain, the pool, and the disk."""
    num_files: int
    free_files: int


class Volume:
    """A tree over a pool. Backing files of plain files lie in `backing_dir`, which belongs to the volume alone."""

    def __init__(
        self,
        pool: PagePool,
        model: ModelFacts,
        backing_dir: Path,
        uid: int,
        gid: int,
        disk: Disk | None = None,
        *,
        changes: Changes = NOT_KEPT,
        bits: str = "",
        same_bits: bool = False,
        root_mode: int = 0o755,
        engine: Callable[[], Engine] = NoEngine,
        pressure: Callable[[], Pressure] = NoPressure,
        more: Sequence[Serving] = (),
    ) -> None:
        """`pool` and `model` are those of the default model. `more` has the other served models, whose pools have the
        same accounts.

        `changes` is told of everything that has to be kept. `root_mode` is the root's mode until a user changes it.

        `bits` describes what determines the bits of computed numbers, apart from the model. With `same_bits`, a file
        with entries that were computed with other `bits` is not opened. `engine`, `pressure`: see `kvfs.tiers.tickets`.
        """
        self.pool = pool
        self.model = model
        self.image_format = ImageFormat(model)
        self._formats: dict[int, ImageFormat] = {}
        """Formats of images of models that are not served, by identity."""
        self.storage: Storage = InMemory()
        """The storage that keeps the tree."""
        self.bits = bits
        self._same_bits = same_bits
        self.tree = Tree(
            pool.accounts,
            uid,
            gid,
            self._discard,
            root_mode,
            self._note_idle,
            changes,
            self._require_room,
            self._require_noted,
        )
        self.alarms = Alarms()
        """Alarms of the tree. A task has to `run` them."""
        self._expiry = Expiry(self.tree, self.alarms)
        self.served = tuple(
            Served(
                facts,
                ImageFormat(facts),
                pages,
                Pager(pages, computes, pressure, see=lambda core: self.see(core)[1].table),
                computes,
            )
            for pages, facts, computes in (Serving(pool, model, engine), *more)
        )
        """The served models. The first one is the default."""
        self._of_pool = {each.pool: each for each in self.served}
        self._of_core = {_address(each.pool.core): each for each in self.served}
        assert all(each.pool.accounts is pool.accounts for each in self.served), "pools have different accounts"
        self.pager = self.served[0].pager
        """The pager of the default model. A pager decides which pages are in memory."""
        self.heat = Heat(used=self._used)
        """How much each file was used in the last minutes."""
        self.domains = Domains(self.tree, pool.accounts)
        self.locks = FileLocks()
        self.pins = Pins(self.pager_of, pool.accounts, self.alarms, self._unpin)
        """Files that stay in memory by advice."""
        self.backing_dir = backing_dir
        self.disk = disk or Disk()
        """The disk that `backing_dir` is on."""
        self.removals = Removals(self.disk)
        """Removals of backing files that are not needed any longer."""
        self.num_backing_files = 0
        """Serial number in the name of the newest backing file."""
        self._plain_io: dict[str, Any] = {"disk": self.disk, "removals": self.removals, "remove": self._let_go}
        self._let_go_files: dict[str, tuple[Path, Descriptor | None]] = {}
        self._kv_files: set[KvFile] = set()
        self._snapshots: set[Snapshot] = set()
        self._imports: dict[ImageImport, PlainFile] = {}
        self._assemblies: set[Assembly | ImageImport] = set()
        self._changing: set[PlainFile] = set()  # files that are charged for their future size
        backing_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    # Content

    def make_plain(self, directory: Inode, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        """Make an empty plain file under a new name."""
        inode = self.tree.make(directory, name, stat.S_IFREG, mode=mode, uid=uid, gid=gid)
        inode.content = self._plain(inode)
        return inode

    def new_kv(self, table: PageTable, identity: int = OWN, marks: Marks = ()) -> KvFile:
        """Make the first version of a KV file, with one user."""
        return self._added(KvFile(table, identity, marks))

    def _added(self, kv: KvFile) -> KvFile:
        if kv.identity == OWN:
            self.pager_of(kv.table).add(kv.table)
        self._kv_files.add(kv)
        return kv

    def release_kv(self, kv: KvFile) -> None:
        """Remove a user of a version. The removal of the last user frees the version's pages."""
        if kv.users == 1 and kv.identity == OWN:
            self.of(kv.table).files.pop(kv.table.row, None)
            self.pager_of(kv.table).remove(kv.table)
        if kv.release():
            self._kv_files.remove(kv)

    def add_format(self, identity: int, facts: ModelFacts) -> None:
        """Add the format of pages of another model, or of another precision."""
        self._formats[identity] = ImageFormat(facts)

    def of(self, table: PageTable) -> Served:
        """Return the served model that a table's file belongs to."""
        return self._of_pool[table.pool]

    def pager_of(self, table: PageTable | Assembly) -> Pager:
        """Return the pager of a file's pages."""
        return self._of_pool[table.pool].pager

    def parse_image(self, source: ByteSource) -> ImagePlan:
        """Check the header of an image of any served model. Invalid: no served model can use the image. The message is
        that of the default model.
        """
        refusal: Invalid | None = None
        for each in self.served:
            try:
                return parse_header(each.image_format, source)
            except Invalid as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def of_plan(self, plan: ImagePlan) -> Served:
        """Return the served model whose image was parsed."""
        return next(each for each in self.served if each.facts is plan.image_format.facts)

    def format_of(self, kv: KvFile) -> ImageFormat:
        """Return the format of a file's images."""
        return self.of(kv.table).image_format if kv.identity == OWN else self._formats[kv.identity]

    def model_of(self, kv: KvFile) -> ModelFacts:
        """Return the facts of the model that computed a file's entries. The daemon need not serve that model."""
        return self.format_of(kv).facts

    def require_usable(self, kv: KvFile, what: object) -> None:
        """Raise Invalid unless the running model can use the file's entries."""
        if kv.identity != OWN:
            raise mismatch(self.model_of(kv), self.model, what)
        if self._same_bits and (other := kv.num_other_bits(self.bits)):
            raise Invalid(
                f"{what}: its first {other} entries were computed by {kv.marks[0][0]}, this daemon is {self.bits} and "
                "was started with --same-bits: start it without, or compute the file anew"
            )

    def size_of(self, inode: Inode) -> int:
        """Return the size that `stat` shows. A KV file has the size of its image."""
        if isinstance(inode.content, KvFile):
            return self.image_bytes(inode.content)
        if isinstance(inode.content, PlainFile | Elsewhere):
            return inode.content.size
        return DIRECTORY_BYTES if inode.is_directory else len(inode.target)

    def image_bytes(self, kv: KvFile) -> int:
        """Return the size of the image of a version."""
        return self.format_of(kv).image_bytes(kv.table.length)

    def truncate(self, inode: Inode, size: int) -> None:
        """Truncate a file if that needs no disk. A KV file keeps the entries whose image fits.

        Size 0 is possible for any file: the file gets a new, empty plain file as content, so that no call has to wait
        for changes that are under way in the old content.
        """
        content = inode.content
        if inode.is_directory:
            raise IsDirectory(f"{self.tree.path_of(inode)} is a directory")
        if content is None:
            raise Invalid(f"{self.tree.path_of(inode)} is not a regular file")
        if size == 0:
            if not isinstance(content, PlainFile) or content.size or content.changes or content.is_lost:
                empty = self._plain(inode)
                empty.is_tried = True  # else names could wait for ever, one sync for each time the file is emptied
                self._replace(inode, empty)
        else:
            assert isinstance(content, KvFile), "a plain file's bytes are cut by a worker: see kvfs.mount.disk_work"
            num_entries = self.format_of(content).entries_for(size)
            self.truncate_kv(content, min(num_entries, content.table.length), self.tree.path_of(inode))
        inode.modified()

    def truncate_kv(self, kv: KvFile, num_entries: int, what: object) -> None:
        """Keep the first entries of one version."""
        if kv.table.reservation is not None:
            raise Busy(f"{what}: a step is appending to it; try again when it is over")
        kv.lost = 0
        if num_entries != kv.table.length:
            gone = kv.table.pages[pages_for(num_entries) :].copy()
            kv.cut(num_entries)
            self.pager_of(kv.table).was_cut(kv.table, gone)

    def empty_kv(self, inode: Inode) -> None:
        """Give a KV file a new, empty version. Handles on the old version keep the old version."""
        assert isinstance(inode.content, KvFile)
        self._replace(inode, self.new_kv(PageTable(inode.content.table.pool, _payer(inode))))
        inode.modified()

    def fork(self, origin: Inode, source: KvFile, owner: int, snapshot: Snapshot | None = None) -> KvFile:
        """Fork `source`, a version of `origin`. With `snapshot`, fork this reader's view of `source`: see
        `KvFile.fork`.
        """
        fork = self._added(source.fork(origin.number, owner, snapshot))
        self.pager_of(source.table).forked(source.table)
        return fork

    def fork_into(self, snapshot: Snapshot, origin: Inode, source: KvFile, inode: Inode) -> None:
        """Make the empty plain file `inode` a fork of `snapshot`, a reader's view of `source`, or raise OverQuota."""
        assert isinstance(inode.content, PlainFile)
        assert inode.content.size == 0
        fork = self.fork(origin, source, _payer(inode), snapshot)
        self._replace(inode, fork)
        self.heat.note(inode, fork)
        inode.modified()

    def show_elsewhere(self, inode: Inode, num_entries: int, size: int) -> None:
        """Replace a file's content by a version that other machines have. Handles keep the old version."""
        self._replace(inode, Elsewhere(num_entries, size))

    def show_fork(self, inode: Inode, origin: Inode, source: KvFile) -> KvFile:
        """Replace a file's content by a fork of `source`, a version of `origin`, or raise OverQuota."""
        fork = self.fork(origin, source, _payer(inode))
        self._replace(inode, fork)
        return fork

    async def sync(self, inode: Inode) -> None:
        """Return when the file would survive a power cut. A file with a shared name is then on other machines, too."""
        shared = self.tree.agreement
        if shared is not None and shared.knows(inode):
            await shared.sync(inode)
        else:
            await self.storage.sync(inode)

    async def sync_all(self) -> None:
        """Sync all files."""
        await self.storage.sync_all()
        if self.tree.agreement is not None:
            await self.tree.agreement.sync_all()

    def change_owner(self, inode: Inode, uid: int) -> None:
        """Give a file to another uid. The file's charge moves, too, unless a domain pays for the file. OverQuota:
        nothing has changed.
        """
        old = inode.account
        if old is not None and not old.is_domain and uid != inode.uid:
            self._charge_another(inode, old, self.pool.accounts.of(uid))
        if uid != inode.uid:
            self.heat.forget(inode)
        inode.uid = uid
        if isinstance(inode.content, KvFile):
            inode.content.table.is_of(inode.number, uid)
        inode.note_change()

    def advise(self, inode: Inode, advice: FileAdvice) -> None:
        """Set the advice on a file. The TTL begins anew. NoSpace, OverQuota: too much is pinned already."""
        shared = self.tree.agreement
        if advice.ttl_ms and shared is not None and shared.knows(inode):
            raise NotSupported(f"{self.tree.path_of(inode)}: a file of the fleet can't expire")
        self.pins.note(inode, inode.advice, advice)
        inode.advice = advice
        self._note_priority(inode)
        inode.changed()
        self._expiry.note_use(inode)

    def show(self, inode: Inode, kv: KvFile) -> None:
        """Make a version the content of a file, and apply the file's advice to it."""
        self.show_restored(inode, kv)
        if inode.advice.is_pinned:
            self.resume_pin(inode)

    def show_restored(self, inode: Inode, kv: KvFile) -> None:
        """Make a version the content of a file without pinning it, because no page is in memory yet."""
        inode.content = kv
        kv.table.is_of(inode.number, inode.uid)
        row = kv.table.row
        if row != NO_ROW:
            of = self.of(kv.table)
            of.files[row] = inode, kv
            of.pager.residents.priority[row] = inode.advice.priority

    def see(self, core: Any) -> tuple[Inode, KvFile]:
        """Return the file of a core table that has a row. If Python has no objects for a branch yet, they are made."""
        of = self._of_core[_address(core.pool)]
        found = of.files.get(core.row)
        if found is not None:
            return found
        table = PageTable(of.pool, core.account.number, arena=core.arena, core=core)
        inode, kv = self.tree.see(table), KvFile.of_branch(table)
        of.pager.residents.has(table)
        self._kv_files.add(kv)
        self.show(inode, kv)
        if core.is_reserved:
            table.reservation = Reservation(table)
        if core.stay:
            of.engine().adopt(core)
        return inode, kv

    def see_all(self) -> None:
        """Make the Python objects of all branches."""
        for each in self.served:
            core = ffi.NULL
            while core := lib.core_next_branch(each.pool.core, core):
                self.see(core)

    def _used(self) -> Iterator[tuple[Inode, KvFile]]:
        """Return the files that the core has used since the last call."""
        for each in self.served:
            core, each.pool.core.used = each.pool.core.used, ffi.NULL
            while core:
                core.is_used = False
                if (found := each.files.get(core.row)) is not None:
                    yield found
                core = core.next_used

    def resume_pin(self, inode: Inode) -> None:
        """Pin a file again after its pages have changed, or while they are not in memory yet. If it can't be pinned,
        log a warning.
        """
        try:
            self.pins.note(inode, inode.advice, inode.advice)
        except SymError as error:
            path = str(self.tree.path_of(inode))
            log.warning("%s is pinned, and may leave memory all the same: %s", path, error, extra={"file": path})

    def file_of(self, table: PageTable) -> tuple[Inode, KvFile] | None:
        """Return the file that a table belongs to. None: the file is gone, or belongs to another model."""
        return self.of(table).files.get(table.row)

    def file_in(self, pool: Any, row: int) -> tuple[Inode, KvFile] | tuple[None, None]:
        """Return the file in a row of a `core_pool`. None: only the core has the file, or it is not shown yet."""
        return self._of_core[_address(pool)].files.get(row, (None, None))

    def has_kv(self, number: int) -> bool:
        """Whether the inode exists and is a KV file."""
        return number in self.tree and isinstance(self.tree.get(number).content, KvFile)

    def _note_priority(self, inode: Inode) -> None:
        kv = inode.content
        if isinstance(kv, KvFile) and kv.table.row != NO_ROW:
            self.pager_of(kv.table).residents.priority[kv.table.row] = inode.advice.priority

    def _unpin(self, inode: Inode) -> None:
        """End a pin whose lease is over."""
        self.advise(inode, replace(inode.advice, lease_end_s=None))

    def existing_plain(self, inode: Inode, number: int, size: int) -> PlainFile:
        """Return the content of a kept plain file. `number` below 0: the file has no backing file."""
        if number < 0:
            return self._plain(inode)
        return PlainFile.existing(self.backing_dir, backing_name(inode.number, number), size, **self._plain_io)

    def _let_go(self, path: Path, descriptor: Descriptor | None) -> None:
        """Remove an unused backing file. If the index still names the file, wait for the commit that drops the name."""
        if self.storage.needs_backing(path.name):
            self._let_go_files[path.name] = path, descriptor
        else:
            self.removals.remove(path, descriptor)

    def forget_backing(self, name: str) -> None:
        """Remove a backing file that is no longer needed, because the index no longer names it."""
        found = self._let_go_files.pop(name, None)
        if found is not None:
            self.removals.remove(*found)

    def resume_expiry(self, inode: Inode) -> None:
        """Set the alarm for the rest of a restored file's TTL."""
        self._expiry.resume(inode)

    def _require_room(self, num_bytes: int) -> None:
        self.storage.require_room(num_bytes)

    def _require_noted(self, num_bytes: int) -> None:
        self.storage.require_noted(num_bytes)

    def _note_idle(self, inode: Inode) -> None:
        self._expiry.note_use(inode)

    def _charge_another(self, inode: Inode, old: Account, new: Account) -> None:
        plain_bytes = inode.content.charged if isinstance(inode.content, PlainFile) else 0
        num_files, other_bytes = inode.num_files, inode.other_bytes + plain_bytes
        new.require_files(num_files, other_bytes)
        new.charge_files(num_files)
        new.charge_bytes(other_bytes)
        try:
            if inode.domain is not None:
                new.adopt(inode.domain)
            elif isinstance(inode.content, KvFile):
                inode.content.table.change_owner(new.number)
        except OverQuota:
            new.charge_files(-num_files)
            new.charge_bytes(-other_bytes)
            raise
        old.charge_files(-num_files)
        old.charge_bytes(-other_bytes)
        self.tree.charged_to(inode, new)

    def _plain(self, inode: Inode) -> PlainFile:
        """Make a plain file. Its backing file's name is new for the inode, because an older backing file may remain for
        a while.
        """
        self.num_backing_files += 1
        return PlainFile(self.backing_dir, backing_name(inode.number, self.num_backing_files), **self._plain_io)

    @contextmanager
    def charged_for(self, inode: Inode, content: PlainFile, size: int) -> Iterator[None]:
        """Charge a plain file for a size while the file grows to this size, or raise OverQuota. Then charge its real
        size.

        The end may come long after the caller has stopped waiting: the disk may still answer a call that is overdue. If
        the content was replaced meanwhile, its charge is already gone. A file may have one such change at a time.
        """
        growth = max(size, content.size) - content.charged
        if growth > 0:
            _account(inode).require_bytes(growth)
            self.storage.require_room(growth)
        self._charge(inode, content, content.charged + growth)
        self._changing.add(content)
        try:
            yield
        finally:
            self._is_changed(inode, content)

    def _is_changed(self, inode: Inode, content: PlainFile) -> None:
        if content in self._changing:
            self._changing.remove(content)
            self._charge(inode, content, content.size)

    def _charge(self, inode: Inode, content: PlainFile, num_bytes: int) -> None:
        if num_bytes != content.charged:
            _account(inode).charge_bytes(num_bytes - content.charged)
            content.charged = num_bytes

    def _replace(self, inode: Inode, content: Content) -> None:
        self._give_up_content(inode)
        if isinstance(content, KvFile):
            self.show(inode, content)
        else:
            inode.content = content
        inode.note_change()

    def _discard(self, inode: Inode) -> None:
        """Discard the content of an inode without names and users."""
        self._expiry.forget(inode)
        self.heat.forget(inode)
        self._give_up_content(inode)
        self.pins.forget(inode)

    def _give_up_content(self, inode: Inode) -> None:
        content, inode.content = inode.content, None
        if isinstance(content, KvFile):
            self.pins.content_goes(inode, content)
            if inode.names:
                content.table.name_gone()
            self.release_kv(content)
        elif isinstance(content, PlainFile):
            self._changing.discard(content)
            self._charge(inode, content, 0)
            content.discard()

    # Images

    def open_snapshot(self, kv: KvFile) -> Snapshot:
        """Return a reader's view of the present image."""
        kv.hits += 1
        return self.hold(kv)

    def hold(self, kv: KvFile) -> Snapshot:
        """Keep the present pages of a file until `close_snapshot`."""
        snapshot = Snapshot(kv.table, self.format_of(kv), turns_within(kv.turns, kv.table.length))
        self._snapshots.add(snapshot)
        return snapshot

    def close_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        snapshot.close()

    async def room_for_import(self, plan: ImagePlan, inode: Inode, surveyed: Survey | None = None) -> IntArray:
        """Return frames for an import as soon as enough are free. The caller calls `begin_import` before it awaits
        anything.

        NoSpace: enough frames can't become free.
        """
        of = self.of_plan(plan)
        while True:
            owner, content = _payer(inode), inode.content
            assert isinstance(content, PlainFile)
            num_pages = num_pages_to_take(of.pool, plan, owner, surveyed)
            self._charge(inode, content, 0)
            try:
                of.pool.require_free(num_pages, owner)  # before `room`, which may evict pages
            finally:
                self._charge(inode, content, content.size)
            frames = await of.pager.room(num_pages, owner)
            if inode.content is content and num_pages == num_pages_to_take(of.pool, plan, owner, surveyed):
                return frames
            of.pool.return_frames(frames)
            if inode.content is not content:
                raise Busy(f"{self.tree.path_of(inode)} was emptied or removed while it was read")

    def begin_import(
        self, plan: ImagePlan, inode: Inode, surveyed: Survey | None = None, frames: IntArray | None = None
    ) -> ImageImport:
        """Allocate the pages that an image needs, or raise OverQuota or NoSpace. After such an error, the caller may
        survey the image and call this again. `frames` are used, or given back.

        From then on the import's own pages are charged, and the charge for the plain file's bytes is lowered by the
        same amount. So if the import fails, the file's room has not been given to other files.
        """
        content, pool = inode.content, self.of_plan(plan).pool
        assert isinstance(content, PlainFile)
        self._charge(inode, content, 0)
        try:
            incoming = ImageImport(pool, plan, _payer(inode), surveyed, frames)
        except BaseException:
            self._charge(inode, content, content.size)
            if frames is not None:
                pool.return_frames(frames)
            raise
        self._charge(inode, content, max(0, content.size - incoming.num_own_pages * pool.page_bytes))
        self._imports[incoming] = content
        self._changing.add(content)
        return incoming

    def survey_import(self, plan: ImagePlan, inode: Inode) -> Callable[..., Survey]:
        """Return a function for a worker, which finds the pages of an image that are already in the pool."""
        return partial(survey, self.of_plan(plan).pool, plan, _payer(inode))

    def abandon_import(self, incoming: ImageImport, inode: Inode) -> None:
        """End an import, and free its pages. The file may have been removed or emptied meanwhile."""
        content = self._imports.pop(incoming)
        incoming.abandon()
        self._is_changed(inode, content)

    def finish_import(self, incoming: ImageImport, inode: Inode) -> None:
        """Make the imported plain file a KV file. The file's times stay, because its bytes are the same."""
        content = self._imports.pop(incoming)
        assert content is inode.content
        self._charge(inode, content, 0)
        try:
            table = incoming.finish().hand_over(_payer(inode))  # the file may have changed its owner meanwhile
        except OverQuota:
            self._is_changed(inode, content)
            raise
        kv = self.new_kv(table)
        kv.is_arriving, kv.turns = True, incoming.plan.turns
        self.pager_of(table).filled(table)
        self._replace(inode, kv)
        self.heat.note(inode, kv)

    # Entries of other files and of peers

    def begin_assembly(self, owner: int, pieces: Sequence[SourceRanges], *, rebase: bool) -> Assembly:
        """Take references on the sources of a new file, as they are now. Invalid: they are of several models."""
        of = {self.of(piece.table): None for piece in pieces} or {self.served[0]: None}
        if len(of) > 1:
            raise Invalid(f"files of {' and '.join(each.facts.name for each in of)} can't be one: each has its own KV")
        (model,) = of
        assembly = Assembly(model.pool, owner, pieces, rebase=rebase, max_positions=model.facts.max_positions)
        self._assemblies.add(assembly)
        return assembly

    async def begin_fetch(self, plan: ImagePlan, owner: int, surveyed: Survey) -> ImageImport:
        """Begin the import of an image that is no file here, as soon as memory has room. The import ends as an assembly
        does.
        """
        of = self.of_plan(plan)
        while True:
            num_pages = num_pages_to_take(of.pool, plan, owner, surveyed)
            of.pool.require_free(num_pages, owner)  # before `room`, which may evict pages
            frames = await of.pager.room(num_pages, owner)
            if num_pages == num_pages_to_take(of.pool, plan, owner, surveyed):
                break
            of.pool.return_frames(frames)
        try:
            incoming = ImageImport(of.pool, plan, owner, surveyed, frames)
        except BaseException:
            of.pool.return_frames(frames)
            raise
        self._assemblies.add(incoming)
        return incoming

    def abandon_assembly(self, assembly: Assembly | ImageImport) -> None:
        self._assemblies.remove(assembly)
        assembly.abandon()

    def finish_assembly(self, assembly: Assembly | ImageImport) -> PageTable:
        self._assemblies.remove(assembly)
        return assembly.finish()

    def close(self) -> None:
        """Remove the backing files of a volume that is not kept. The wait for the disk has a time limit."""
        assert isinstance(self.storage, InMemory), "what is kept needs its backing files"
        for inode in self.tree:
            if isinstance(inode.content, PlainFile):
                self._give_up_content(inode)
        if not self.removals.wait(self.disk.deadline_s):
            log.warning("the disk under %s does not answer: backing files stay there", self.backing_dir)

    # The audit

    def statistics(self) -> VolumeStatistics:
        return VolumeStatistics(
            page_bytes=self.pool.page_bytes,
            num_pages=self.pool.num_pages,
            num_free_pages=self._num_free_pages(),
            num_files=len(self.tree),
            num_names=self.tree.num_names,
        )

    def _num_free_pages(self) -> int:
        """Return the number of pages for which there is room. Plain files and other models' pages share the disk."""
        num_slots = self.storage.num_free_slots()
        return (
            self.pool.num_free if num_slots is None else min(self.pool.num_free, self.pool.store.free.count + num_slots)
        )

    def space_around(self, inode: Inode) -> Space:
        """Return the figures of statfs(2) for the place of an inode, or for a directory itself."""
        now = self.statistics()
        around = domain_below(inode)
        domains = () if around is None else tuple(each for each in around.chain() if each.is_domain)
        free = available = now.free_bytes
        num_slots = self.storage.num_free_slots()
        if num_slots is not None:  # pages that fit only into memory could not be written to disk
            available = min(available, num_slots * now.page_bytes)
        block_bytes, num_bytes = now.page_bytes, now.capacity_bytes
        num_files, free_files = MAX_FILES, MAX_FILES - now.num_files
        for each in reversed(domains):  # the figures show the innermost limit
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
        self.see_all()
        self.tree.check()
        self._expiry.check()
        plain = [(inode, inode.content) for inode in self.tree if isinstance(inode.content, PlainFile)]
        for inode, content in plain:
            is_right = content.charged == content.size or content in self._changing
            assert is_right, f"inode {inode.number} has {content.size} bytes, {content.charged} are charged"
        charged = [(_account(inode), content.charged) for inode, content in plain]
        charged += [(_account(inode), inode.other_bytes) for inode in self.tree]
        self.pool.accounts.check("other_bytes", charged)
        shown = {inode.content for inode in self.tree if isinstance(inode.content, KvFile)}
        assert shown <= self._kv_files, "an inode shows a version that was given back"
        tables = [kv.table for kv in self._kv_files]
        sources = [source for each in self._assemblies if isinstance(each, Assembly) for source in each.sources]
        holders: list[PageTable | Snapshot | ImageImport | Assembly]
        holders = [*tables, *sources, *self._snapshots, *self._imports, *self._assemblies]
        held = list[tuple[int, IntArray]]()
        for of in self.served:
            held += of.pool.held([each for each in holders if each.pool is of.pool], of.pager.held())
        self.pool.accounts.check_pages(held)
        self.storage.check()

    @property
    def num_kv_versions(self) -> int:
        """Number of versions of KV files that have a user, with or without a name."""
        return len(self._kv_files) + int(self.tree.core.num_branches)


def _address(pool: Any) -> int:
    """Return the address of a `core_pool`."""
    return int(ffi.cast("uintptr_t", pool))


def _account(inode: Inode) -> Account:
    """Return the account that is charged for an inode's content."""
    assert inode.account is not None, f"inode {inode.number} has no content any more"
    return inode.account


def _payer(inode: Inode) -> int:
    """Return the number of the account that is charged for an inode's content."""
    return _account(inode).number
