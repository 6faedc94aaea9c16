"""The KV file system as programs' calls see it: paths and handles of LIPs.

Every call but `sync` is synchronous and atomic, and runs on the daemon's trio thread. Every call makes the checks that
the kernel makes on the mount, with the credentials that the kernel gave for the connection.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvfs.images.importer import ImageImport
from kvfs.images.model_facts import ModelFacts
from kvfs.names.content import Elsewhere, KvFile, Marks
from kvfs.names.disk import Disk
from kvfs.names.inode import (
    NOT_KEPT,
    READ,
    SEARCH,
    WRITE,
    Changes,
    Credentials,
    Inode,
    allows,
    mode_for_new,
    require,
    require_owner,
    require_removable,
)
from kvfs.names.locks import FileLocks
from kvfs.names.retention import advised, is_stored
from kvfs.names.tree import PathOf
from kvfs.names.walk import Paths, Place
from kvfs.pages.accounts import Account
from kvfs.pages.assemble import Assembly, Ranges, SourceRanges, ranges_within
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable, Reservation
from kvfs.tiers.tickets import Engine, NoEngine, NoPressure, Pressure
from kvfs.volume.served import Serving
from kvfs.volume.volume import Volume, VolumeStatistics
from libsym.abi import RANGE_END, Advice
from libsym.errors import (
    BadHandle,
    Busy,
    Exists,
    Invalid,
    IsDirectory,
    NoAccess,
    NotDirectory,
    NotFound,
    NotPermitted,
    NotSupported,
    SymError,
)

MAX_MERGED = 256
"""The most files in one merge. The reference on each file takes some microseconds of the trio thread."""
_WHOLE: Ranges = np.array([[0, RANGE_END]])


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The right to make a file with a name that does not exist yet. Only one of a user's programs has the right at a
    time.

    The claim is advisory, as locks are: programs can still make a file of that name in another way. A claim that never
    ends delays only those other users that chose to wait (`shared_key`), and only for a limited time.
    """

    place: Place
    uid: int

    @property
    def key(self) -> tuple[int, bytes, int]:
        """Key of the lock that claims of one user wait for."""
        return *self.shared_key, self.uid

    @property
    def shared_key(self) -> tuple[int, bytes]:
        """Key of the lock between claims of different users. A claim always takes this lock if it is free."""
        return self.place.directory.number, self.place.name


@dataclass(slots=True, eq=False, weakref_slot=True)
class OpenKv:
    """A LIP's handle on one version of a KV file. Later changes to the name do not affect the handle."""

    inode: Inode
    content: KvFile
    writable: bool
    origin: tuple[int, bytes] | None
    """The directory's number and the name that the file was opened by. None: the file is anonymous."""
    closed: bool = False
    claim: Claim | None = None
    """The claim for which this anonymous file is made. The file gets the claimed name when it is complete."""

    @property
    def table(self) -> PageTable:
        return self.content.table


class KvStat(NamedTuple):
    """Facts about a file, which are known without a read of it. None: only readers of the file may know this fact."""

    ino: int
    kind: str
    """kv, file, dir, link, fifo or socket."""
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    """Bytes of the image, for a KV file."""
    tokens: int
    pages: int
    exclusive_pages: int | None
    mtime_ns: int
    ctime_ns: int
    pinned: bool | None
    lease_s: float | None
    """Seconds until the lease ends. 0: the file is pinned for good, or not pinned."""
    ttl_s: float | None
    """Seconds from the file's last use until it expires. 0: never."""
    priority: int | None
    lost_tokens: int
    """Number of entries that were lost because they were not on disk when an earlier daemon ended."""
    tier: str | None
    """Where a KV file's pages are: memory, disk or mixed."""
    memory_pages: int | None
    other_bits: int
    """Length of the file up to the last entry that was computed by another instruction set or another kind of device.
    """
    turns: tuple[int, ...] | None
    """Lengths of the file before the last turns of its conversation, as far as they are known."""


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A name in a directory, as a listing shows it."""

    name: str
    kind: str
    size: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Books:
    """Counts of the audit. Free and referenced pages add up to all pages, and every reference has a holder."""

    num_pages: int
    num_free_pages: int
    num_referenced_pages: int
    num_references: int
    """References to pages by tables, readers, imports and calls under way. A page that forks share has several
    references.
    """
    num_versions: int
    """KV files that have a name or a handle."""
    num_files: int
    """Inodes of any kind."""
    num_locked_files: int


class FileSystem:
    """The file system that programs' calls use, by paths and handles. `volume` has the same files by inode, for the
    mount.
    """

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
        """For the arguments, see `Volume`."""
        self.volume = Volume(
            pool,
            model,
            backing_dir,
            uid,
            gid,
            disk,
            changes=changes,
            bits=bits,
            same_bits=same_bits,
            root_mode=root_mode,
            engine=engine,
            pressure=pressure,
            more=more,
        )
        self._tree = self.volume.tree
        self._paths = Paths(self._tree)
        self.claims = FileLocks()
        """Claims on names of files that are being made: each `Claim` by its `key` and its `shared_key`."""
        self._marks: WeakKeyDictionary[Assembly, Marks] = WeakKeyDictionary()
        """Marks of new files that are being assembled from entries with marks: see `KvFile.marks`."""

    @property
    def pool(self) -> PagePool:
        return self.volume.pool

    @property
    def mountpoint(self) -> PurePath | None:
        """The directory in which absolute paths must lie. None while the file system is not mounted."""
        return self._paths.mountpoint

    @mountpoint.setter
    def mountpoint(self, value: PurePath | None) -> None:
        self._paths.mountpoint = value

    def alias_mountpoint(self, *aliases: PurePath) -> None:
        """Accept absolute paths that begin with one of `aliases`: other paths of the mount, for example through a
        symbolic link.
        """
        self._paths.mount_aliases = aliases

    def confine(self, creds: Credentials, path: str) -> Credentials:
        """Return credentials that reach only one domain, which the caller owns."""
        directory = self._paths.resolve(creds, path)
        if not directory.is_directory:
            raise NotDirectory(f"{path} is not a directory")
        require_owner(directory, creds, path)
        if directory.domain is None:
            raise Invalid(f"{path} is no domain: make it one while it is empty, setfattr -n user.kv.quota -v 512M")
        return replace(creds, root=directory)

    def account_of(self, creds: Credentials) -> Account:
        """Return the account that pays for the caller's anonymous files."""
        if creds.root is None:
            return self.pool.accounts.of(creds.uid)
        if creds.root.domain is None:
            raise NotFound("the domain that this connection is confined to was removed")
        return creds.root.domain

    # Handles

    def kv_create(self, creds: Credentials, path: str | None, mode: int = 0o600, model: int = 0) -> OpenKv:
        """Make a new, empty KV file, open for writing. Without a path, the file is anonymous, and is freed when it is
        closed. `model`: the number of the model that the file belongs to.
        """
        _check_mode(mode)
        place = self._free_place(creds, path)
        return self._create(creds, place, mode, partial(self._new, model=model))

    def kv_open(self, creds: Credentials, path: str, *, write: bool) -> OpenKv:
        """Open an existing KV file. `write` needs read permission too: an append attends to existing entries."""
        inode = self._paths.resolve(creds, path)
        require(inode, creds, READ, path)
        if write:
            require(inode, creds, WRITE, path)
        if inode.is_directory:
            raise IsDirectory(f"{path} is a directory")
        self._tree.require_open(inode, writable=write)
        if not isinstance(inode.content, KvFile):
            raise Invalid(f"{path} is not a KV file: its bytes are no image of this model")
        self.volume.require_usable(inode.content, path)
        inode.content.used_by_program()
        self.volume.heat.note(inode, inode.content)
        return self._open(inode, inode.content, self._origin(creds, path, inode), writable=write)

    def kv_open_or_claim(
        self, creds: Credentials, path: str, *, write: bool, owner: int | None = None
    ) -> OpenKv | Claim:
        """Open a KV file, or return a claim on its name if it does not exist. The caller acquires the claim, and makes
        the file.

        NoAccess: the file belongs to neither the caller, nor root, nor `owner`. `owner` None: any owner is allowed.
        """
        try:
            file = self.kv_open(creds, path, write=write)
        except NotFound:
            place = self._free_place(creds, path)
            assert place is not None
            if self._tree.is_shared(place.directory):
                raise NotSupported(f"{path}: make the file elsewhere, and fork it to the fleet") from None
            return Claim(place, creds.uid)
        if owner is not None and file.inode.uid not in {0, creds.uid, owner}:
            self.kv_close(file)
            raise NoAccess(
                f"{path}: is a file of uid {file.inode.uid}, and you are uid {creds.uid}: remove it or choose another "
                f"name; if you trust what that user wrote, owner={file.inode.uid}"
            )
        return file

    def kv_create_claimed(self, creds: Credentials, claim: Claim, mode: int, model: int = 0) -> OpenKv:
        """Make an anonymous file, charged to the account that its claimed name implies. Closing the file releases the
        claim.
        """
        _check_mode(mode)
        payer = self._payer(creds, claim.place)
        file = self._create(creds, None, mode, partial(self._new, model=model), payer)
        file.claim = claim
        return file

    def kv_name(self, creds: Credentials, handle: OpenKv, *, write: bool) -> None:
        """Give a file its claimed name, which must still be free. From then on the handle is like a handle from
        `kv_open`.
        """
        self._require_open(handle)
        if handle.claim is None:
            raise Invalid(f"{self.name_of(handle)} has claimed no name, or was given it already")
        place = handle.claim.place
        require(place.directory, creds, WRITE | SEARCH, f"directory of {place.path}")
        self._tree.name(handle.inode, place.directory, place.name)
        handle.inode.mode = mode_for_new(place.directory, creds, handle.inode.mode)
        handle.origin = handle.claim.shared_key
        handle.writable = write
        self.volume.heat.note(handle.inode, handle.content)
        self._give_up_claim(handle)

    def kv_create_in(self, creds: Credentials, directory: Inode, name: bytes, mode: int) -> OpenKv:
        """Make a KV file in a directory that the mount has looked up. The kernel has checked permissions."""
        self._tree.require_free(directory, name)
        place = Place(directory, name, os.fsdecode(name), must_be_directory=False)
        return self._create(creds, place, mode, self._new)

    def kv_open_inode(self, inode: Inode, *, write: bool) -> OpenKv:
        """Open a KV file that the mount has looked up. The kernel has checked permissions."""
        self._tree.require_open(inode, writable=write)
        assert isinstance(inode.content, KvFile)
        self.volume.require_usable(inode.content, self._tree.path_of(inode))
        return self._open(inode, inode.content, None, writable=write)

    def kv_fork(
        self, creds: Credentials, source: OpenKv, path: str | None, mode: int = 0o600, *, is_ended: bool = False
    ) -> OpenKv:
        """Make a fork of the source's present entries, open for writing. Page numbers are copied, never pages.

        With `is_ended`, the fork lacks a turn whose answer is under way.
        """
        self._require_open(source)
        _check_mode(mode)
        place = self._free_place(creds, path)
        fork = self._create(creds, place, mode, partial(self.volume.fork, source.inode, source.content))
        source.content.used_by_program()
        self.volume.heat.note(source.inode, source.content)
        under_way = source.content.under_way
        if is_ended and under_way is not None and under_way.length < fork.table.length:
            self.kv_truncate(fork, under_way.length)
        return fork

    def begin_extract(
        self, creds: Credentials, source: OpenKv, ranges: Ranges, path: str | None, mode: int, *, rebase: bool
    ) -> Assembly:
        """Begin to make a new file from ranges of the source's entries. `finish_assembly` or `abandon_assembly` ends
        the work.
        """
        owner = self.check_new(creds, path, mode)
        return self._begin_assembly(owner, [source], [self._piece(source, ranges)], rebase=rebase)

    def begin_merge(
        self, creds: Credentials, sources: Sequence[OpenKv], path: str | None, mode: int, *, rebase: bool
    ) -> Assembly:
        """Begin to make a new file from all entries of the sources, one source after the other. The work ends as in
        `begin_extract`.
        """
        owner = self.check_new(creds, path, mode)
        if len(sources) > MAX_MERGED:
            raise Invalid(f"{len(sources)} files can't be merged at once: {MAX_MERGED} is the most, use several calls")
        pieces = [self._piece(source, _WHOLE) for source in sources]
        return self._begin_assembly(owner, sources, pieces, rebase=rebase)

    def _begin_assembly(
        self, owner: int, sources: Sequence[OpenKv], pieces: Sequence[SourceRanges], *, rebase: bool
    ) -> Assembly:
        assembly = self.volume.begin_assembly(owner, pieces, rebase=rebase)
        marked = [source.content for source in sources if source.content.num_other_bits(self.volume.bits)]
        if marked:
            self._marks[assembly] = marked[0].marks_of_part(assembly.num_entries)
        return assembly

    def finish_assembly(
        self, creds: Credentials, assembly: Assembly | ImageImport, path: str | None, mode: int
    ) -> OpenKv:
        """Give the new file its name, which must still be free, and open it for writing."""
        try:
            place = self._free_place(creds, path)
            file = self._create(
                creds,
                place,
                mode,
                lambda owner: self.volume.new_kv(self.volume.finish_assembly(assembly).hand_over(owner)),
            )
        except BaseException:
            if not assembly.closed:
                self.volume.abandon_assembly(assembly)
            raise
        if isinstance(assembly, Assembly):
            file.content.marks = self._marks.get(assembly, ())
        self.volume.pager_of(file.table).filled(file.table)
        return file

    def kv_close(self, handle: OpenKv) -> None:
        """Close a handle, and release its lock. The handle may have no open reservation."""
        self._require_open(handle)
        handle.closed = True
        if handle.content.under_way is not None and handle.content.under_way.by is handle:
            handle.content.under_way = None
        self.volume.locks.release(handle.inode.number, handle)
        self._give_up_claim(handle)
        if handle.writable and self._tree.agreement is not None:
            self._tree.agreement.end_writing(handle.inode)
        self.volume.pager_of(handle.table).closed(handle.table)
        self.volume.release_kv(handle.content)
        self._tree.closed(handle.inode)

    def reserve(
        self, handle: OpenKv, tokens: npt.ArrayLike, positions: npt.ArrayLike | None = None, num_ahead: int = 0
    ) -> Reservation:
        """Reserve room for new entries: see `PageTable.reserve`. The reservation ends with `abort`, or with commits,
        each followed by `committed(handle)`.
        """
        self._require_writable(handle)
        if handle.table.reservation is not None:
            raise Busy(f"{self.name_of(handle)}: another call is appending to it")
        return handle.table.reserve(tokens, positions, num_ahead)

    def committed(self, handle: OpenKv) -> None:
        """Note that a reservation of this handle was committed, so the file has changed."""
        self._changed(handle)
        handle.content.changes += 1
        self.volume.heat.note(handle.inode, handle.content)

    async def sync(self, handle: OpenKv) -> None:
        """Sync the file as `fsync(2)` does. NotSupported: the file can't outlive its handles."""
        self._require_open(handle)
        shared = self._tree.agreement
        if shared is not None and shared.knows(handle.inode) and handle.inode.content is not handle.content:
            raise SymError(f"{self.name_of(handle)}: a newer version has taken the place of the handle's", errno.ESTALE)
        if handle.inode.content is not handle.content:
            raise NotSupported(f"{self.name_of(handle)} was emptied or replaced: the handle's version has no name")
        if not handle.inode.names:
            raise NotSupported(
                f"{self.name_of(handle)} has no name: it goes with its last handle, and no disk can keep it; give it a "
                "name (kv_fork(kv, path)), and sync that"
            )
        await self.volume.sync(handle.inode)

    def kv_truncate(self, handle: OpenKv, num_entries: int) -> None:
        """Keep the first `num_entries` entries."""
        self._require_writable(handle)
        self.volume.truncate_kv(handle.content, num_entries, self.name_of(handle))
        self._changed(handle)

    def kv_remove_open(self, creds: Credentials, handle: OpenKv, path: str = "") -> None:
        """Remove the name that the handle was opened by. The handle stays valid until it is closed.

        `path` is the present name, as far as the caller knows. NotFound: the file has neither this name nor the name
        that it was opened by, or the name now has other content. In these cases another program has moved or replaced
        the file, perhaps to keep it. Without `path`, the file's only name is removed.
        """
        self._require_open(handle)
        if handle.origin is None:
            return  # an anonymous file has no name, and is freed when it is closed
        place = self._place_if_any(creds, path)
        if place is not None and place.inode is handle.inode:
            directory, name = place.directory, place.name
        elif path and handle.origin not in handle.inode.names:
            raise NotFound(f"{path}: the open file no longer has this name: remove it by the path that it has now")
        else:
            directory, name = self._current_name(handle, handle.origin)
        if handle.content is not handle.inode.content:
            raise NotFound(f"{self.name_of(handle)}: another program has replaced its content: remove it by its path")
        require_removable(directory, handle.inode, creds, os.fsdecode(name))
        self._tree.unlink(directory, name)

    # Names

    def kv_remove(self, creds: Credentials, path: str) -> None:
        """Remove a name, as `unlink(2)` does."""
        place = self._paths.place(creds, path)
        inode = place.existing()
        require_removable(place.directory, inode, creds, path)
        if inode.is_directory:
            raise IsDirectory(f"{path} is a directory")
        self._tree.unlink(place.directory, place.name)

    def kv_mkdir(self, creds: Credentials, path: str, mode: int) -> None:
        """Make a directory, as `mkdir(2)` does."""
        _check_mode(mode)
        place = self._paths.place(creds, path)
        if place.inode is not None:
            self._tree.require_fresh(place.directory)
            raise Exists(f"{path}: the name is taken; remove it first, or choose another")
        require(place.directory, creds, WRITE | SEARCH, f"directory of {path}")
        self._payer(creds, place)
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
        self._tree.make(place.directory, place.name, stat.S_IFDIR, mode=mode, uid=creds.uid, gid=creds.gid)

    def kv_rename(self, creds: Credentials, old: str, new: str) -> tuple[int, int, int]:
        """Move a name, replacing an existing name, as `rename(2)` does.

        Return the numbers of the moved inode, of the old directory and of the new directory. All are 0 if nothing was
        moved.
        """
        source, target = self._paths.place(creds, old), self._paths.place(creds, new)
        moved, replaced = source.existing(), target.inode
        require_removable(source.directory, moved, creds, old)
        require(target.directory, creds, WRITE | SEARCH, f"directory of {new}")
        if replaced is not None:
            require_removable(target.directory, replaced, creds, new)
        if target.must_be_directory and not moved.is_directory:
            raise NotDirectory(f"{new}: {old} is not a directory")
        if moved.is_directory and source.directory is not target.directory:
            require(moved, creds, WRITE, old)  # the `..` of the moved directory changes
        self._tree.rename(source.directory, source.name, target.directory, target.name)
        if replaced is moved:
            return 0, 0, 0  # two names of one file: rename(2) leaves both
        return moved.number, source.directory.number, target.directory.number

    def kv_chmod(self, creds: Credentials, path: str, mode: int) -> None:
        """Set the permission bits, as `chmod(2)` does."""
        inode = self._paths.resolve(creds, path)
        require_owner(inode, creds, path)
        _check_mode(mode)
        if creds.uid != 0 and not creds.in_group(inode.gid):
            mode &= ~stat.S_ISGID
        self._tree.require_mode(inode, mode, inode.uid, inode.gid)
        inode.mode = mode
        inode.changed()
        self._tree.is_moved(inode)

    def kv_advise(self, creds: Credentials, path: str, advice: Sequence[tuple[int, int]]) -> None:
        """Accept advice on a KV file: either all of it or none. A piece of advice is a pair of kind and value, see
        `kvfs.names.retention`.
        """
        inode = self._paths.resolve(creds, path)
        require(inode, creds, READ, path)
        self._advise(creds, inode, path, advice)

    def kv_advise_open(self, creds: Credentials, handle: OpenKv, advice: Sequence[tuple[int, int]]) -> None:
        """Accept advice on an open KV file, as `kv_advise` does."""
        self._require_open(handle)
        self._advise(creds, handle.inode, self.name_of(handle), advice, handle)

    def directory(self, creds: Credentials, path: str) -> Inode:
        """Return a directory that the caller may list. The empty path is the root."""
        directory = self._paths.resolve(creds, path or ".")
        if not directory.is_directory:
            raise NotDirectory(f"{path} is not a directory")
        require(directory, creds, READ, path)
        require(directory, creds, SEARCH, path)
        self._tree.require_fresh(directory)
        return directory

    def entry(self, name: bytes, inode: Inode) -> DirectoryEntry:
        """Return the facts of one name in a listing."""
        return DirectoryEntry(os.fsdecode(name), inode.kind, self.volume.size_of(inode), _num_tokens(inode))

    def kv_stat(self, creds: Credentials, path: str) -> KvStat:
        """Return facts as `stat(2)` does: symbolic links are followed. Facts that the mount shows as attributes need
        read permission, as on the mount.
        """
        inode = self._paths.resolve(creds, path)
        found = self._stat(inode, inode.content if isinstance(inode.content, KvFile) else None)
        if allows(inode, creds, READ):
            return found
        return found._replace(
            exclusive_pages=None,
            pinned=None,
            lease_s=None,
            ttl_s=None,
            priority=None,
            tier=None,
            memory_pages=None,
            turns=None,
        )

    def kv_stat_open(self, handle: OpenKv) -> KvStat:
        """Return facts as `fstat(2)` does, about the version that the handle has open."""
        self._require_open(handle)
        return self._stat(handle.inode, handle.content)

    def find(self, creds: Credentials, path: str) -> Inode:
        """Return the inode that a path leads to, of any kind."""
        return self._paths.resolve(creds, path)

    def close(self) -> None:
        """Remove backing files that would outlive a file system that is not kept. The mount must be gone."""
        self.volume.close()

    # The audit

    def statfs(self) -> VolumeStatistics:
        return self.volume.statistics()

    def check(self) -> None:
        """Raise AssertionError unless names, versions and pages account for each other."""
        self.volume.check()

    def audit(self) -> Books:
        """Run `check`, and return the counts. If the counts don't balance, raise EIO: the daemon has a bug."""
        try:
            self.check()
        except AssertionError as error:
            raise SymError(
                f"the books do not balance: {error}; restart the daemon, and report this", errno.EIO
            ) from error
        count = self.pool.refcount[: self.pool.top]
        return Books(
            num_pages=self.pool.num_pages,
            num_free_pages=self.pool.num_free,
            num_referenced_pages=int(np.count_nonzero(count)),
            num_references=int(count.sum()),
            num_versions=self.volume.num_kv_versions,
            num_files=len(self._tree),
            num_locked_files=len(self.volume.locks),
        )

    # Helpers

    def _free_place(self, creds: Credentials, path: str | None) -> Place | None:
        if path is None:
            return None
        place = self._paths.place(creds, path)
        if place.inode is not None:
            self._tree.require_fresh(place.directory)
            raise Exists(f"{path}: the name is taken; remove it first, or choose another")
        if place.must_be_directory:
            raise IsDirectory(f"{path} ends in a slash: a KV file is no directory")
        require(place.directory, creds, WRITE | SEARCH, f"directory of {path}")
        self._tree.require_free(place.directory, place.name)
        return place

    def _place_if_any(self, creds: Credentials, path: str) -> Place | None:
        """Return the place of a path. None: the path is empty, or its directory does not exist (any more)."""
        try:
            return self._paths.place(creds, path) if path else None
        except (NotFound, NotDirectory):
            return None

    def check_new(self, creds: Credentials, path: str | None, mode: int) -> int:
        """Check that a file of that name could be made. Return the number of the account that would pay for it."""
        _check_mode(mode)
        place = self._free_place(creds, path)
        if place is not None and self._tree.is_shared(place.directory):
            raise NotSupported(f"{path}: make the file elsewhere, and fork it to the fleet")
        return self._payer(creds, place).number

    def _piece(self, source: OpenKv, ranges: Ranges) -> SourceRanges:
        self._require_open(source)
        return SourceRanges(source.table, ranges_within(ranges, source.table.length, self.name_of(source)))

    def _create(
        self,
        creds: Credentials,
        place: Place | None,
        mode: int,
        make: Callable[[int], KvFile],
        payer: Account | None = None,
    ) -> OpenKv:
        """Create a file with the content that `make` returns for the account that pays. OverQuota: the account has no
        room.
        """
        account = payer or self._payer(creds, place)
        self._tree.require_one_more(account)  # before `make`, because a refused fork is not a use of its source
        content = make(account.number)
        try:
            inode = self._new_inode(creds, place, mode, account)
        except SymError:  # there was room for either the pages or the name, but not for both
            self.volume.release_kv(content)
            raise
        self.volume.show(inode, content)
        self.volume.heat.note(inode, content)
        origin = None if place is None else (place.directory.number, place.name)
        return self._open(inode, content, origin, writable=True)

    def _new_inode(self, creds: Credentials, place: Place | None, mode: int, account: Account) -> Inode:
        if place is None:
            return self._tree.new_inode(stat.S_IFREG, mode, creds.uid, creds.gid, account)
        mode = mode_for_new(place.directory, creds, mode)
        return self._tree.make(place.directory, place.name, stat.S_IFREG, mode=mode, uid=creds.uid, gid=creds.gid)

    def _new(self, owner: int, model: int = 0) -> KvFile:
        return self.volume.new_kv(PageTable(self.volume.served[model].pool, owner))

    def give_up(self, claim: Claim) -> None:
        """Release a claim to the next waiter. If the claim was not acquired, do nothing."""
        self.claims.release(claim.shared_key, claim)
        self.claims.release(claim.key, claim)

    def _give_up_claim(self, handle: OpenKv) -> None:
        if handle.claim is not None:
            self.give_up(handle.claim)
            handle.claim = None

    def _payer(self, creds: Credentials, place: Place | None) -> Account:
        """Return the account that pays for a file that the caller makes at a place, or without a name.

        NotFound: the connection is confined to a directory that is no longer a domain. Otherwise the directory's owner
        would pay for the caller's file.
        """
        was_removed = creds.root is not None and creds.root.domain is None
        if place is None or was_removed:
            return self.account_of(creds)
        return self._tree.account_for(place.directory, creds.uid)

    def _open(self, inode: Inode, content: KvFile, origin: tuple[int, bytes] | None, *, writable: bool) -> OpenKv:
        content.retain()
        self._tree.opened(inode)
        if writable and self._tree.agreement is not None:
            self._tree.agreement.begin_writing(inode)
        self.volume.pager_of(content.table).opened(content.table)
        return OpenKv(inode, content, writable, origin)

    def _origin(self, creds: Credentials, path: str, inode: Inode) -> tuple[int, bytes]:
        """Return the directory and the name in which an existing path ends. If the path ends in a symbolic link, return
        any name of the file.
        """
        place = self._paths.place(creds, path)
        if place.inode is inode:
            return place.directory.number, place.name
        return min(inode.names)

    def _current_name(self, handle: OpenKv, origin: tuple[int, bytes]) -> tuple[Inode, bytes]:
        names = handle.inode.names
        if origin not in names:  # renamed or removed meanwhile
            if len(names) != 1:
                left = f"it has {len(names)} other names" if names else "it was removed"
                raise NotFound(f"{os.fsdecode(origin[1])}: the file no longer has this name: {left}")
            (origin,) = names
        return self._tree.get(origin[0]), origin[1]

    def _advise(
        self,
        creds: Credentials,
        inode: Inode,
        what: object,
        advice: Sequence[tuple[int, int]],
        handle: OpenKv | None = None,
    ) -> None:
        """Apply advice. Kinds that are stored change the inode. COLD and WILLNEED act on the version that the handle
        has open.
        """
        kv = inode.content if handle is None else handle.content
        if not isinstance(kv, KvFile) or not isinstance(inode.content, KvFile):
            raise NotSupported(f"{what} is no KV file: there is no advice on it")
        new = advised(inode.advice, advice)
        if any(is_stored(kind) for kind, _value in advice):
            require_owner(inode, creds, what)
            self.volume.advise(inode, new)
        is_owners = creds.uid in {0, inode.uid}
        is_group_writers = creds.in_group(inode.gid) and inode.mode & stat.S_IWGRP
        if any(kind == Advice.COLD for kind, _value in advice) and not (is_owners or is_group_writers):
            raise NotPermitted(f"{what}: only its owner, uid {inode.uid}, and writers of its group may advise COLD")
        others_use_it = inode.opens > (handle is not None)
        for kind, _value in advice:
            if kind == Advice.WILLNEED:
                self.volume.pager_of(kv.table).will_need(kv.table)
            elif kind == Advice.COLD and not new.is_pinned and (is_owners or not others_use_it):
                self.volume.pager_of(kv.table).demote(kv.table)

    def _stat(self, inode: Inode, content: KvFile | None) -> KvStat:
        table = None if content is None else content.table
        return KvStat(
            ino=inode.number,
            kind=inode.kind if table is None else "kv",
            mode=inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            nlink=inode.nlink,
            size=self.volume.size_of(inode) if content is None else self.volume.image_bytes(content),
            tokens=_num_tokens(inode) if table is None else table.length,
            pages=0 if table is None else len(table.pages),
            exclusive_pages=0 if table is None else inode.exclusive_pages(table),
            mtime_ns=inode.mtime_ns,
            ctime_ns=inode.ctime_ns,
            pinned=inode.advice.is_pinned,
            lease_s=inode.advice.left_s(),
            ttl_s=inode.advice.ttl_s,
            priority=inode.advice.priority,
            lost_tokens=0 if content is None else content.lost,
            tier="" if table is None else self.volume.pager_of(table).tier_of(table),
            memory_pages=0 if table is None else self.volume.pager_of(table).num_in_memory(table),
            other_bits=0 if content is None else content.num_other_bits(self.volume.bits),
            turns=() if content is None else content.fitting_turns(),
        )

    def _changed(self, handle: OpenKv) -> None:
        if handle.inode.content is handle.content:
            handle.inode.modified()

    def name_of(self, handle: OpenKv) -> PathOf:
        """Return the path of a handle's file, for messages."""
        return self._tree.path_of(handle.inode)

    def _require_writable(self, handle: OpenKv) -> None:
        self._require_open(handle)
        if not handle.writable:
            raise BadHandle(f"{self.name_of(handle)}: the handle was opened for reading only; open it for writing")

    def _require_open(self, handle: OpenKv) -> None:
        if handle.closed:
            raise BadHandle(f"{self.name_of(handle)}: the handle was closed")


def _check_mode(mode: int) -> None:
    if not 0 <= mode <= 0o7777:
        raise Invalid(f"mode {mode:o} is not between 0 and 7777")


def _num_tokens(inode: Inode) -> int:
    if isinstance(inode.content, Elsewhere):
        return inode.content.num_entries
    return inode.content.table.length if isinstance(inode.content, KvFile) else 0
