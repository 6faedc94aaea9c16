"""The KV file system as the gate sees it: paths and handles of LIPs.

Every call is synchronous, atomic and runs on the daemon's trio thread. It checks what the kernel would check on the
mount, with the credentials that the kernel gave for the connection.
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

from kvfs.images.model_facts import ModelFacts
from kvfs.names.content import KvFile, Marks
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
from kvfs.pages.assemble import Assembly, Piece, Ranges, ranges_within
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable, Reservation
from kvfs.tiers.tickets import Engine, NoEngine, NoPressure, Pressure
from kvfs.volume import Volume, VolumeStatistics
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
"""Files in one merge: holding each takes some microseconds of the daemon's thread."""
_WHOLE: Ranges = np.array([[0, RANGE_END]])


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The right to make the file of a name that there is not yet: of one user's programs one has it at a time.

    Advisory, as locks are: it keeps nobody from making a file of that name in another way. A user who never ends a
    claim holds up no other user, but for those that chose to wait for him a while (`shared_key`).
    """

    place: Place
    uid: int

    @property
    def key(self) -> tuple[int, bytes, int]:
        """The lock among the programs of one user."""
        return *self.shared_key, self.uid

    @property
    def shared_key(self) -> tuple[int, bytes]:
        """The lock among users, taken besides where it is free."""
        return self.place.directory.number, self.place.name


@dataclass(slots=True, eq=False, weakref_slot=True)
class OpenKv:
    """A LIP's handle on one version of a KV file: what happens to the name later does not touch it."""

    inode: Inode
    content: KvFile
    writable: bool
    origin: tuple[int, bytes] | None
    """(number of the directory, name) that it was opened by; None for an anonymous file."""
    closed: bool = False
    claim: Claim | None = None
    """Of an anonymous file that is to get a name when it is whole."""

    @property
    def table(self) -> PageTable:
        return self.content.table


class KvStat(NamedTuple):
    """Facts about a file, found without reading it. None: a fact that stat(2) does not tell everybody."""

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
    """Seconds that are left of the lease; 0: the file is pinned for good, or not at all."""
    ttl_s: float | None
    """Seconds from the file's last use until it expires; 0: never."""
    priority: int | None
    lost_tokens: int
    """Entries that the file had when a daemon before ended, and that were not on disk."""
    tier: str | None
    """Of a KV file: memory, disk or mixed."""
    memory_pages: int | None
    other_bits: int
    """The first entries, up to the last that another instruction set, or another kind of device, computed."""
    turns: tuple[int, ...] | None
    """Lengths that the file had before the last turns of its conversation, as far as is known."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory, as a listing shows it."""

    name: str
    kind: str
    size: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Books:
    """Numbers that `check` counted: free + referenced = all, and every reference has its holder."""

    num_pages: int
    num_free_pages: int
    num_referenced_pages: int
    num_references: int
    """Of tables, readers, imports and calls under way: forks share pages."""
    num_versions: int
    """KV files that have a name or a handle."""
    num_files: int
    """Inodes of any kind."""
    num_locked_files: int


class FileSystem:
    """KV files by path and by handle. `volume` is the same thing by inode, for the mount."""

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
    ) -> None:
        """See `Volume`."""
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
        )
        self._tree = self.volume.tree
        self._paths = Paths(self._tree)
        self.claims = FileLocks()
        """Names that files are being made for, each by the `Claim` that has it: by `key`, and by `shared_key`."""
        self._marks: WeakKeyDictionary[Assembly, Marks] = WeakKeyDictionary()
        """Of files that are being made of entries that something else computed."""

    @property
    def pool(self) -> PagePool:
        return self.volume.pool

    @property
    def mountpoint(self) -> PurePath | None:
        """Where absolute paths must lie; None while there is no mount."""
        return self._paths.mountpoint

    @mountpoint.setter
    def mountpoint(self, value: PurePath | None) -> None:
        self._paths.mountpoint = value

    def alias_mountpoint(self, *aliases: PurePath) -> None:
        """Absolute paths may begin with these as well: other paths of the mount, as through a symbolic link."""
        self._paths.mount_aliases = aliases

    def confine(self, creds: Credentials, path: str) -> Credentials:
        """Credentials that reach nothing but one domain, which the caller owns."""
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

    def kv_create(self, creds: Credentials, path: str | None, mode: int = 0o600) -> OpenKv:
        """A new, empty KV file, open for writing. Without a path it is anonymous: gone when it is closed."""
        _check_mode(mode)
        place = self._free_place(creds, path)
        return self._create(creds, place, mode, self._new)

    def kv_open(self, creds: Credentials, path: str, *, write: bool) -> OpenKv:
        """A handle on an existing KV file; `write` needs read permission too, for an append attends to what it has."""
        inode = self._paths.resolve(creds, path)
        require(inode, creds, READ, path)
        if write:
            require(inode, creds, WRITE, path)
        if inode.is_directory:
            raise IsDirectory(f"{path} is a directory")
        if not isinstance(inode.content, KvFile):
            raise Invalid(f"{path} is not a KV file: its bytes are no image of this model")
        self.volume.require_usable(inode.content, path)
        inode.content.used_by_program()
        self.volume.heat.note(inode, inode.content)
        return self._open(inode, inode.content, self._origin(creds, path, inode), writable=write)

    def kv_open_or_claim(
        self, creds: Credentials, path: str, *, write: bool, owner: int | None = None
    ) -> OpenKv | Claim:
        """`kv_open`, or a claim on the name of a file that is not there: to be acquired, and then made a file of.

        NoAccess: the file belongs to neither the caller, nor root, nor `owner`. None admits any owner.
        """
        try:
            file = self.kv_open(creds, path, write=write)
        except NotFound:
            place = self._free_place(creds, path)
            assert place is not None
            return Claim(place, creds.uid)
        if owner is not None and file.inode.uid not in {0, creds.uid, owner}:
            self.kv_close(file)
            raise NoAccess(
                f"{path}: is a file of uid {file.inode.uid}, and you are uid {creds.uid}: remove it or choose another "
                f"name; if you trust what that user wrote, owner={file.inode.uid}"
            )
        return file

    def kv_create_claimed(self, creds: Credentials, claim: Claim, mode: int) -> OpenKv:
        """An anonymous file, charged to whom it will be under its name. Closing it gives the claim back."""
        _check_mode(mode)
        payer = self._payer(creds, claim.place)
        file = self._create(creds, None, mode, self._new, payer)
        file.claim = claim
        return file

    def kv_name(self, creds: Credentials, handle: OpenKv, *, write: bool) -> None:
        """Give a file the name that it has claimed, which must still be free; then the handle is as `kv_open` gives."""
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
        """`kv_create` in a directory that the mount has led to: the kernel has checked permissions."""
        self._tree.require_free(directory, name)
        place = Place(directory, name, os.fsdecode(name), must_be_directory=False)
        return self._create(creds, place, mode, self._new)

    def kv_open_inode(self, inode: Inode, *, write: bool) -> OpenKv:
        """`kv_open` of a file that the mount has led to: the kernel has checked permissions."""
        assert isinstance(inode.content, KvFile)
        self.volume.require_usable(inode.content, self._tree.path_of(inode))
        return self._open(inode, inode.content, None, writable=write)

    def kv_fork(
        self, creds: Credentials, source: OpenKv, path: str | None, mode: int = 0o600, *, is_ended: bool = False
    ) -> OpenKv:
        """A copy of the source's entries as they are now, open for writing: page numbers are copied, never pages.

        `is_ended`: without a turn whose answer is under way.
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
        """A new file of ranges of the source's entries; end it with `finish_assembly` or `volume.abandon_assembly`."""
        owner = self._check_new(creds, path, mode)
        return self._begin_assembly(owner, [source], [self._piece(source, ranges)], rebase=rebase)

    def begin_merge(
        self, creds: Credentials, sources: Sequence[OpenKv], path: str | None, mode: int, *, rebase: bool
    ) -> Assembly:
        """A new file of all entries of the sources, one after the other; it ends as an extract does."""
        owner = self._check_new(creds, path, mode)
        if len(sources) > MAX_MERGED:
            raise Invalid(f"{len(sources)} files can't be merged at once: {MAX_MERGED} is the most, use several calls")
        pieces = [self._piece(source, _WHOLE) for source in sources]
        return self._begin_assembly(owner, sources, pieces, rebase=rebase)

    def _begin_assembly(
        self, owner: int, sources: Sequence[OpenKv], pieces: Sequence[Piece], *, rebase: bool
    ) -> Assembly:
        assembly = self.volume.begin_assembly(owner, pieces, rebase=rebase)
        marked = [source.content for source in sources if source.content.num_other_bits(self.volume.bits)]
        if marked:
            self._marks[assembly] = marked[0].marks_of_part(assembly.num_entries)
        return assembly

    def finish_assembly(self, creds: Credentials, assembly: Assembly, path: str | None, mode: int) -> OpenKv:
        """Give the new file its name, which must still be free; open for writing."""
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
        file.content.marks = self._marks.get(assembly, ())
        self.volume.pager.filled(file.table)
        return file

    def kv_close(self, handle: OpenKv) -> None:
        """Give a handle back, and its lock; not while one of its reservations is open."""
        self._require_open(handle)
        handle.closed = True
        if handle.content.under_way is not None and handle.content.under_way.by is handle:
            handle.content.under_way = None
        self.volume.locks.release(handle.inode.number, handle)
        self._give_up_claim(handle)
        self.volume.pager.closed(handle.table)
        self.volume.release_kv(handle.content)
        self._tree.closed(handle.inode)

    def reserve(
        self, handle: OpenKv, tokens: npt.ArrayLike, positions: npt.ArrayLike | None = None, num_ahead: int = 0
    ) -> Reservation:
        """Room for new entries: see `PageTable.reserve`. End it with commits, each followed by `committed(handle)`, or
        with its `abort`.
        """
        self._require_writable(handle)
        if handle.table.reservation is not None:
            raise Busy(f"{self.name_of(handle)}: another call is appending to it")
        return handle.table.reserve(tokens, positions, num_ahead)

    def committed(self, handle: OpenKv) -> None:
        """Say that a reservation of this handle was committed: the file has changed."""
        self._changed(handle)
        handle.content.changes += 1
        self.volume.heat.note(handle.inode, handle.content)

    async def sync(self, handle: OpenKv) -> None:
        """As `fsync(2)`. NotSupported: the file can't outlive its handles."""
        self._require_open(handle)
        if handle.inode.content is not handle.content:
            raise NotSupported(f"{self.name_of(handle)} was emptied or replaced: the handle's version has no name")
        if not handle.inode.names:
            raise NotSupported(
                f"{self.name_of(handle)} has no name: it goes with its last handle, and no disk can keep it; give it a "
                "name (kv_fork(kv, path)), and sync that"
            )
        await self.volume.storage.sync(handle.inode)

    def kv_truncate(self, handle: OpenKv, num_entries: int) -> None:
        """Keep the first entries."""
        self._require_writable(handle)
        self.volume.truncate_kv(handle.content, num_entries, self.name_of(handle))
        self._changed(handle)

    def kv_remove_open(self, creds: Credentials, handle: OpenKv, path: str = "") -> None:
        """Remove the name that the handle was opened by; the handle stays good until it is closed.

        `path`: the name that the caller takes it to have now. Where the file has neither of the two any more it is
        NotFound: others moved it, to keep it perhaps. Without a path, the only name that it has goes.
        """
        self._require_open(handle)
        if handle.origin is None:
            return  # anonymous: there is no name, and closing it removes it
        place = self._place_if_any(creds, path)
        if place is not None and place.inode is handle.inode:
            directory, name = place.directory, place.name
        elif path and handle.origin not in handle.inode.names:
            raise NotFound(f"{path}: the open file no longer has this name: remove it by the path that it has now")
        else:
            directory, name = self._current_name(handle, handle.origin)
        require_removable(directory, handle.inode, creds, os.fsdecode(name))
        self._tree.unlink(directory, name)

    # Names

    def kv_remove(self, creds: Credentials, path: str) -> None:
        """Remove a name, as `unlink(2)`."""
        place = self._paths.place(creds, path)
        inode = place.existing()
        require_removable(place.directory, inode, creds, path)
        if inode.is_directory:
            raise IsDirectory(f"{path} is a directory")
        self._tree.unlink(place.directory, place.name)

    def kv_mkdir(self, creds: Credentials, path: str, mode: int) -> None:
        """A new directory, as `mkdir(2)`."""
        _check_mode(mode)
        place = self._paths.place(creds, path)
        if place.inode is not None:
            raise Exists(f"{path}: the name is taken; remove it first, or choose another")
        require(place.directory, creds, WRITE | SEARCH, f"directory of {path}")
        self._payer(creds, place)
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
        self._tree.make(place.directory, place.name, stat.S_IFDIR, mode=mode, uid=creds.uid, gid=creds.gid)

    def kv_rename(self, creds: Credentials, old: str, new: str) -> tuple[int, int, int]:
        """Move a name, over an existing one if there is one, as `rename(2)`.

        The numbers of what was moved, and of the directories that it left and came into; 0 where nothing was.
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
            require(moved, creds, WRITE, old)  # its `..` changes
        self._tree.rename(source.directory, source.name, target.directory, target.name)
        if replaced is moved:
            return 0, 0, 0  # two names of one file: rename(2) leaves both
        return moved.number, source.directory.number, target.directory.number

    def kv_chmod(self, creds: Credentials, path: str, mode: int) -> None:
        """Set the permission bits, as `chmod(2)`."""
        inode = self._paths.resolve(creds, path)
        require_owner(inode, creds, path)
        _check_mode(mode)
        if creds.uid != 0 and not creds.in_group(inode.gid):
            mode &= ~stat.S_ISGID
        inode.mode = mode
        inode.changed()

    def kv_advise(self, creds: Credentials, path: str, advice: Sequence[tuple[int, int]]) -> None:
        """Take advice on a KV file, all or nothing: pairs of what and a value, see `kvfs.names.retention`."""
        inode = self._paths.resolve(creds, path)
        require(inode, creds, READ, path)
        self._advise(creds, inode, path, advice)

    def kv_advise_open(self, creds: Credentials, handle: OpenKv, advice: Sequence[tuple[int, int]]) -> None:
        """`kv_advise` of an open file."""
        self._require_open(handle)
        self._advise(creds, handle.inode, self.name_of(handle), advice, handle)

    def directory(self, creds: Credentials, path: str) -> Inode:
        """A directory that the caller may list; the empty path is the root."""
        directory = self._paths.resolve(creds, path or ".")
        if not directory.is_directory:
            raise NotDirectory(f"{path} is not a directory")
        require(directory, creds, READ, path)
        require(directory, creds, SEARCH, path)
        return directory

    def entry(self, name: bytes, inode: Inode) -> Entry:
        """Return one line of a listing."""
        return Entry(os.fsdecode(name), inode.kind, self.volume.size_of(inode), _num_tokens(inode))

    def kv_stat(self, creds: Credentials, path: str) -> KvStat:
        """As `stat(2)`: symbolic links are followed. What are attributes on the mount only readers get, as there."""
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
        """As `fstat(2)`: of the version that the handle has."""
        self._require_open(handle)
        return self._stat(handle.inode, handle.content)

    def find(self, creds: Credentials, path: str) -> Inode:
        """Return the inode that a path leads to, of any kind."""
        return self._paths.resolve(creds, path)

    def close(self) -> None:
        """For a file system that nothing keeps: remove what would outlive it. Not while there is a mount."""
        self.volume.close()

    # The books

    def statfs(self) -> VolumeStatistics:
        return self.volume.statistics()

    def check(self) -> None:
        """Raise AssertionError unless names, versions and pages account for each other."""
        self.volume.check()

    def audit(self) -> Books:
        """The books in figures, after `check`; what does not balance is an error of the daemon's own, EIO."""
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

    # Parts

    def _free_place(self, creds: Credentials, path: str | None) -> Place | None:
        if path is None:
            return None
        place = self._paths.place(creds, path)
        if place.inode is not None:
            raise Exists(f"{path}: the name is taken; remove it first, or choose another")
        if place.must_be_directory:
            raise IsDirectory(f"{path} ends in a slash: a KV file is no directory")
        require(place.directory, creds, WRITE | SEARCH, f"directory of {path}")
        self._tree.require_free(place.directory, place.name)
        return place

    def _place_if_any(self, creds: Credentials, path: str) -> Place | None:
        """None: the path leads nowhere (any more), or there is none."""
        try:
            return self._paths.place(creds, path) if path else None
        except (NotFound, NotDirectory):
            return None

    def _check_new(self, creds: Credentials, path: str | None, mode: int) -> int:
        """Whether a file of that name could be made: the number of the account that would pay for it."""
        _check_mode(mode)
        return self._payer(creds, self._free_place(creds, path)).number

    def _piece(self, source: OpenKv, ranges: Ranges) -> Piece:
        self._require_open(source)
        return Piece(source.table, ranges_within(ranges, source.table.length, self.name_of(source)))

    def _create(
        self,
        creds: Credentials,
        place: Place | None,
        mode: int,
        make: Callable[[int], KvFile],
        payer: Account | None = None,
    ) -> OpenKv:
        """`make` is told which account pays. OverQuota, and no file: it has no room for the file or its pages."""
        account = payer or self._payer(creds, place)
        self._tree.require_one_more(account)  # first: a fork that is refused is no use of its source
        content = make(account.number)
        try:
            inode = self._new_inode(creds, place, mode, account)
        except SymError:  # there was room for its pages, and for its name, but not for both
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

    def _new(self, owner: int) -> KvFile:
        return self.volume.new_kv(PageTable(self.pool, owner))

    def give_up(self, claim: Claim) -> None:
        """Let the next waiter have the name; nothing happens where the claim was not acquired."""
        self.claims.release(claim.shared_key, claim)
        self.claims.release(claim.key, claim)

    def _give_up_claim(self, handle: OpenKv) -> None:
        if handle.claim is not None:
            self.give_up(handle.claim)
            handle.claim = None

    def _payer(self, creds: Credentials, place: Place | None) -> Account:
        """Return the account that pays for what the caller makes at a place, or without one.

        A connection confined to a directory that is no domain any more makes nothing: its owner would be charged.
        """
        was_removed = creds.root is not None and creds.root.domain is None
        if place is None or was_removed:
            return self.account_of(creds)
        return self._tree.account_for(place.directory, creds.uid)

    def _open(self, inode: Inode, content: KvFile, origin: tuple[int, bytes] | None, *, writable: bool) -> OpenKv:
        content.retain()
        self._tree.opened(inode)
        self.volume.pager.opened(content.table)
        return OpenKv(inode, content, writable, origin)

    def _origin(self, creds: Credentials, path: str, inode: Inode) -> tuple[int, bytes]:
        """The name that an existing path ends in; behind a symbolic link, any name of the file."""
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
        """Apply advice: stored kinds to the inode, COLD and WILLNEED to the version that the handle has."""
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
            raise NotPermitted(f"{what}: only its owner, uid {inode.uid}, and writers of its group may have it go")
        others_use_it = inode.opens > (handle is not None)
        for kind, _value in advice:
            if kind == Advice.WILLNEED:
                self.volume.pager.will_need(kv.table)
            elif kind == Advice.COLD and not new.is_pinned and (is_owners or not others_use_it):
                self.volume.pager.demote(kv.table)

    def _stat(self, inode: Inode, content: KvFile | None) -> KvStat:
        table = None if content is None else content.table
        return KvStat(
            ino=inode.number,
            kind="kv" if table is not None else inode.kind,
            mode=inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            nlink=inode.nlink,
            size=self.volume.size_of(inode) if content is None else self.volume.image_bytes(content),
            tokens=0 if table is None else table.length,
            pages=0 if table is None else len(table.pages),
            exclusive_pages=0 if table is None else inode.exclusive_pages(table),
            mtime_ns=inode.mtime_ns,
            ctime_ns=inode.ctime_ns,
            pinned=inode.advice.is_pinned,
            lease_s=inode.advice.left_s(),
            ttl_s=inode.advice.ttl_s,
            priority=inode.advice.priority,
            lost_tokens=0 if content is None else content.lost,
            tier="" if table is None else self.volume.pager.tier_of(table),
            memory_pages=0 if table is None else self.volume.pager.num_in_memory(table),
            other_bits=0 if content is None else content.num_other_bits(self.volume.bits),
            turns=() if content is None else content.fitting_turns(),
        )

    def _changed(self, handle: OpenKv) -> None:
        if handle.inode.content is handle.content:
            handle.inode.modified()

    def name_of(self, handle: OpenKv) -> PathOf:
        """Return the path by which messages call the file of a handle."""
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
    return inode.content.table.length if isinstance(inode.content, KvFile) else 0
