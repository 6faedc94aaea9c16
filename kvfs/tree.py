"""Inodes and names: directories, hard links, renames, and who may do what.

The tree knows neither pages nor paths: a file's content is opaque to it, and a path is walked by `kvfs.paths`.
Permission checks are separate functions, for the gate's calls; on the mount the kernel has checked already
(`default_permissions`) when a request comes in.

An inode lives while anything refers to it: a name, an open handle (of the mount or of a LIP), or the kernel's memory
of it (a lookup). Its number is never used again while the daemon lives, so a stale one can't reach another file.

Owned by the daemon's trio thread. No call awaits: each change is atomic.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvfs.content import Content, KvFile
from libsym.errors import (
    Exists,
    Invalid,
    IsDirectory,
    NameTooLong,
    NoAccess,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
)

ROOT_NUMBER = 1
MAX_NAME_BYTES = 255

READ, WRITE, SEARCH = 4, 2, 1
"""The bits of one class of a mode."""

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
"""Flags of renameat2(2)."""

_KINDS = {
    stat.S_IFDIR: "dir",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who asks: as the kernel told, never as the caller claims."""

    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Supplementary groups."""

    def in_group(self, gid: int) -> bool:
        return gid == self.gid or gid in self.groups


class Inode:
    """A file, directory, symbolic link, fifo or socket, apart from its names."""

    __slots__ = (
        "atime_ns",
        "content",
        "ctime_ns",
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
        "parent",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(self, number: int, file_type: int, mode: int, uid: int, gid: int) -> None:
        self.number = number
        self.file_type = file_type
        """One of stat.S_IFREG, S_IFDIR, …"""
        self.mode = mode
        """Permission bits, with setuid, setgid and sticky."""
        self.uid = uid
        self.gid = gid
        self.atime_ns = self.mtime_ns = self.ctime_ns = time.time_ns()
        self.xattrs: dict[bytes, bytes] = {}
        self.names: set[tuple[int, bytes]] = set()
        """(number of the directory, name) of each hard link."""
        self.opens = 0
        self.lookups = 0
        self.content: Content | None = None
        """Of a regular file."""
        self.entries: dict[bytes, Inode] = {}
        """Of a directory."""
        self.parent: Inode | None = None
        """Of a directory that has a name; the root is its own."""
        self.num_subdirectories = 0
        self.target = b""
        """Of a symbolic link."""

    @property
    def is_directory(self) -> bool:
        return self.file_type == stat.S_IFDIR

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

    def modified(self) -> None:
        """The content has changed just now."""
        self.mtime_ns = self.ctime_ns = time.time_ns()

    def changed(self) -> None:
        """Something other than the content has changed just now."""
        self.ctime_ns = time.time_ns()


class Tree:
    """Every inode, by number. `discard` is told of each one that nothing refers to any more."""

    def __init__(self, uid: int, gid: int, discard: Callable[[Inode], None], mode: int = 0o755) -> None:
        self._discard = discard
        self._next_number = ROOT_NUMBER + 1
        self.root = Inode(ROOT_NUMBER, stat.S_IFDIR, mode, uid, gid)
        self.root.parent = self.root
        self._inodes = {ROOT_NUMBER: self.root}

    def __len__(self) -> int:
        return len(self._inodes)

    def __iter__(self) -> Iterator[Inode]:
        return iter(tuple(self._inodes.values()))

    def get(self, number: int) -> Inode:
        inode = self._inodes.get(number)
        if inode is None:
            raise NotFound(f"there is no inode {number}")
        return inode

    def child(self, directory: Inode, name: bytes) -> Inode:
        """The inode of a name; `.` and `..` too."""
        require_directory(directory, name)
        if name == b".":
            return directory
        if name == b"..":
            return directory.parent or directory
        check_name(name)
        inode = directory.entries.get(name)
        if inode is None:
            raise NotFound(f"{shown(name)}: no such file")
        return inode

    def path_of(self, inode: Inode) -> str:
        """A path of the inode below the root, for people; of several hard links, any."""
        parts: list[bytes] = []
        directory: Inode | None = inode
        if not inode.is_directory:
            if not inode.names:
                return f"(unnamed file {inode.number})"
            number, name = min(inode.names)
            parts.append(name)
            directory = self._inodes[number]
        while directory is not None and directory is not self.root:
            parts.append(min(directory.names)[1] if directory.names else b"(removed)")
            directory = directory.parent
        return "/" + "/".join(shown(part) for part in reversed(parts))

    # Making

    def new_inode(self, file_type: int, mode: int, uid: int, gid: int) -> Inode:
        """An inode without a name: it lives from its first reference on, see `drop_if_unused`."""
        inode = Inode(self._next_number, file_type, mode & 0o7777, uid, gid)
        self._next_number += 1
        self._inodes[inode.number] = inode
        return inode

    def make(self, directory: Inode, name: bytes, file_type: int, *, mode: int, uid: int, gid: int) -> Inode:
        """A new inode under a new name. In a setgid directory it gets the directory's group."""
        self.require_free(directory, name)
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if file_type == stat.S_IFDIR:
                mode |= stat.S_ISGID
        inode = self.new_inode(file_type, mode, uid, gid)
        self._attach(directory, name, inode)
        return inode

    def require_free(self, directory: Inode, name: bytes) -> None:
        """Raise unless the name can be made in the directory."""
        require_directory(directory, name)
        check_name(name)
        if name in directory.entries or name in {b".", b".."}:
            raise Exists(f"{shown(name)}: the name is taken")
        if directory.parent is None:
            raise NotFound(f"{shown(name)}: its directory was removed")

    def link(self, inode: Inode, directory: Inode, name: bytes) -> None:
        """One more name for a file."""
        if inode.is_directory:
            raise NotPermitted(f"{shown(name)}: a directory can't have a second name")
        if not inode.names:
            raise NotFound(f"{shown(name)}: the file was removed")
        self.require_free(directory, name)
        self._attach(directory, name, inode)

    # Removing

    def unlink(self, directory: Inode, name: bytes) -> None:
        """Remove one name of a file."""
        inode = self.child(directory, name)
        if inode.is_directory:
            raise IsDirectory(f"{shown(name)} is a directory")
        self._detach(directory, name)
        self.drop_if_unused(inode)

    def rmdir(self, directory: Inode, name: bytes) -> None:
        """Remove an empty directory."""
        if name == b".":
            raise Invalid("can't remove .")
        if name == b"..":
            raise NotEmpty("can't remove ..: it is not empty")
        inode = self.child(directory, name)
        if not inode.is_directory:
            raise NotDirectory(f"{shown(name)} is not a directory")
        if inode.entries:
            raise NotEmpty(f"{shown(name)}: the directory is not empty")
        self._detach(directory, name)
        self.drop_if_unused(inode)

    def rename(self, source: Inode, name: bytes, target: Inode, new_name: bytes, flags: int = 0) -> None:
        """Move a name, over an existing one if there is one; or exchange the two."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise Invalid(f"rename: unknown flags {flags:#x}")
        if {name, new_name} & {b".", b".."}:
            raise Invalid("can't rename . or ..")
        moved = self.child(source, name)
        if flags & RENAME_EXCHANGE:
            self._exchange(source, name, target, new_name)
            return
        replaced = target.entries.get(new_name) if target.is_directory else None
        if replaced is None or flags & RENAME_NOREPLACE:
            self.require_free(target, new_name)
        self._refuse_loop(moved, target, new_name)
        if replaced is moved:
            return  # two names of one file: POSIX says that nothing happens
        if replaced is not None:
            self._require_replaceable(moved, replaced, new_name)
            self._detach(target, new_name)
        self._detach(source, name)
        self._attach(target, new_name, moved)
        if replaced is not None:
            self.drop_if_unused(replaced)

    def _exchange(self, source: Inode, name: bytes, target: Inode, new_name: bytes) -> None:
        one, other = self.child(source, name), self.child(target, new_name)
        self._refuse_loop(one, target, new_name)
        self._refuse_loop(other, source, name)
        if one is other:
            return
        self._detach(source, name)
        self._detach(target, new_name)
        self._attach(target, new_name, one)
        self._attach(source, name, other)

    def _refuse_loop(self, moved: Inode, target: Inode, new_name: bytes) -> None:
        """A directory can't move into itself or below."""
        directory: Inode | None = target
        while moved.is_directory and directory is not None and directory is not self.root:
            if directory is moved:
                raise Invalid(f"{shown(new_name)}: can't move a directory into itself")
            directory = directory.parent

    def _require_replaceable(self, moved: Inode, replaced: Inode, name: bytes) -> None:
        if replaced.is_directory and not moved.is_directory:
            raise IsDirectory(f"{shown(name)} is a directory")
        if moved.is_directory and not replaced.is_directory:
            raise NotDirectory(f"{shown(name)} is not a directory")
        if replaced.entries:
            raise NotEmpty(f"{shown(name)}: the directory is not empty")

    def _attach(self, directory: Inode, name: bytes, inode: Inode) -> None:
        directory.entries[name] = inode
        inode.names.add((directory.number, name))
        if inode.is_directory:
            inode.parent = directory
            directory.num_subdirectories += 1
        directory.modified()
        inode.changed()

    def _detach(self, directory: Inode, name: bytes) -> None:
        inode = directory.entries.pop(name)
        inode.names.remove((directory.number, name))
        if inode.is_directory:
            inode.parent = None
            directory.num_subdirectories -= 1
        directory.modified()
        inode.changed()

    # References

    def forget(self, inode: Inode, num_lookups: int) -> None:
        """The kernel forgets so many of its lookups."""
        assert inode.lookups >= num_lookups, f"inode {inode.number}: {inode.lookups} lookups, {num_lookups} forgotten"
        inode.lookups -= num_lookups
        self.drop_if_unused(inode)

    def opened(self, inode: Inode) -> None:
        inode.opens += 1

    def closed(self, inode: Inode) -> None:
        assert inode.opens > 0
        inode.opens -= 1
        self.drop_if_unused(inode)

    def drop_if_unused(self, inode: Inode) -> None:
        if inode.opens or inode.lookups or inode.names or inode is self.root:
            return
        del self._inodes[inode.number]
        self._discard(inode)

    # The books

    def check(self) -> None:
        """Raise AssertionError if names, links and inodes contradict each other."""
        found: dict[int, set[tuple[int, bytes]]] = {number: set() for number in self._inodes}
        for directory in self:
            for name, inode in directory.entries.items():
                _expect(self._inodes.get(inode.number) is inode, f"name {shown(name)} leads to a lost inode")
                found[inode.number].add((directory.number, name))
            subdirectories = sum(inode.is_directory for inode in directory.entries.values())
            _expect(directory.num_subdirectories == subdirectories, f"inode {directory.number} miscounts directories")
        for inode in self:
            _expect(inode.names == found[inode.number], f"inode {inode.number} has names {inode.names}")
            used = inode.names or inode.opens or inode.lookups or inode is self.root
            _expect(bool(used), f"inode {inode.number} has no use")
            _expect(not inode.is_directory or len(inode.names) <= 1, f"directory {inode.number} has several names")


# Who may do what: the rules of path_resolution(7), as the kernel applies them on the mount


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


def require(inode: Inode, creds: Credentials, wanted: int, what: str) -> None:
    """Raise NoAccess unless the mode bits allow it."""
    if not allows(inode, creds, wanted):
        verb = {READ: "read", WRITE: "write", SEARCH: "search"}.get(wanted, "change")
        raise NoAccess(f"{what}: mode {inode.mode:04o} of uid {inode.uid} lets uid {creds.uid} not {verb} it")


def require_removable(directory: Inode, inode: Inode, creds: Credentials, what: str) -> None:
    """Raise unless `creds` may take a name of the inode out of the directory."""
    require(directory, creds, WRITE | SEARCH, f"directory of {what}")
    if directory.mode & stat.S_ISVTX and creds.uid not in {0, inode.uid, directory.uid}:
        raise NotPermitted(f"{what}: its directory is sticky, and uid {creds.uid} owns neither of them")


def require_owner(inode: Inode, creds: Credentials, what: str) -> None:
    if creds.uid not in {0, inode.uid}:
        raise NotPermitted(f"{what}: only its owner, uid {inode.uid}, may do this")


def require_directory(inode: Inode, name: bytes) -> None:
    if not inode.is_directory:
        raise NotDirectory(f"{shown(name)}: what should hold it is not a directory")


def check_name(name: bytes) -> None:
    if len(name) > MAX_NAME_BYTES:
        raise NameTooLong(f"{shown(name[:20])}…: a name may have {MAX_NAME_BYTES} bytes, this has {len(name)}")
    if not name or b"/" in name or b"\0" in name:
        raise Invalid(f"{shown(name)!r} is no file name")


def shown(name: bytes) -> str:
    """A name fit for one line of a message."""
    text = name.decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def _expect(condition: bool, facts: str) -> None:
    if not condition:
        raise AssertionError(facts)
