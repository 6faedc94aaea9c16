"""Pages that files and directories hold. `ls` shows every fork at its full size; these figures show how many pages are
shared.

Figures of sharing are shown only to users who may read the file, as on the mount. Users without that permission get
only the facts of stat(2), and the sum counts the file as a file that shares nothing.

The rows and the sum each need a walk through the tree, which may have any size. Other tasks run during a walk, and may
change the tree. Files that appear or disappear in the meantime may or may not be seen.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import trio

from kvfs.names.content import Content, Elsewhere, KvFile
from kvfs.names.inode import READ, SEARCH, Credentials, Inode, allows
from kvfs.names.plain import PlainFile
from kvfs.names.walk import MAX_PATH_BYTES
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool
from kvfs.volume.volume import Volume

SLICE_S = 0.0003
"""A walk lets other tasks run each time that it has taken this many seconds."""
FEW_NAMES = 500
"""Up to this many names are sorted by the trio thread (0.1 ms), more names by a worker."""


@dataclass(frozen=True, slots=True)
class DuRow:
    """Figures of one regular file, or their sum over a directory."""

    path: str
    tokens: int
    pages: int
    exclusive_pages: int | None
    """Pages that removing only this file would free. None: the caller may not read the file."""
    shared_pages: int | None
    """A sum counts exclusive and shared pages only of files that the caller may read."""
    plain_bytes: int
    """Size of a plain file."""
    disk_bytes: int
    """Bytes on disk: whole pages of a KV file, or the bytes of a plain file."""
    exclusive_bytes: int | None = 0
    """Bytes of the exclusive pages. Pages of another model may have another size."""
    shared_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class Denied:
    """A directory that was skipped: the caller may not read it, or its path exceeds the limit for paths."""

    path: str


Visit = Callable[[DuRow | Denied, Inode], bool]
"""A function that a walk calls with each row or denied directory, in the order of names. False ends the walk."""


async def walk(start: Inode, path: str, after: Sequence[bytes], creds: Credentials, visit: Visit) -> None:
    """Visit the regular files at and below `start`, which the caller reached as `path`.

    `after` resumes a walk: the path from `start` to the file that was visited last, as names. The walk continues behind
    that file.
    """
    if not start.is_directory:
        if not after and start.content is not None:
            visit(_row(path, start, start.content, creds), start)
        return
    slice_ends_s = perf_counter() + SLICE_S
    walking = [_Directory(path, start, after)]
    if not (await walking[0].open(creds) or visit(Denied(path), start)):
        return
    while walking:
        if perf_counter() > slice_ends_s:
            await trio.lowlevel.checkpoint()
            slice_ends_s = perf_counter() + SLICE_S
        directory = walking[-1]
        if not directory.names:
            walking.pop()
            continue
        name = directory.names.pop()
        inode = directory.inode.entries.get(name)
        if inode is None:
            continue  # removed meanwhile
        below = directory.after[1:] if directory.after and directory.after[0] == name else ()
        was_visited = bool(directory.after) and directory.after == (name,)
        path = os.path.join(directory.path, os.fsdecode(name))  # noqa: PTH118 - no path of the daemon
        goes_on = True
        if inode.is_directory:
            inner = _Directory(path, inode, below)
            if await inner.open(creds):
                walking.append(inner)
            elif not was_visited:
                goes_on = visit(Denied(path), inode)
        elif inode.content is not None and not was_visited:
            goes_on = visit(_row(path, inode, inode.content, creds), inode)
        if not goes_on:
            return


class _Directory:
    """A directory that a walk has entered and not finished yet."""

    def __init__(self, path: str, inode: Inode, after: Sequence[bytes]) -> None:
        self.path = path
        self.inode = inode
        self.after = tuple(after)
        self.names: list[bytes] = []
        """Names still to visit, the next one last."""

    async def open(self, creds: Credentials) -> bool:
        """Read the names. False: the caller may not read the directory."""
        if not allows(self.inode, creds, READ | SEARCH) or len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            return False
        names, first = list(self.inode.entries), self.after[0] if self.after else b""
        if len(names) <= FEW_NAMES:
            self.names = _sorted(names, first)
        else:
            self.names = await trio.to_thread.run_sync(_sorted, names, first)
        return True


def _sorted(names: list[bytes], first: bytes) -> list[bytes]:
    return sorted((name for name in names if name >= first), reverse=True)


def _row(path: str, inode: Inode, content: Content, creds: Credentials) -> DuRow:
    if isinstance(content, PlainFile):
        return DuRow(path, 0, 0, 0, 0, content.size, content.size)
    if isinstance(content, Elsewhere):
        return DuRow(path, content.num_entries, 0, 0, 0, 0, 0)
    table = content.table
    num_pages = len(table.pages)
    disk_bytes = _on_disk(table.pool, table.pages)
    if not allows(inode, creds, READ):
        return DuRow(path, table.length, num_pages, None, None, 0, disk_bytes, None, None)
    exclusive, page_bytes = inode.exclusive_pages(table), table.pool.size_of(table.pages)
    shared = num_pages - exclusive
    return DuRow(
        path, table.length, num_pages, exclusive, shared, 0, disk_bytes, exclusive * page_bytes, shared * page_bytes
    )


def _on_disk(pool: PagePool, pages: IntArray) -> int:
    """Return the bytes of those pages that have entries on disk. All pages belong to one file."""
    return int(np.count_nonzero(pool.on_disk.kept[pages])) * pool.size_of(pages)


async def total(pool: PagePool, start: Inode, path: str, creds: Credentials) -> DuRow:
    """Return the sum over the files that `walk` visits. Each page counts once."""
    found = _Sum(pool)
    await walk(start, path, (), creds, found.add)
    return found.row(path)


async def by_model(volume: Volume, start: Inode, path: str, creds: Credentials) -> list[DuRow]:
    """Return a sum over the KV files of each model that `walk` visits. In place of a path, a row has the model's name
    and its precision, and the fingerprint of the model if another one has the same names. The rows are sorted.
    Files that the caller may not read are left out, because their attributes, the model among them, are not for the
    caller.
    """
    sums: dict[tuple[str, str], _Sum] = {}

    def add(row: DuRow | Denied, inode: Inode) -> bool:
        if isinstance(row, DuRow) and row.exclusive_pages is not None and isinstance(inode.content, KvFile):
            model = volume.model_of(inode.content)
            names = f"{model.name} {model.identity['precision']}", model.identity["model"]
            sums.setdefault(names, _Sum(volume.pool)).add(row, inode)
        return True

    await walk(start, path, (), creds, add)
    uses = Counter(name for name, _ in sums)
    return [
        sums[name, fingerprint].row(name if uses[name] == 1 else f"{name} {fingerprint[:12]}")
        for name, fingerprint in sorted(sums)
    ]


class _Sum:
    """A sum over files. Each page counts once, and a file with several names counts once."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._num_held = np.zeros(pool.num_numbers, np.int32)
        self._is_on_disk = np.zeros(pool.num_numbers, np.int8)
        self._seen: dict[int, int] = {}
        self._linked: dict[int, Inode] = {}
        self._num_tokens = self._num_others = self._plain_bytes = 0

    def add(self, row: DuRow | Denied, inode: Inode) -> bool:
        """Add a file that `walk` visits. True: the walk goes on."""
        if not isinstance(row, DuRow):
            return True
        seen = self._seen[inode.number] = self._seen.get(inode.number, 0) + 1
        if seen == 1:  # further hard links add nothing
            if inode.nlink > 1 and isinstance(inode.content, KvFile):
                self._linked[inode.number] = inode
            self._num_tokens += row.tokens
            self._plain_bytes += row.plain_bytes
            if row.exclusive_pages is None:
                self._num_others += row.pages
            elif isinstance(inode.content, KvFile):
                np.add.at(self._num_held, inode.content.table.pages, 1)  # an imported image may have a page twice
            if isinstance(inode.content, KvFile):
                pages = inode.content.table.pages
                self._is_on_disk[pages] = self._pool.on_disk.kept[pages]
        return True

    def row(self, path: str) -> DuRow:
        """Return the sum, as the row of `path`."""
        pool, top = self._pool, self._pool.top  # pages from `top` on were never used
        num_held, is_on_disk = self._num_held[:top], self._is_on_disk[:top]
        num_pages = int(np.count_nonzero(num_held))
        is_exclusive = (num_held > 0) & (pool.refcount[:top] == num_held)
        for number, inode in self._linked.items():
            if self._seen[number] < inode.nlink and isinstance(inode.content, KvFile):
                is_exclusive[inode.content.table.pages] = False  # the file has a name elsewhere
        exclusive = int(np.count_nonzero(is_exclusive))
        exclusive_bytes = pool.total_bytes(is_exclusive)
        return DuRow(
            path,
            self._num_tokens,
            num_pages + self._num_others,
            exclusive,
            num_pages - exclusive,
            self._plain_bytes,
            pool.total_bytes(is_on_disk) + self._plain_bytes,
            exclusive_bytes,
            pool.total_bytes(num_held) - exclusive_bytes,
        )
