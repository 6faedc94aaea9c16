"""Inodes: files, directories and symbolic links without their names, and the rules of access to them.

The rules are those of path_resolution(7). This module applies them to calls of programs. On the mount, the kernel
applies these rules before it sends a request (`default_permissions`).
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvfs.names.content import Content, Elsewhere, KvFile
from kvfs.names.order import NameOrder
from kvfs.names.retention import NO_ADVICE
from kvfs.pages.accounts import Account, AccountLimits
from kvfs.pages.holdings import Holdings, Kind
from kvfs.pages.table import PageTable
from libsym.errors import NoAccess, NotPermitted, SymError

READ, WRITE, SEARCH = 4, 2, 1
"""The permission bits of one class (owner, group or other) in a mode."""

SOME_NAMES = 8
"""The most names of one file that a call looks at. A file may have 200,000 names."""

ATTRIBUTE_BYTES = 64
"""Bytes charged for an attribute in addition to its name and value. Python takes about as many bytes for a short
attribute.
"""

MOST_IN_MEMORY = 1024
"""The most charged bytes of attributes that a file keeps in memory; an inode takes about as many bytes. If a file's
attributes have more bytes, only the index keeps them.
"""

MIN_TIME_NS, MAX_TIME_NS = -(1 << 63), (1 << 63) - 1
"""The earliest and the latest time of an inode, in the years 1677 and 2262. The index and the frames of rings store a
time in 64 bits.
"""

OWN_NAME = b"."
"""The name of a put that records that a directory becomes a domain or stops being one. No file can have this name."""

UNKNOWN = 0
"""File type of an inode whose row in the index is damaged."""

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
    """User and groups of a caller, as the kernel reports them."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Supplementary groups."""
    root: Inode | None = None
    """The directory of the domain that the connection is confined to. Paths begin there, and never lead out of the
    domain.
    """

    def in_group(self, gid: int) -> bool:
        return gid == self.gid or gid in self.groups


class XattrSums(NamedTuple):
    """Count and bytes of the attributes that users have set on a file."""

    number: int = 0
    name_bytes: int = 0
    value_bytes: int = 0

    @classmethod
    def of(cls, noted: Mapping[bytes, bytes]) -> XattrSums:
        return cls(len(noted), sum(map(len, noted)), sum(map(len, noted.values())))

    @property
    def num_bytes(self) -> int:
        """The number of bytes that an account is charged for these attributes."""
        return self.number * ATTRIBUTE_BYTES + self.name_bytes + self.value_bytes


_NO_SUMS = XattrSums()


class Xattrs(dict[bytes, bytes]):
    """Extended attributes that users have set on a file. Code must set and delete them one by one, so that the sums
    stay right.

    Attributes of more than MOST_IN_MEMORY bytes leave memory once the index has them, and then count as *away*. Only
    their sums stay in memory. The attributes are read from the index on demand.
    """

    __slots__ = ("_payer", "changes", "held_bytes", "is_away", "kept", "sums")

    def __init__(self, noted: Mapping[bytes, bytes] = MappingProxyType({}), away: XattrSums | None = None) -> None:
        """`away`: sums of attributes that only the index has."""
        super().__init__(noted)
        self.sums = away or (XattrSums.of(noted) if noted else _NO_SUMS)
        self.is_away = away is not None
        self.changes = 0
        """Count of changes to the attributes."""
        self.kept: int | None = 0 if self.is_away else None
        """The value of `changes` when the attributes' own row in the index was written. None: the attributes have no
        row of their own.
        """
        self._payer: Holdings | None = None
        self.held_bytes = 0
        """The number of bytes in memory that `_payer` is charged for."""

    @property
    def are_large(self) -> bool:
        return self.sums.num_bytes > MOST_IN_MEMORY

    def growth(self, name: bytes, value: bytes) -> int:
        """Return the number of bytes by which the charge grows if an attribute is set."""
        old = self.get(name)
        return len(value) - len(old) if old is not None else ATTRIBUTE_BYTES + len(name) + len(value)

    def memory_growth(self, num_bytes: int) -> int:
        """Return the number of bytes by which the charge for memory grows if the attributes grow by `num_bytes`."""
        num_bytes += self.sums.num_bytes
        return (num_bytes if num_bytes > MOST_IN_MEMORY else 0) - self.held_bytes

    def bring(self, noted: Mapping[bytes, bytes]) -> None:
        """Put the attributes that the index has into memory again."""
        self.update(noted)
        self.is_away = False

    def put_away(self) -> None:
        """Free the memory of the attributes if the index has them."""
        if self.are_large and self.kept == self.changes:
            super().clear()
            self.is_away = True
            self.weigh()

    def weigh(self, payer: Holdings | None = None) -> None:
        """Charge the bytes of large attributes while they are in memory. `payer`: the new payer; None: the payer stays
        the same.

        The index does not store the attributes of a file without a name. Such attributes stay in memory until the file
        is closed.
        """
        if self._payer is not None:
            self._payer.let_go(Kind.FILE, 0, self.held_bytes)
            payer = payer or self._payer
        self.held_bytes = self.sums.num_bytes if self.are_large and not self.is_away else 0
        self._payer = payer if self.held_bytes else None
        if self._payer is not None:
            self._payer.charge(Kind.FILE, 0, self.held_bytes)

    def clear(self) -> None:
        """Remove all attributes."""
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
    """A file, directory, symbolic link, fifo, socket or device node, without its names."""

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
        "holder",
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
        """The account that pays for the inode and its content; None: nothing refers to the inode any more, not even the
        kernel.
        """
        self.domain: Account | None = None
        """If the directory is a domain: the domain's account, which pays for all files below it."""
        self.atime_ns = self.mtime_ns = self.ctime_ns = time.time_ns()
        self.xattrs = Xattrs()
        self.advice = NO_ADVICE
        """Advice on a KV file; change it with `Volume.advise`."""
        self.names: set[tuple[int, bytes]] = set()
        """The hard links: pairs of the directory's number and the name."""
        self.opens = 0
        self.lookups = 0
        self.content: Content | None = None
        """Content of a regular file."""
        self.entries: dict[bytes, Inode] = {}
        """Entries of a directory."""
        self.order: NameOrder[Inode] | None = None
        """Order of a directory's entries; None: no program has listed the directory. See `Tree.order`."""
        self.parent: Inode | None = None
        """Parent of a directory that has a name. The root is its own parent."""
        self.num_subdirectories = 0
        self.target = b""
        """Target of a symbolic link."""
        self.device = 0
        """Device of a device node, in the kernel's 32 bits."""
        self.used_ns = 0
        """The time when the file was last closed, or its advice last changed. Only files with a TTL have this time."""
        self.changes = changes or NOT_KEPT
        """The listener that gets each change."""
        self.holder: Holder | None = None
        """The holder of the inode's attributes, until they change."""

    @property
    def is_directory(self) -> bool:
        return self.file_type == stat.S_IFDIR

    @property
    def is_damaged(self) -> bool:
        """Whether the index has lost the inode. Such an inode has a name but no content, and can't be used."""
        return self.file_type == UNKNOWN

    @property
    def is_symlink(self) -> bool:
        return self.file_type == stat.S_IFLNK

    @property
    def kind(self) -> str:
        return "kv" if isinstance(self.content, KvFile | Elsewhere) else _KINDS[self.file_type]

    @property
    def nlink(self) -> int:
        if self.is_directory:
            return 0 if self.parent is None else 2 + self.num_subdirectories
        return len(self.names)

    @property
    def num_files(self) -> int:
        """Number of files that the account is charged for: one for each hard link, and at least one."""
        return max(1, len(self.names))

    @property
    def other_bytes(self) -> int:
        """Bytes that the account is charged for the inode itself, without its name and its content."""
        return self.xattrs.sums.num_bytes + len(self.target)

    def note(self, name: bytes, value: bytes) -> None:
        """Set and charge an attribute. The caller has checked that the account has room."""
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
        """Charge bytes to the inode's account; a negative number refunds bytes."""
        if num_bytes and self.account is not None:
            self.account.charge_bytes(num_bytes)

    def exclusive_pages(self, table: PageTable) -> int:
        """Return how many pages of a table the removal of a name frees: 0 if the inode has another name."""
        return 0 if self.nlink > 1 else table.exclusive_pages

    def modified(self) -> None:
        """Note that the content has just changed."""
        self.mtime_ns = self.ctime_ns = time.time_ns()
        self.note_change()

    def changed(self) -> None:
        """Note that something other than the content has just changed."""
        self.ctime_ns = time.time_ns()
        self.note_change()

    def note_change(self) -> None:
        """Note a change that leaves the inode's times as they are."""
        if self.holder is not None:
            self.holder.withdraw(self)
        if isinstance(self.content, KvFile):
            self.content.table.changed()
        self.changes.of_inode(self)


@dataclass(frozen=True, slots=True, eq=False)
class NamePut:
    """The change of one name by an operation: the inodes that the name leads to before and after the operation."""

    directory: Inode
    name: bytes
    before: Inode | None
    after: Inode | None
    content: Content | None
    """The content of `after` at the time of the operation."""
    length: int

    @property
    def key(self) -> tuple[int, bytes]:
        return self.directory.number, self.name

    @property
    def is_of_domain(self) -> bool:
        """Whether this put records, instead of a name, that a directory becomes a domain or stops being one."""
        return self.name == OWN_NAME


class Holder(Protocol):
    """Cache that holds attributes of inodes: the kernel, see `kvfs.mount.grants`."""

    def withdraw(self, inode: Inode) -> None:
        """Drop the attributes of an inode, because they change or may change without an event."""


class Changes:
    """Listener that gets every change, so that changes can be made durable. This base class ignores all changes.

    Two kinds of changes are reported. Names change in atomic operations, whose order the listener keeps. For the
    attributes and the content of an inode, the listener learns only that they have changed.
    """

    @property
    def unkept(self) -> Changes:
        """The listener of inodes that are not made durable here, because other machines know them, too."""
        return NOT_KEPT

    def of_inode(self, inode: Inode) -> None:
        """Note that attributes or content of an inode have changed."""

    def of_names(self, puts: tuple[NamePut, ...]) -> None:
        """Note the names that one operation has changed. The listener makes all of these changes durable together."""

    def of_domain(self, directory: Inode, limits: AccountLimits | None) -> None:
        """Note that a directory becomes a domain or stops being one. `limits`: the limits that the directory had
        before; None: the directory was no domain.

        The listener keeps the order of this change and the operations on names. Otherwise, after a crash, a file could
        have names on both sides of the domain's boundary.
        """

    def of_xattrs_gone(self, inode: Inode) -> None:
        """Note that an inode, whose attributes have a row of their own, has lost its last name and handle."""


NOT_KEPT = Changes()


def require_whole(inode: Inode, what: object) -> None:
    """Raise EIO if the index has lost the inode."""
    if inode.is_damaged:
        raise SymError(f"{what} is damaged in the index: see `symphony fsck`", errno.EIO)


def allows(inode: Inode, creds: Credentials, wanted: int) -> bool:
    """Whether the mode bits give `creds` all of the `wanted` bits."""
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
    """Raise NoAccess unless the mode bits allow the `wanted` access."""
    if not allows(inode, creds, wanted):
        verb = {READ: "read", WRITE: "write", SEARCH: "search"}.get(wanted, "change")
        message = f"{what}: mode {inode.mode:04o} of uid {inode.uid} does not let uid {creds.uid} {verb} it"
        if not inode.is_directory:
            message += f"; choose another file, or have uid {inode.uid} or root change its mode"
        elif wanted & WRITE and not inode.uid:
            message += "; root would let all users make files there by chmod 1777, or by symphony serve --open"
        raise NoAccess(message)


def require_removable(directory: Inode, inode: Inode, creds: Credentials, what: str) -> None:
    """Raise unless `creds` may remove a name of the inode from the directory."""
    require(directory, creds, WRITE | SEARCH, f"directory of {what}")
    if directory.mode & stat.S_ISVTX and creds.uid not in {0, inode.uid, directory.uid}:
        raise NotPermitted(f"{what}: its directory is sticky, and uid {creds.uid} owns neither")


def require_owner(inode: Inode, creds: Credentials, what: object) -> None:
    if creds.uid not in {0, inode.uid}:
        raise NotPermitted(f"{what}: only its owner, uid {inode.uid}, may do this")


def require_followable(link: Inode, directory: Inode, creds: Credentials, what: str) -> None:
    """Raise NoAccess for a link that another user may have planted, as Linux does with `fs.protected_symlinks`.

    The check applies to links in directories that their group or all users may write to, sticky or not. Links of the
    caller are always followed. Links of root and of the directory's owner are followed, too, because both could replace
    any file in the directory.
    """
    is_shared = directory.mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and link.uid not in {0, creds.uid, directory.uid}:
        raise NoAccess(
            f"{what}: leads through a link of uid {link.uid} in a directory that others may write to, which is not "
            "followed; use the path that it leads to"
        )


def mode_for_new(directory: Inode, creds: Credentials, mode: int) -> int:
    """Return the mode of a new file. Setgid is dropped if the file could run with a group that `creds` is not in."""
    inherits = directory.mode & stat.S_ISGID and mode & stat.S_ISGID and mode & stat.S_IXGRP
    if inherits and creds.uid != 0 and not creds.in_group(directory.gid):
        return mode & ~stat.S_ISGID
    return mode


def shown(name: bytes) -> str:
    """Return a name in a form that fits one line of a message."""
    text = name.decode(errors="replace")
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
