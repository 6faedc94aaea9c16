"""Versions of a fleet's files that are on this machine: see `symphony.fleet.versions`."""

from __future__ import annotations

from kvfs.fs import FileSystem
from kvfs.names.content import KvFile
from symphony.fleet.versions import DIRECTORY, VERSIONS


def entries_here(fs: FileSystem, version: str) -> int:
    """Return the number of entries of a version on this machine. 0: the version is not here.

    `version`: IDENT.TAG. A version is here as a whole or not at all.
    """
    fleet = fs.volume.tree.root.entries.get(DIRECTORY)
    local = None if fleet is None else fleet.entries.get(VERSIONS)
    inode = None if local is None else local.entries.get(version.encode())
    return inode.content.table.length if inode is not None and isinstance(inode.content, KvFile) else 0
