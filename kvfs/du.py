"""Who holds how many pages: the truth behind `ls`, which shows every fork at its full size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvfs.content import KvFile
from kvfs.free_list import IntArray
from kvfs.inode import READ, SEARCH, Credentials, Inode, allows
from kvfs.pages import PagePool


@dataclass(frozen=True, slots=True)
class DuRow:
    """One KV file, or the sum over a directory."""

    path: str
    tokens: int
    pages: int
    exclusive_pages: int
    """Pages that would be free if this alone were removed."""
    shared_pages: int


@dataclass(frozen=True, slots=True)
class DuReport:
    """Every KV file below a path, and the sum, in which each page counts once."""

    rows: tuple[DuRow, ...]
    total: DuRow
    denied: tuple[str, ...]
    """Directories that the caller may not read."""


def disk_usage(pool: PagePool, start: Inode, path: str, creds: Credentials) -> DuReport:
    """The report for `start`, which the caller reached as `path`."""
    rows: list[DuRow] = []
    denied: list[str] = []
    held: list[IntArray] = []
    seen: set[int] = set()
    for name, inode in _walk(start, path, creds, denied):
        if not isinstance(inode.content, KvFile):
            continue
        table = inode.content.table
        rows.append(DuRow(name, table.length, len(table.pages), table.exclusive_pages, table.shared_pages))
        if inode.number not in seen:  # a hard link adds nothing
            seen.add(inode.number)
            held.append(table.pages)
    pages = np.concatenate(held) if held else np.empty(0, np.int32)
    distinct, num_held = np.unique(pages, return_counts=True)
    exclusive = int(np.count_nonzero(pool.refcount[distinct] == num_held))
    tokens = sum(row.tokens for row in rows)
    total = DuRow(path, tokens, len(distinct), exclusive, len(distinct) - exclusive)
    return DuReport(tuple(rows), total, tuple(denied))


def _walk(inode: Inode, path: str, creds: Credentials, denied: list[str]) -> Iterator[tuple[str, Inode]]:
    pending = [(path, inode)]
    while pending:
        path, inode = pending.pop()
        if not inode.is_directory:
            yield path, inode
        elif not allows(inode, creds, READ | SEARCH):
            denied.append(path)
        else:
            below = sorted(inode.entries.items(), reverse=True)
            pending += [(os.path.join(path, os.fsdecode(name)), child) for name, child in below]  # noqa: PTH118 - no path of the daemon
