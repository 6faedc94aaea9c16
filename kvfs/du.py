"""Pages that files and directories hold: the truth behind `ls`, which shows every fork at its full size.

What a file shares is told as on the mount: to those who may read it. Of other files there is what stat(2) tells, and
the sum takes them for files that share nothing.

The rows and the sum each walk a tree of any size, and let others have their turn. So it may change under them: what
comes or goes meanwhile may or may not be seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import trio

from kvfs.names.content import Content, KvFile
from kvfs.names.inode import READ, SEARCH, Credentials, Inode, allows
from kvfs.names.plain import PlainFile
from kvfs.names.walk import MAX_PATH_BYTES
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool

TURN_S = 0.0003
"""Seconds that a walk goes on before other tasks get their turn."""
FEW_NAMES = 500
"""Sorted at once (0.1 ms); more in a worker."""


@dataclass(frozen=True, slots=True)
class DuRow:
    """Figures of one regular file, or their sum over a directory."""

    path: str
    tokens: int
    pages: int
    exclusive_pages: int | None
    """Pages that would be free if this alone were removed; None of a file that the caller may not read."""
    shared_pages: int | None
    """In a sum both are of the files that the caller may read."""
    plain_bytes: int
    """Of a plain file: its size."""
    disk_bytes: int
    """Of its pages that are on disk, each counted whole, or of its plain bytes."""
    exclusive_bytes: int | None = 0
    """Of the exclusive pages: those of another model have another size."""
    shared_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class Denied:
    """A directory that was not looked into: the caller may not read it, or its path is longer than a path can be."""

    path: str


Visit = Callable[[DuRow | Denied, Inode], bool]
"""Called with each find, in the order of names; False ends the walk."""


async def walk(start: Inode, path: str, after: Sequence[bytes], creds: Credentials, visit: Visit) -> None:
    """Visit the regular files at and below `start`, which the caller reached as `path`.

    `after`: names that lead from `start` to the last one that was visited before; those up to it are left out.
    """
    if not start.is_directory:
        if not after and start.content is not None:
            visit(_row(path, start, start.content, creds), start)
        return
    turn_ends_s = perf_counter() + TURN_S
    walking = [_Directory(path, start, after)]
    if not (await walking[0].open(creds) or visit(Denied(path), start)):
        return
    while walking:
        if perf_counter() > turn_ends_s:
            await trio.lowlevel.checkpoint()
            turn_ends_s = perf_counter() + TURN_S
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
    """A directory on the way from the start to where the walk is."""

    def __init__(self, path: str, inode: Inode, after: Sequence[bytes]) -> None:
        self.path = path
        self.inode = inode
        self.after = tuple(after)
        self.names: list[bytes] = []
        """Names that are still to come, the next one last."""

    async def open(self, creds: Credentials) -> bool:
        """Find the names; False if the caller may not."""
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
    table = content.table
    num_pages = len(table.pages)
    disk_bytes = _on_disk(table.pool, table.pages)
    if not allows(inode, creds, READ):
        return DuRow(path, table.length, num_pages, None, None, 0, disk_bytes, None, None)
    exclusive, page_bytes = inode.exclusive_pages(table), table.pool.accounts.sizes.of(table.pages)
    shared = num_pages - exclusive
    return DuRow(
        path, table.length, num_pages, exclusive, shared, 0, disk_bytes, exclusive * page_bytes, shared * page_bytes
    )


def _on_disk(pool: PagePool, pages: IntArray) -> int:
    """Bytes of the pages, all of one file, of which the disk has something."""
    return int(np.count_nonzero(pool.on_disk.kept[pages])) * pool.accounts.sizes.of(pages)


async def total(pool: PagePool, start: Inode, path: str, creds: Credentials) -> DuRow:
    """The sum over what `walk` finds, in which each page counts once."""
    num_held = np.zeros(pool.num_numbers, np.int32)
    is_on_disk = np.zeros(pool.num_numbers, np.int8)
    seen: dict[int, int] = {}
    linked: dict[int, Inode] = {}
    num_tokens = num_others = plain_bytes = 0

    def add(row: DuRow | Denied, inode: Inode) -> bool:
        nonlocal num_held, is_on_disk, num_tokens, num_others, plain_bytes
        if not isinstance(row, DuRow):
            return True
        if pool.num_numbers > num_held.size:  # it has grown since
            more = (0, pool.num_numbers - num_held.size)
            num_held, is_on_disk = np.pad(num_held, more), np.pad(is_on_disk, more)
        seen[inode.number] = seen.get(inode.number, 0) + 1
        if seen[inode.number] == 1:  # a hard link adds nothing
            if inode.nlink > 1 and isinstance(inode.content, KvFile):
                linked[inode.number] = inode
            num_tokens += row.tokens
            plain_bytes += row.plain_bytes
            if row.exclusive_pages is None:
                num_others += row.pages
            elif isinstance(inode.content, KvFile):
                np.add.at(num_held, inode.content.table.pages, 1)  # an image that was taken in may have a page twice
            if isinstance(inode.content, KvFile):
                pages = inode.content.table.pages
                is_on_disk[pages] = pool.on_disk.kept[pages]
        return True

    await walk(start, path, (), creds, add)
    num_held, is_on_disk = num_held[: pool.top], is_on_disk[: pool.top]  # of the others there is nothing to see
    num_pages = int(np.count_nonzero(num_held))
    is_exclusive = (num_held > 0) & (pool.refcount[: pool.top] == num_held)
    for number, inode in linked.items():
        if seen[number] < inode.nlink and isinstance(inode.content, KvFile):
            is_exclusive[inode.content.table.pages] = False  # it has a name elsewhere
    exclusive = int(np.count_nonzero(is_exclusive))
    sizes = pool.accounts.sizes
    disk_bytes, exclusive_bytes = sizes.total(is_on_disk) + plain_bytes, sizes.total(is_exclusive)
    return DuRow(
        path,
        num_tokens,
        num_pages + num_others,
        exclusive,
        num_pages - exclusive,
        plain_bytes,
        disk_bytes,
        exclusive_bytes,
        sizes.total(num_held) - exclusive_bytes,
    )
