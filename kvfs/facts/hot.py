"""The most used files that a user may read, among the files that the user can find by listing directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvfs.names.content import KvFile
from kvfs.names.inode import READ, SEARCH, SOME_NAMES, Credentials, Inode, allows
from kvfs.names.walk import MAX_PATH_BYTES
from kvfs.volume.volume import Volume


@dataclass(frozen=True, slots=True)
class HotFile:
    """A KV file that has a name."""

    path: str
    """The path from the root of the mount, or of the caller's domain."""
    tokens: int
    size: int
    """Size of the file's image in bytes."""
    pages: int
    exclusive_pages: int
    uid: int
    pinned: bool
    hits: int
    opens: int
    heat: float
    idle_s: float
    page_bytes: int
    """Bytes of each page. Pages of another model may have another size."""


def hot_files(volume: Volume, creds: Credentials) -> Iterator[HotFile | None]:
    """Yield files, the hottest first. Yield None in place of a file that the user may not see, so that the caller can
    let other tasks run.
    """
    for inode in volume.heat.hottest(creds.uid):
        kv = inode.content
        path = path_for(volume, inode, creds) if isinstance(kv, KvFile) and allows(inode, creds, READ) else None
        yield None if path is None or not isinstance(kv, KvFile) else _file(volume, inode, kv, path)


def _file(volume: Volume, inode: Inode, kv: KvFile, path: str) -> HotFile:
    return HotFile(
        path=path,
        tokens=kv.table.length,
        size=volume.image_bytes(kv),
        pages=len(kv.table.pages),
        exclusive_pages=inode.exclusive_pages(kv.table),
        uid=inode.uid,
        pinned=inode.advice.is_pinned,
        hits=kv.hits,
        opens=inode.opens,
        heat=volume.heat.share(kv),
        idle_s=volume.heat.idle_s(kv),
        page_bytes=kv.table.pool.size_of(kv.table.pages),
    )


def path_for(volume: Volume, inode: Inode, creds: Credentials) -> str | None:
    """Return a path of a file that the caller could find by listing directories, or None.

    Only the first few names of a file are tried.
    """
    top = creds.root or volume.tree.root
    for number, name in sorted(islice(inode.names, SOME_NAMES)):
        way, num_bytes = [name], len(name)
        directory: Inode | None = volume.tree.get(number)
        while directory is not None and num_bytes <= MAX_PATH_BYTES and allows(directory, creds, READ | SEARCH):
            if directory is top:
                return os.fsdecode(b"/".join(reversed(way)))
            above = directory.parent if directory is not volume.tree.root else None
            way.append(next(iter(directory.names))[1] if above is not None else b"")
            num_bytes += 1 + len(way[-1])
            directory = above
    return None
