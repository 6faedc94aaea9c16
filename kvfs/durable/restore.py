"""Restores the tree: every name, inode and version that the index knows. No page is read into memory.

The restore may run in any thread, before programs are served. Each account is charged once for all its files.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np

from kvfs.durable.kept import KeptRows, KeptSlots
from kvfs.durable.records import SEE_FSCK, InodeRecord
from kvfs.durable.sums import restored_sums
from kvfs.names.content import OWN, Marks
from kvfs.names.inode import NOT_KEPT, UNKNOWN, Inode, Xattrs, shown
from kvfs.names.plain import backing_name
from kvfs.names.tree import ROOT_NUMBER, domain_below
from kvfs.pages.accounts import Account, AccountLimits
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import NO_ARENA, RUNNING
from kvfs.pages.table import PageTable
from kvfs.volume.volume import Volume
from libsym.abi import PAGE_ENTRIES
from libsym.errors import SymError

log = logging.getLogger(__name__)

MOST_TOLD = 100
"""The most damaged inodes that the log names, because a large state may be damaged throughout."""


@dataclass(slots=True)
class Restored:
    """Facts of the restored tree that the storage needs."""

    pages_of: dict[int, IntArray] = field(default_factory=dict)
    """The page of each slot in `KeptSlots`, by identity."""
    files: list[Inode] = field(default_factory=list)
    """The inode of each version in `KeptVersions`."""
    expiring: list[Inode] = field(default_factory=list)
    """Files with a TTL."""
    pinned: list[Inode] = field(default_factory=list)
    lost: set[Inode] = field(default_factory=set)
    """Files that lost entries."""
    refused: dict[int, Inode] = field(default_factory=dict)
    """Damaged inodes, by number."""
    backing: set[str] = field(default_factory=set)
    """Names of the backing files of plain files."""


_Version: TypeAlias = tuple[int, int, int, Marks, bytes, IntArray]
"""Identity, length, length before the loss of entries, marks, turns, pages."""


class Restorer:
    """Fills an empty volume. The volume's pool was made with room for the restored pages."""

    def __init__(self, volume: Volume, kept: KeptRows, own: int) -> None:
        """`own`: the identity of the running model."""
        self._volume = volume
        self._kept = kept
        self._own = own
        self._page_at: dict[int, IntArray] = {}
        self._pages = np.full(kept.versions.slots.size, -1, np.int32)  # pages of all versions
        self._versions: dict[int, _Version] = {}  # by inode number
        self._num_files: Counter[Account] = Counter()
        self._other_bytes: Counter[Account] = Counter()
        self._without_bytes: list[tuple[Inode, str]] = []
        self.restored = Restored()

    def run(self) -> Restored:
        """Restore everything. Raise SymError if the index contradicts itself."""
        for identity, facts in self._kept.facts.items():
            if identity != self._own:
                self._volume.add_format(identity, facts)
        for identity, slots in self._kept.slots.items():
            self._take_pages(identity, slots)
        self._find_pages()
        self._restore_tree()
        for inode, name in self._without_bytes:
            path = str(self._volume.tree.path_of(inode))
            log.error("the bytes of %s are lost: there is no %s", path, name, extra={"file": path})
        for account, num_files in self._num_files.items():
            account.charge_files(num_files)
            account.charge_bytes(self._other_bytes[account])
        self._charge_pages()
        return self.restored

    def _take_pages(self, identity: int, slots: KeptSlots) -> None:
        pool = self._volume.pool
        pages = pool.take_restored(len(slots), RUNNING if identity == self._own else NO_ARENA)
        if identity != self._own:
            pool.has_size(int(pages[0]), int(pages[-1]) + 1, self._kept.facts[identity].page_bytes)
        pool.on_disk.restore(pages, slots.slots, slots.checks, slots.kept)
        pool.tokens[pages], pool.positions[pages] = slots.tokens, slots.positions
        page_at = np.full(int(slots.slots.max()) + 1, -1, np.int32)
        page_at[slots.slots] = pages
        self._page_at[identity] = page_at
        self.restored.pages_of[identity] = pages

    def _find_pages(self) -> None:
        """Find the pages of all versions, and note how many entries each page has."""
        versions = self._kept.versions
        sizes = np.diff(versions.ends, prepend=0)
        identities = np.repeat(versions.identities, sizes)
        for identity, page_at in self._page_at.items():
            mine = (identities == identity) & (versions.slots >= 0) & (versions.slots < page_at.size)
            self._pages[mine] = page_at[versions.slots[mine]]
        fills = np.full(identities.size, PAGE_ENTRIES, np.int8)
        fills[versions.ends[sizes > 0] - 1] = (versions.lengths[sizes > 0] - 1) % PAGE_ENTRIES + 1
        assert (self._pages >= 0).all(), "a version has a slot that no identity has"
        np.maximum.at(self._volume.pool.fill, self._pages, fills)
        columns = (each.tolist() for each in (versions.identities, versions.lengths, versions.full_lengths))
        each = zip(*columns, versions.marks, versions.turns, versions.split(self._pages), strict=True)
        self._versions = dict(zip(versions.numbers, each, strict=True))

    def _charge_pages(self) -> None:
        """Charge all pages, separately by account and identity, because pages in one charge must have one size."""
        versions = self._kept.versions
        payers = [inode.account.number for inode in self.restored.files if inode.account is not None]  # always true
        sizes = np.diff(versions.ends, prepend=0)
        owners, identities = np.repeat(np.array(payers, np.int64), sizes), np.repeat(versions.identities, sizes)
        for identity in np.unique(identities).tolist():
            mine = identities == identity
            for owner in np.unique(owners[mine]).tolist():
                self._volume.pool.restore_references(self._pages[mine & (owners == owner)], owner)

    def _restore_tree(self) -> None:
        tree, kept = self._volume.tree, self._kept
        children: dict[int, list[tuple[int, bytes, int, int]]] = {}
        for directory_number, names in groupby(kept.names, key=itemgetter(0)):
            children.setdefault(directory_number, []).extend(names)
        if kept.is_root_damaged:
            tree.root.mode, tree.root.changes = 0o700, NOT_KEPT
        if ROOT_NUMBER in kept.inodes:
            _give_attributes(tree.root, kept.inodes[ROOT_NUMBER])
            assert tree.root.account is not None
            tree.root.account.charge_files(-1)
            tree.root.account = self._volume.pool.accounts.of(tree.root.uid)
            tree.root.account.charge_files()
            tree.root.charge(tree.root.other_bytes)
            self._give_limits(tree.root, kept.inodes[ROOT_NUMBER])
        found = {ROOT_NUMBER: tree.root}
        waiting = deque([tree.root])
        while waiting:
            directory = waiting.popleft()
            waiting += self._restore_names(directory, children.pop(directory.number, []), found)
        if children:
            raise _senseless(f"inodes {sorted(children)[:8]} have names in them, and are no directories below the root")
        if unnamed := {*kept.inodes, *kept.versions.numbers} - found.keys():
            raise _senseless(f"inodes {sorted(unnamed)[:8]} have no name")
        if self._versions:
            raise _senseless(f"inodes {sorted(self._versions)[:8]} have entries, and are no regular files")
        for (directory_number, name), (number, why) in kept.refused.items():
            self._refuse(found[directory_number], name, number, why)
        tree.next_number = max(kept.next_inode, max(found) + 1)
        self.restored.files = [found[number] for number in kept.versions.numbers]

    def _restore_names(
        self, directory: Inode, names: list[tuple[int, bytes, int, int]], found: dict[int, Inode]
    ) -> list[Inode]:
        """Restore the names in a directory. Return the directories among them."""
        tree, records, account_of = self._volume.tree, self._kept.inodes, self._volume.pool.accounts.of
        domain, directories = domain_below(directory), list[Inode]()
        for _, name, number, _ in names:
            inode = found.get(number)
            if inode is not None and inode.account is not None:
                self._num_files[inode.account] += 1
            if inode is None:
                record = records.get(number)
                if record is None:
                    raise _senseless(f"inode {number} has a name and no record")
                account = domain or account_of(record.uid)
                inode = found[number] = tree.restore(number, record.file_type, account)
                _give_attributes(inode, record)
                self._num_files[account] += 1
                self._other_bytes[account] += inode.other_bytes
                if record.file_type == stat.S_IFREG:
                    self._give_content(inode, record, account)
                elif record.file_type == stat.S_IFDIR:
                    self._give_limits(inode, record)
                    directories.append(inode)
            elif inode.is_directory:
                raise _senseless(f"directory {number} has two names, or lies in itself")
            tree.restore_name(directory, name, inode)
        return directories

    def _refuse(self, directory: Inode, name: bytes, number: int, why: str) -> None:
        """Make a name that leads to a damaged inode. Every use of the name is refused."""
        tree, inode = self._volume.tree, self.restored.refused.get(number)
        account = domain_below(directory) or self._volume.pool.accounts.of(tree.root.uid)
        if inode is None:
            number = number or self._kept.take_number()
            inode = self.restored.refused[number] = tree.restore(number, UNKNOWN, account)
        assert inode.account is not None
        self._num_files[inode.account] += 1
        tree.restore_name(directory, name, inode)
        if len(self.restored.refused) > MOST_TOLD:
            return  # the storage logs only the number of further inodes
        path = str(tree.path_of(directory)).rstrip("/") + "/" + shown(name)
        log.error("%s is damaged in the index and refused: %s", path, why, extra={"file": path})

    def _give_content(self, inode: Inode, record: InodeRecord, account: Account) -> None:
        version = self._versions.pop(inode.number, None)
        if version is not None:
            identity, length, full_length, marks, turns, pages = version
            arena = RUNNING if identity == self._own else NO_ARENA
            table = PageTable(self._volume.pool, account.number, pages, length, arena)
            kv = self._volume.new_kv(table, OWN if identity == self._own else identity, marks)
            if turns:
                kv.turns = turns
            self._volume.show_restored(inode, kv)
            kv.lost = full_length - length
            if kv.lost:
                self.restored.lost.add(inode)
        elif record.has_entries:
            raise _senseless(f"the list of entries of inode {inode.number} is lost")
        else:
            self._give_bytes(inode, record, account)
        if record.advice.ttl_ms:
            self.restored.expiring.append(inode)
        if record.advice.pinned and version is not None:
            self.restored.pinned.append(inode)

    def _give_bytes(self, inode: Inode, record: InodeRecord, account: Account) -> None:
        name = backing_name(inode.number, record.backing)
        if record.backing >= 0:
            self.restored.backing.add(name)
        self._volume.num_backing_files = max(self._volume.num_backing_files, record.backing)
        sums = restored_sums(self._kept.sums.get(inode.number, ()), record.backing)
        size, is_lost = 0, False
        if record.backing >= 0:
            try:
                size = max(sums.size, (self._volume.backing_dir / name).stat().st_size)  # reads of a shorter file fail
            except FileNotFoundError:
                self._without_bytes.append((inode, name))
                is_lost = True
        inode.content = content = self._volume.existing_plain(inode, record.backing, size)
        content.is_lost = is_lost
        content.sums = sums
        content.charged = size
        account.charge_bytes(size)

    def _give_limits(self, inode: Inode, record: InodeRecord) -> None:
        if record.is_domain:
            limits = AccountLimits(record.limit_bytes, record.limit_files)
            self._volume.domains.restore(inode, limits, self._kept.xattrs.get(inode.number, record.xattrs))


def _senseless(what: str) -> SymError:
    """Return an error for rows that are as they were written, but contradict each other."""
    return SymError(f"the index contradicts itself: {what}: {SEE_FSCK}", errno.EIO)


def _give_attributes(inode: Inode, record: InodeRecord) -> None:
    (
        inode.file_type, inode.mode, inode.uid, inode.gid, inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.device,
        inode.used_ns, _, inode.advice, _, _, _, inode.target, xattrs, _, apart,
    ) = record  # fmt: skip
    if xattrs or apart is not None:
        inode.xattrs = Xattrs(xattrs, apart)


def record_of(inode: Inode, backing: int, limits: AccountLimits | None, *, has_entries: bool) -> InodeRecord:
    """Return the record of an inode as it is now. `limits`: the limits of a domain, or None."""
    return InodeRecord(
        inode.file_type,
        inode.mode,
        inode.uid,
        inode.gid,
        inode.atime_ns,
        inode.mtime_ns,
        inode.ctime_ns,
        inode.device,
        inode.used_ns,
        backing,
        inode.advice,
        limits is not None,
        None if limits is None else limits.num_bytes,
        None if limits is None else limits.num_files,
        inode.target,
        {} if inode.xattrs.are_large else inode.xattrs,
        has_entries,
        inode.xattrs.sums if inode.xattrs.are_large else None,
    )


def remove_leftovers(directory: Path, used: set[str]) -> None:
    """Remove backing files that no inode uses. Their plain files were never committed, or were removed."""
    leftovers = [path for path in directory.glob("*.plain") if path.name not in used]
    for path in leftovers:
        path.unlink()
    if leftovers:
        log.info("%d backing files of files that were never kept are removed", len(leftovers))
