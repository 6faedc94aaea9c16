"""Walks paths for calls of programs, by the rules that the kernel follows on the mount.

A relative path begins at the root of the mount. An absolute path must lie below the mount. All symbolic links and every
`..` in a path must stay in the mount, too, because KV files exist only in the mount. The caller must have the search
permission for each directory in the path. In a directory that its group or all users may write to, a link of another
user is not followed.

A connection may be confined to a domain. Then relative paths begin at the domain's directory, and absolute paths must
begin with that directory's path. The walk never searches directories above the domain's directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

from kvfs.names.inode import SEARCH, Credentials, Inode, require, require_followable, require_whole
from kvfs.names.tree import MAX_NAME_BYTES, Tree
from libsym.errors import CrossDevice, Invalid, NameTooLong, NotDirectory, NotFound, TooManyLinks

MAX_PATH_BYTES = 4095
MAX_LINKS = 40


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a directory. A file with that name may exist or not."""

    directory: Inode
    name: bytes
    path: str
    """The path as the caller wrote it."""
    must_be_directory: bool
    """Whether the path ends in a slash."""

    @property
    def inode(self) -> Inode | None:
        inode = self.directory.entries.get(self.name)
        if inode is not None:
            require_whole(inode, self.path)
        return inode

    def existing(self) -> Inode:
        """Return the inode of the name, or raise NotFound."""
        inode = self.inode
        if inode is None:
            raise NotFound(f"{self.path}: no such file")
        if self.must_be_directory and not inode.is_directory:
            raise NotDirectory(f"{self.path}: not a directory")
        return inode


class Paths:
    """The paths of one tree, mounted at `mountpoint`."""

    def __init__(self, tree: Tree, mountpoint: PurePath | None = None) -> None:
        self._tree = tree
        self.mountpoint = mountpoint
        self.mount_aliases: tuple[PurePath, ...] = ()
        """Other paths of the mount's directory, for example through a symbolic link outside of the mount."""

    def resolve(self, creds: Credentials, path: str) -> Inode:
        """Return the inode of a path. All symbolic links are followed, including a link in the last name."""
        return self._walk(creds, self._encoded(path), path)

    def place(self, creds: Credentials, path: str) -> Place:
        """Return the place of a path's last name, which need not exist. If the last name is a symbolic link, the link
        is not followed.
        """
        encoded = self._encoded(path)
        bare = encoded.rstrip(b"/")
        head, _, name = bare.rpartition(b"/")
        if name in {b"", b".", b".."} or bare in self._mounts():
            raise Invalid(f"{path or repr(path)}: names a directory on the way, where the name of a file is needed")
        if len(name) > MAX_NAME_BYTES:
            raise _name_too_long(path)
        absolute = encoded.startswith(b"/")
        directory = self._walk(creds, head or (b"/" if absolute else b"."), path, is_way=True)
        if not directory.is_directory:
            raise NotDirectory(f"{path}: {os.fsdecode(head)} is not a directory")
        require(directory, creds, SEARCH, f"directory of {path}")
        if name not in directory.entries:
            self._tree.require_fresh(directory)
        return Place(directory, name, path, must_be_directory=bare != encoded)

    def _walk(self, creds: Credentials, encoded: bytes, path: str, *, is_way: bool = False) -> Inode:
        """Return the inode of a path. `is_way`: `encoded` is only the path's directory, without the last name."""
        top = current = creds.root or self._tree.root
        pending = self._components(top, encoded, path)
        links_left = MAX_LINKS
        while pending:
            name = pending.pop()
            if not current.is_directory:
                raise NotDirectory(f"{path}: what comes before {os.fsdecode(name)} is not a directory")
            require(current, creds, SEARCH, f"a directory on the way of {path}")
            if name == b".":
                continue
            if name == b"..":
                if current is top:
                    raise CrossDevice(f"{path} leaves {'the mount' if top is self._tree.root else 'the domain'}")
                current = current.parent or current
                continue
            if len(name) > MAX_NAME_BYTES:
                raise _name_too_long(path)
            inode = current.entries.get(name)
            if inode is None:
                self._tree.require_fresh(current)
                if pending or is_way:
                    raise NotFound(f"{path}: there is no directory {os.fsdecode(name)} on the way: make it first")
                raise NotFound(f"{path}: no such file")
            require_whole(inode, path)
            if not inode.is_symlink:
                current = inode
                continue
            require_followable(inode, current, creds, path)
            if not links_left:
                raise TooManyLinks(f"{path}: more than {MAX_LINKS} symbolic links on the way (a loop?)")
            links_left -= 1
            pending += self._components(top, inode.target, path)
            if inode.target.startswith(b"/"):
                current = top
        return current

    def _components(self, top: Inode, encoded: bytes, path: str) -> list[bytes]:
        """Return the names below `top`, from last to first. A final slash adds the name `.`, so that the walk requires
        a directory.
        """
        absolute = encoded.startswith(b"/")
        if encoded.startswith(b"/"):
            mount = next((mount for mount in self._mounts() if _lies_in(encoded, mount)), None)
            if mount is None:
                where = f"; it is mounted at {self.mountpoint}" if self.mountpoint else ""
                raise CrossDevice(f"{path} does not lie in the KV file system{where}")
            encoded = encoded[len(mount) :]
        names = [name for name in encoded.split(b"/") if name]
        if absolute:
            above = [*islice(self._names_above(top), len(names) + 1)][::-1]
            if names[: len(above)] != above:
                raise CrossDevice(f"{path} does not lie in the domain that this connection is confined to")
            names = names[len(above) :]
        if names and encoded.endswith(b"/"):
            names.append(b".")
        return names[::-1]

    def _names_above(self, directory: Inode) -> Iterator[bytes]:
        """Yield the names on the path from the root to a directory, from last to first."""
        while directory is not self._tree.root:
            if directory.parent is None:
                raise NotFound("the domain that this connection is confined to was removed")
            ((_, name),) = directory.names
            yield name
            directory = directory.parent

    def _mounts(self) -> list[bytes]:
        if self.mountpoint is None:
            return []
        return [os.fsencode(mount) for mount in (self.mountpoint, *self.mount_aliases)]

    @staticmethod
    def _encoded(path: str) -> bytes:
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            raise Invalid(f"{path!r} can't be a file name") from None
        if not encoded:
            raise NotFound("the empty path names no file")
        if b"\0" in encoded:
            raise Invalid(f"{path!r} holds a zero byte")
        if len(encoded) > MAX_PATH_BYTES:
            raise NameTooLong(f"{path[:20]}…: a path may have {MAX_PATH_BYTES} bytes, this has {len(encoded)}")
        return encoded


def _lies_in(encoded: bytes, mount: bytes) -> bool:
    return (encoded + b"/").startswith(mount.rstrip(b"/") + b"/")


def _name_too_long(path: str) -> NameTooLong:
    return NameTooLong(f"{path[:40]}…: a name may have {MAX_NAME_BYTES} bytes")
