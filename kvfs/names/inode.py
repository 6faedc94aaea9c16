"""An inode: a file, directory or link apart from its names; and who may do what with it.

The rules are those of path_resolution(7), for the gate's calls; on the mount the kernel has applied them already
(`default_permissions`) when a request comes in.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from kvfs.names.content import Content, KvFile
from kvfs.names.order import NameOrder
from kvfs.names.retention import NO_ADVICE
from kvfs.pages.accounts import Account, Limits
from kvfs.pages.holdings import Holdings, Kind
from kvfs.pages.table import PageTable
from libsym.errors import NoAccess, NotPermitted, SymError

READ, WRITE, SEARCH = 4, 2, 1
"""The bits of one class of a mode."""

SOME_NAMES = 8
"""Names of a file that a call looks at, at most: there may be 200,000."""

ATTRIBUTE_BYTES = 64
"""Bytes that an attribute is charged beside its name and value: as many as Python takes for a short one."""

MOST_IN_MEMORY = 1024
"""Bytes of a file's attributes, as they are charged: more are in the index alone. An inode itself takes as much."""

MIN_TIME_NS, MAX_TIME_NS = -(1 << 63), (1 << 63) - 1
"""The first and the last time that an inode can have, in 1677 and in 2262: the index and frames have 64 bits for it."""

OWN_NAME = b"."
"""A directory's name in itself: no file can have it."""

UNKNOWN = 0
"""In place of a file type: the index is damaged where it says what the inode is."""

_KINDS = {
    UNKNOWN: "damaged",
    stat.S_IFDIR: "dir",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and groups of a caller: as the kernel told, never as the caller claims."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Supplementary groups."""
    root: Inode | None = None
    """A connection that is confined to a domain: its directory. Paths begin there and never lead out of it."""

    def in_group(self, gid: int) -> bool:
        return gid == self.gid or gid in self.groups


class XattrSums(NamedTuple):
    """Number and bytes of the attributes that a user noted on a file."""

    number: int = 0
    name_bytes: int = 0
    value_bytes: int = 0

    @classmethod
    def of(cls, noted: Mapping[bytes, bytes]) -> XattrSums:
        return cls(len(noted), sum(map(len, noted)), sum(map(len, noted.values())))

    @property
    def num_bytes(self) -> int:
        """Bytes that an account is charged for an attribute."""
        return self.number * ATTRIBUTE_BYTES + self.name_bytes + self.value_bytes


class Xattrs(dict[bytes, bytes]):
    """Extended attributes that a user noted. Set and delete single ones: the sums follow.

    More than MOST_IN_MEMORY are *away* once the index has them: the sums stay, and the rest is read when it is needed.
    """

    __slots__ = ("_payer", "changes", "held_bytes", "is_away", "kept", "sums")

    def __init__(self, noted: Mapping[bytes, bytes] = MappingProxyType({}), away: XattrSums | None = None) -> None:
        """`away`: the index alone has so many."""
        super().__init__(noted)
        self.sums = away or XattrSums.of(noted)
        self.is_away = away is not None
        self.changes = 0
        """Counts them."""
        self.kept: int | None = 0 if self.is_away else None
        """`changes` when the row of the index was written, apart from the inode's own; None: there is none."""
        self._payer: Holdings | None = None
        self.held_bytes = 0
        """Of memory, which `_payer` is charged."""

    @property
    def are_large(self) -> bool:
        return self.sums.num_bytes > MOST_IN_MEMORY

    def growth(self, name: bytes, value: bytes) -> int:
        """Return how many bytes more are charged if an attribute is set."""
        old = self.get(name)
        return len(value) - len(old) if old is not None else ATTRIBUTE_BYTES + len(name) + len(value)

    def memory_growth(self, num_bytes: int) -> int:
        """Return how many bytes of memory more are charged once the attributes have grown by `num_bytes`."""
        num_bytes += self.sums.num_bytes
        return (num_bytes if num_bytes > MOST_IN_MEMORY else 0) - self.held_bytes

    def bring(self, noted: Mapping[bytes, bytes]) -> None:
        """Attributes are at hand again: those that the index has."""
        self.update(noted)
        self.is_away = False

    def put_away(self) -> None:
        """Give their memory back if the index has them."""
        if self.are_large and self.kept == self.changes:
            super().clear()
            self.is_away = True
            self.weigh()

    def weigh(self, payer: Holdings | None = None) -> None:
        """Charge the memory that they take beside the inode's, until they are away. `payer` gets what is new.

        The index never has those of a file that has lost its name first: they stay in memory until it is closed.
        """
        if self._payer is not None:
            self._payer.let_go(Kind.FILE, 0, self.held_bytes)
            payer = payer or self._payer
        self.held_bytes = self.sums.num_bytes if self.are_large and not self.is_away else 0
        self._payer = payer if self.held_bytes else None
        if self._payer is not None:
            self._payer.charge(Kind.FILE, 0, self.held_bytes)

    def clear(self) -> None:
        """None is left."""
        super().clear()
        self.sums, self.is_away = XattrSums(), False
        self.changes += 1
        self.weigh()

    def __setitem__(self, name: bytes, value: bytes) -> None:
        assert not self.is_away
        number, name_bytes, value_bytes = self.sums
        old = self.get(name)
        if old is None:
            number, name_bytes = number + 1, name_bytes + len(name)
        self.sums = XattrSums(number, name_bytes, value_bytes + len(value) - len(old or b""))
        self.changes += 1
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        number, name_bytes, value_bytes = self.sums
        self.sums = XattrSums(number - 1, name_bytes - len(name), value_bytes - len(self[name]))
        self.changes += 1
        super().__delitem__(name)


class Inode:
    """A file, directory, symbolic link, fifo, socket or device node, apart from its names."""

    __slots__ = (
        "account",
        "advice",
        "atime_ns",
        "changes",
        "content",
        "ctime_ns",
        "device",
        "domain",
        "entries",
        "file_type",
        "gid",
        "lookups",
        "mode",
        "mtime_ns",
        "names",
        "num_subdirectories",
        "number",
        "opens",
        "order",
        "parent",
        "target",
        "uid",
        "used_ns",
        "xattrs",
    )

    def __init__(
        self,
        number: int,
        file_type: int,
        mode: int,
        uid: int,
        gid: int,
        account: Account,
        changes: Changes | None = None,
    ) -> None:
        self.number = number
        self.file_type = file_type
        """S_IFREG, S_IFDIR, … of the module stat, or UNKNOWN."""
        self.mode = mode
        """Permission bits, with setuid, setgid and sticky."""
        self.uid = uid
        self.gid = gid
        self.account: Account | None = account
        """The account that pays for the inode and its content; None once nothing refers to it, the kernel included."""
        self.domain: Account | None = None
        """Of a directory that is a domain: who pays for what is below it."""
        self.atime_ns = self.mtime_ns = self.ctime_ns = time.time_ns()
        self.xattrs = Xattrs()
        self.advice = NO_ADVICE
        """Of a KV file; change it with `Volume.advise`."""
        self.names: set[tuple[int, bytes]] = set()
        """(number of the directory, name) of each hard link."""
        self.opens = 0
        self.lookups = 0
        self.content: Content | None = None
        """Of a regular file."""
        self.entries: dict[bytes, Inode] = {}
        """Of a directory."""
        self.order: NameOrder[Inode] | None = None
        """Of a directory's entries, once somebody has read it: see `Tree.order`."""
        self.parent: Inode | None = None
        """Of a directory that has a name; the root is its own."""
        self.num_subdirectories = 0
        self.target = b""
        """Of a symbolic link."""
        self.device = 0
        """Of a device node: which one, in the kernel's 32 bits."""
        self.used_ns = 0
        """Of a file with a TTL: when it was closed last, or its advice changed."""
        self.changes = changes or NOT_KEPT
        """The listener that is told."""

    @property
    def is_directory(self) -> bool:
        return self.file_type == stat.S_IFDIR

    @property
    def is_damaged(self) -> bool:
        """Whether nobody may use it: there is a name, and nothing else."""
        return self.file_type == UNKNOWN

    @property
    def is_symlink(self) -> bool:
        return self.file_type == stat.S_IFLNK

    @property
    def kind(self) -> str:
        return "kv" if isinstance(self.content, KvFile) else _KINDS[self.file_type]

    @property
    def nlink(self) -> int:
        if self.is_directory:
            return 0 if self.parent is None else 2 + self.num_subdirectories
        return len(self.names)

    @property
    def num_files(self) -> int:
        """Number of files that the account is charged for: one, and one more for each hard link after the first."""
        return max(1, len(self.names))

    @property
    def other_bytes(self) -> int:
        """Bytes that the account is charged for the inode beside its name and its content."""
        return self.xattrs.sums.num_bytes + len(self.target)

    def note(self, name: bytes, value: bytes) -> None:
        """Set an attribute of the user's, and charge it; there has to be room."""
        self.charge(self.xattrs.growth(name, value))
        self.xattrs[name] = value
        self._weigh_notes()
        self.changed()

    def remove_note(self, name: bytes) -> None:
        before = self.xattrs.sums.num_bytes
        del self.xattrs[name]
        self.charge(self.xattrs.sums.num_bytes - before)
        self._weigh_notes()
        self.changed()

    def _weigh_notes(self) -> None:
        self.xattrs.weigh(None if self.account is None else self.account.holdings)

    def charge(self, num_bytes: int) -> None:
        """Charge the inode's account for so many bytes more, or less."""
        if num_bytes and self.account is not None:
            self.account.charge_bytes(num_bytes)

    def exclusive_pages(self, table: PageTable) -> int:
        """Pages of its table that are free once a name is removed: none while it has another one."""
        return 0 if self.nlink > 1 else table.exclusive_pages

    def modified(self) -> None:
        """The content has changed just now."""
        self.mtime_ns = self.ctime_ns = time.time_ns()
        self.changes.of_inode(self)

    def changed(self) -> None:
        """Something other than the content has changed just now."""
        self.ctime_ns = time.time_ns()
        self.changes.of_inode(self)

    def note_change(self) -> None:
        """Something has changed that no time tells of."""
        self.changes.of_inode(self)


@dataclass(frozen=True, slots=True, eq=False)
class NamePut:
    """A name that led to something before an operation, and leads to something after it."""

    directory: Inode
    name: bytes
    before: Inode | None
    after: Inode | None
    content: Content | None
    """The content of `after` at that moment."""
    length: int

    @property
    def key(self) -> tuple[int, bytes]:
        return self.directory.number, self.name

    @property
    def is_of_domain(self) -> bool:
        """Whether it says that the directory becomes a domain or stops being one, and nothing of a name."""
        return self.name == OWN_NAME


class Changes:
    """Is told of every change, so that it can be kept; this one keeps nothing.

    Two kinds, for two promises. Names change in operations, each of them atomic and after the others. Everything else
    of an inode, its attributes and its content, is only said to have changed.
    """

    def of_inode(self, inode: Inode) -> None:
        """Attributes or content are not what they were."""

    def of_names(self, puts: tuple[NamePut, ...]) -> None:
        """Note names that an operation has changed together."""

    def of_domain(self, directory: Inode, limits: Limits | None) -> None:
        """A directory becomes a domain or stops being one, behind all that it had in it; `limits`: what it had before.

        An operation as those on names: a name that comes out of order would cross the domain's boundary.
        """

    def of_xattrs_gone(self, inode: Inode) -> None:
        """An inode has lost its last name and handle, and its attributes have a row of their own."""


NOT_KEPT = Changes()


def require_whole(inode: Inode, what: object) -> None:
    """Raise EIO for an inode that the index has lost."""
    if inode.is_damaged:
        raise SymError(f"{what} is damaged in the index: see `symphony fsck`", errno.EIO)


def allows(inode: Inode, creds: Credentials, wanted: int) -> bool:
    """Whether the mode bits give `creds` all of the `wanted` ones."""
    if creds.uid == 0:
        return not wanted & SEARCH or inode.is_directory or bool(inode.mode & 0o111)
    if creds.uid == inode.uid:
        granted = inode.mode >> 6
    elif creds.in_group(inode.gid):
        granted = inode.mode >> 3
    else:
        granted = inode.mode
    return granted & wanted == wanted


def require(inode: Inode, creds: Credentials, wanted: int, what: object) -> None:
    """Raise NoAccess unless the mode bits allow it."""
    if not allows(inode, creds, wanted):
        verb = {READ: "read", WRITE: "write", SEARCH: "search"}.get(wanted, "change")
        message = f"{what}: mode {inode.mode:04o} of uid {inode.uid} lets uid {creds.uid} not {verb} it"
        if not inode.is_directory:
            message += f"; choose another file, or have uid {inode.uid} or root change its mode"
        elif wanted & WRITE and not inode.uid:
            message += "; root would let all users make files there by chmod 1777, or by symphony serve --open"
        raise NoAccess(message)


def require_removable(directory: Inode, inode: Inode, creds: Credentials, what: str) -> None:
    """Raise unless `creds` may take a name of the inode out of the directory."""
    require(directory, creds, WRITE | SEARCH, f"directory of {what}")
    if directory.mode & stat.S_ISVTX and creds.uid not in {0, inode.uid, directory.uid}:
        raise NotPermitted(f"{what}: its directory is sticky, and uid {creds.uid} owns neither of them")


def require_owner(inode: Inode, creds: Credentials, what: object) -> None:
    if creds.uid not in {0, inode.uid}:
        raise NotPermitted(f"{what}: only its owner, uid {inode.uid}, may do this")


def require_followable(link: Inode, directory: Inode, creds: Credentials, what: str) -> None:
    """Raise NoAccess for a link that a stranger may have planted, as Linux does for `fs.protected_symlinks`.

    A directory that its group or everybody may write to counts, sticky or not. A link of the caller, of root or of the
    directory's owner is followed: each of them has the power already.
    """
    is_shared = directory.mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and link.uid not in {0, creds.uid, directory.uid}:
        raise NoAccess(
            f"{what}: leads through a link of uid {link.uid} in a directory that others may write to, which is not "
            "followed; use the path that it leads to"
        )


def mode_for_new(directory: Inode, creds: Credentials, mode: int) -> int:
    """The mode of a file made by `creds`: it can't run with the group of a directory that gives it a strange one."""
    inherits = directory.mode & stat.S_ISGID and mode & stat.S_ISGID and mode & stat.S_IXGRP
    if inherits and creds.uid != 0 and not creds.in_group(directory.gid):
        return mode & ~stat.S_ISGID
    return mode


def shown(name: bytes) -> str:
    """A name fit for one line of a message."""
    text = name.decode(errors="replace")
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
