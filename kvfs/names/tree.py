"""The tree of names: directories, hard links, renames, and the lifetime of inodes.

The tree does not look into the contents of files. It neither resolves paths, which `kvfs.names.walk` does, nor checks
permissions, which `kvfs.names.inode` does.

Every inode is charged to an account: the account of the domain that it lies in, or else the account of its uid. Each
hard link after the first counts as one more file. An inode refers to its account, and a domain's directory refers to
the domain's account. No rename or link crosses the boundary of a domain, and all names cost the same. So a rename moves
no charge, even if it moves a whole tree. Only a change of owner moves charges.

A tree may be deeper than the longest path, and a file may have very many names. So no call walks from an inode up to
the root without a limit, and no call visits all names of a file.

An inode lives while anything refers to it: a name, an open handle (of the mount or of a program), or a lookup that the
kernel remembers. Its number is never used again while the daemon lives, so a stale number can't reach another file.

The daemon's trio thread owns the tree. No method awaits: each change is atomic.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvfs._pages import ffi, lib
from kvfs.base.bell import Bell
from kvfs.names.agreement import (
    Agreement,
    Grant,
    Look,
    Make,
    Need,
    Open,
    Remove,
    Rename,
    SetMode,
    is_granted_everything,
    require_settled,
)
from kvfs.names.content import Content, KvFile
from kvfs.names.inode import NOT_KEPT, SOME_NAMES, UNKNOWN, Changes, Inode, NamePut, require_whole, shown
from kvfs.names.inode import Credentials as Credentials  # noqa: PLC0414 - users of a tree need it
from kvfs.names.order import NameOrder
from kvfs.pages.accounts import NAME_BYTES, Account, Accounts, names_bytes
from kvfs.pages.holdings import Kind
from kvfs.pages.table import PageTable
from libsym.errors import (
    Busy,
    CrossDevice,
    Exists,
    Invalid,
    IsDirectory,
    NameTooLong,
    NoSpace,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    NotSupported,
)

ROOT_NUMBER = 1
MAX_NAME_BYTES = 255
NAMES_AHEAD = 256
"""Number of names for which one check of the tree finds room. The core may make this many files before the next
check.
"""

MAX_SHOWN_BYTES, MAX_SHOWN_NAMES = 4096, 128
"""Limits of a path in a message, in bytes and names. In a deep tree, such a path takes a failing call 0.1 ms."""
MAX_WALK = 2048
"""The most names that a path of 4,096 bytes can have."""

CONTROL_NAME = b".symphony"
"""Name of the control files in the root. No file of the tree can have this name in the root."""

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
"""Flags of renameat2(2)."""


class Tree:
    """Every inode, by number, with the names of all files.

    `discard` is called with each inode that has lost its last name and handle. `idle` is called with a file that has a
    TTL, when the file's last handle is closed.
    """

    def __init__(
        self,
        accounts: Accounts,
        uid: int,
        gid: int,
        discard: Callable[[Inode], None],
        mode: int = 0o755,
        idle: Callable[[Inode], None] = lambda _inode: None,
        changes: Changes = NOT_KEPT,
        require_room: Callable[[int], None] = lambda _num_bytes: None,
        require_noted: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        """`require_room` raises NoSpace if the disk lacks room for a number of further bytes.

        `require_noted` raises NoSpace in the same way for bytes of attributes and of targets of symbolic links.
        """
        self._changes = changes
        self._require_room, self._require_noted = require_room, require_noted
        self._puts: dict[tuple[int, bytes], tuple[Inode, Inode | None, Inode | None]] = {}  # until `_tell`
        self._accounts = accounts
        self._discard = discard
        self._idle = idle
        self.lost: list[tuple[int, bytes]] = []
        """Removed names, each with the number of its directory. The inodes have no other name, but the kernel still
        remembers these inodes. The mount empties this list.
        """
        self.bell = Bell()
        """Rings when `lost` gets a name."""
        self.is_kernels = False
        """Whether the operation under way is a request of the kernel. If so, the kernel itself forgets the names that
        the operation removes.
        """
        self.agreement: Agreement | None = None
        """The machines that share a part of the names. None: all names belong to this machine alone."""
        self.core = ffi.new("core_files *", {"next_number": ROOT_NUMBER + 1})
        """Counters of inode numbers and of branches. The core makes branches without Python, so `_inodes` lacks them.
        """
        self.root = Inode(ROOT_NUMBER, stat.S_IFDIR, mode, uid, gid, accounts.of(uid), changes)
        accounts.of(uid).charge_files()
        self.root.parent = self.root
        self._inodes = {ROOT_NUMBER: self.root}
        self.num_names = 0
        self.num_moves = 0
        """Count of changes of directories that may change paths and visibility of the files below."""
        self._lingering: dict[int, Account] = {}
        """Accounts that pay for inodes that only the kernel still refers to, by inode number."""

    def __len__(self) -> int:
        return len(self._inodes) + int(self.core.num_branches)

    @property
    def next_number(self) -> int:
        """The number that the next inode gets."""
        return int(self.core.next_number)

    @next_number.setter
    def next_number(self, number: int) -> None:
        self.core.next_number = number

    def see(self, table: PageTable) -> Inode:
        """Return a new inode for a branch of the core. The branch is already charged, and one handle has it open."""
        core, account = table.core, self._accounts.of(table.owner)
        inode = Inode(core.number, stat.S_IFREG, core.mode, core.uid, core.gid, account, self._changes)
        inode.atime_ns, inode.mtime_ns, inode.ctime_ns = core.made_ns, core.changed_ns, core.changed_ns
        inode.opens = 1
        self._inodes[inode.number] = inode
        lib.core_branch_seen(core, self.core)
        return inode

    def __iter__(self) -> Iterator[Inode]:
        return iter(tuple(self._inodes.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._inodes

    def get(self, number: int) -> Inode:
        inode = self._inodes.get(number)
        if inode is None:
            raise NotFound(f"there is no inode {number}")
        return inode

    def child(self, directory: Inode, name: bytes) -> Inode:
        """Return the inode of a name, including `.` and `..`."""
        inode = directory.entries.get(name)
        if inode is not None:
            if inode.file_type == UNKNOWN:  # checked here, so that `shown` is called only for a damaged inode
                require_whole(inode, shown(name))
            return inode
        require_directory(directory, name)
        if name == b".":
            return directory
        if name == b"..":
            return directory.parent or directory
        check_name(name)
        self.require_fresh(directory)
        raise NotFound(f"{shown(name)}: no such file")

    def order(self, directory: Inode) -> NameOrder[Inode]:
        """Return the order of the directory's names, by which readers continue a listing."""
        if directory.order is None:
            directory.order = NameOrder(directory.entries)
        return directory.order

    def path_of(self, inode: Inode) -> PathOf:
        """Return a path of the inode below the root, as an object that messages can show."""
        return PathOf(self, inode)

    # Making

    def require_one_more(self, account: Account, other_bytes: int = 0) -> None:
        """Raise OverQuota or NoSpace unless the account may have one more name and `other_bytes` more bytes."""
        account.require_files(1, other_bytes)
        num_files = self._accounts.total.num_files
        other_bytes += names_bytes(num_files + 1) - names_bytes(num_files)
        if other_bytes:
            num_ahead, self.core.num_names = self.core.num_names, 0
            self._require_room(other_bytes)
            self.core.num_names = num_ahead or (NAMES_AHEAD if self._has_room(NAMES_AHEAD * NAME_BYTES) else 0)

    def _has_room(self, num_bytes: int) -> bool:
        try:
            self._require_room(num_bytes)
        except NoSpace:
            return False
        return True

    def require_bytes(self, inode: Inode, num_bytes: int) -> None:
        """Raise OverQuota or NoSpace unless the attributes of an inode may grow by `num_bytes`.

        Attributes of an inode with a name may always shrink. Attributes of an inode without a name stay in memory,
        because the index can't have them. So the memory that they take is always checked.
        """
        if inode.account is None:
            return
        if num_bytes > 0 or not (inode.names or inode.parent):
            inode.account.holdings.require(Kind.FILE, 0, inode.xattrs.memory_growth(num_bytes))
        if num_bytes > 0:
            inode.account.require_bytes(num_bytes)
            self._require_noted(num_bytes)

    def new_inode(
        self, file_type: int, mode: int, uid: int, gid: int, account: Account | None = None, target: bytes = b""
    ) -> Inode:
        """Make an inode without a name. The inode lives until `drop_if_unused` finds no reference to it.

        The account that pays is `account`, by default the account of `uid`. Raise OverQuota if that account has no room
        for one more file.
        """
        account = account or self._accounts.of(uid)
        if not is_granted_everything():  # else other machines have the inode already
            self.require_one_more(account, len(target))
            if target:
                self._require_noted(len(target))
        account.charge_files()
        inode = Inode(self.next_number, file_type, mode & 0o7777, uid, gid, account, self._changes)
        inode.target = target
        inode.charge(inode.other_bytes)
        self.core.next_number += 1
        self._inodes[inode.number] = inode
        return inode

    def make(
        self, directory: Inode, name: bytes, file_type: int, *, mode: int, uid: int, gid: int, target: bytes = b""
    ) -> Inode:
        """Make an inode under a new name. In a setgid directory the inode gets the directory's group."""
        self.require_free(directory, name)
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if file_type == stat.S_IFDIR:
                mode |= stat.S_ISGID
        grant = self._settled(directory, Make(directory, name, file_type, mode & 0o7777, uid, gid, target))
        inode = self.new_inode(file_type, mode, uid, gid, self.account_for(directory, uid), target)
        if grant is not None:
            inode.changes = self._changes.unkept
        self._attach(directory, name, inode)
        self._tell()
        if grant is not None:
            grant.is_used(inode)
        return inode

    def account_for(self, directory: Inode, uid: int) -> Account:
        """Return the account that pays for files that `uid` makes in the directory."""
        return domain_below(directory) or self._accounts.of(uid)

    def require_free(self, directory: Inode, name: bytes) -> None:
        """Raise unless this name can be made in the directory."""
        require_directory(directory, name)
        check_name(name)
        if name == CONTROL_NAME and directory is self.root:
            raise NotPermitted(f"{shown(name)}: the name belongs to the control files; choose another")
        if name in directory.entries or name in {b".", b".."}:
            self.require_fresh(directory)
            raise Exists(f"{shown(name)}: the name is taken")
        if directory.parent is None:
            raise NotFound(f"{shown(name)}: its directory was removed")

    def link(self, inode: Inode, directory: Inode, name: bytes) -> None:
        """Give a file another name."""
        if inode.is_directory:
            raise NotPermitted(f"{shown(name)}: a directory can't have a second name")
        if not inode.names:
            raise NotFound(f"{shown(name)}: the file was removed")
        if domain_around(inode) is not domain_below(directory):
            raise CrossDevice(f"{shown(name)}: the file lies in another domain: copy it")
        self.require_free(directory, name)
        if self.is_shared(directory):
            raise NotPermitted(f"{shown(name)}: a file of the fleet has one name; fork the file")
        if inode.account is not None:
            self.require_one_more(inode.account)
        self._attach(directory, name, inode)
        self._tell()

    def name(self, inode: Inode, directory: Inode, name: bytes) -> None:
        """Give a file without a name its first name. In a setgid directory the file gets the directory's group."""
        if self.is_shared(directory):
            raise NotSupported(f"{shown(name)}: make the file elsewhere, and fork it to the fleet")
        if domain_around(inode) is not domain_below(directory):
            raise CrossDevice(f"{shown(name)}: its directory has become part of another domain: make the file anew")
        self.require_free(directory, name)
        if directory.mode & stat.S_ISGID:
            inode.gid = directory.gid
        self._attach(directory, name, inode)
        self._tell()

    # Removing

    def unlink(self, directory: Inode, name: bytes) -> None:
        """Remove one name of a file."""
        inode = self.child(directory, name)
        if inode.is_directory:
            raise IsDirectory(f"{shown(name)} is a directory")
        self._remove(directory, name, inode)

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
            self.require_fresh(inode)
            raise NotEmpty(f"{shown(name)}: the directory is not empty")
        self._remove(directory, name, inode)

    def _remove(self, directory: Inode, name: bytes, inode: Inode) -> None:
        self._require_own(inode, name)
        grant = self._settled(directory, Remove(directory, name, inode))
        self._detach(directory, name)
        self._tell()
        if grant is not None:
            grant.is_used(inode)
        self.drop_if_unused(inode)

    def rename(self, source: Inode, name: bytes, target: Inode, new_name: bytes, flags: int = 0) -> None:
        """Move a name. If another file has the new name, replace that file. With RENAME_EXCHANGE, exchange the
        two names.
        """
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise Invalid(f"rename: unknown flags {flags:#x}")
        if {name, new_name} & {b".", b".."}:
            raise Invalid("can't rename . or ..")
        moved = self.child(source, name)
        self._require_own(moved, name)
        if target.is_directory and (
            domain_below(source) is not domain_below(target) or self.is_shared(source) is not self.is_shared(target)
        ):
            raise CrossDevice(f"{shown(new_name)} lies in another domain: copy {shown(name)} and remove it")
        if flags & RENAME_EXCHANGE:
            self._exchange(source, name, target, new_name)
            return
        replaced = target.entries.get(new_name) if target.is_directory else None
        if replaced is not None:
            require_whole(replaced, shown(new_name))
        if replaced is None or flags & RENAME_NOREPLACE:
            self.require_free(target, new_name)
        if not is_granted_everything():  # else other machines have moved the directory, step by step
            self._refuse_loop(moved, target, new_name)
        if replaced is moved:
            return  # both are names of one file: by POSIX, rename then does nothing
        if replaced is not None:
            self._require_own(replaced, new_name)
            self._require_replaceable(moved, replaced, new_name)
        grant = self._settled(target, Rename(source, name, moved, target, new_name, replaced))
        if replaced is not None:
            self._detach(target, new_name)
        self._detach(source, name)
        self._attach(target, new_name, moved)
        self._tell()
        if grant is not None:
            grant.is_used(moved)
        if replaced is not None:
            self.drop_if_unused(replaced)

    def _exchange(self, source: Inode, name: bytes, target: Inode, new_name: bytes) -> None:
        if self.is_shared(target):
            raise Invalid(f"{shown(name)}: two files of the fleet can't exchange their names")
        one, other = self.child(source, name), self.child(target, new_name)
        self._refuse_loop(one, target, new_name)
        self._refuse_loop(other, source, name)
        if one is other:
            return
        self._detach(source, name)
        self._detach(target, new_name)
        self._attach(target, new_name, one)
        self._attach(source, name, other)
        self._tell()

    # Shared names

    def is_shared(self, directory: Inode) -> bool:
        """Whether other machines have the names of the directory, too."""
        shared = self.agreement
        return shared is not None and directory is not shared.local and domain_below(directory) is shared.root.domain

    def require_fresh(self, directory: Inode) -> None:
        """Raise Unsettled if other machines may have changed the names of the directory."""
        if self.agreement is not None and self.is_shared(directory):
            require_settled(self.agreement, Look(directory))

    def require_open(self, inode: Inode, *, writable: bool, is_emptied: bool = False) -> None:
        """Raise Unsettled if other machines may have a newer version of a file, or the right to write it."""
        shared = self.agreement
        if shared is not None and shared.knows(inode) and not shared.is_open(inode, writable=writable):
            require_settled(shared, Open(inode, writable, is_emptied))

    def require_mode(self, inode: Inode, mode: int, uid: int, gid: int) -> None:
        """Raise Unsettled if the inode has another mode, owner or group, and other machines have to change it, too."""
        shared = self.agreement
        if shared is not None and shared.knows(inode) and (mode, uid, gid) != (inode.mode, inode.uid, inode.gid):
            require_settled(shared, SetMode(inode, mode, uid, gid))

    def _settled(self, directory: Inode, need: Need) -> Grant | None:
        """Return the grant of a change, or None if the directory is not shared. Unsettled: there is no grant."""
        return require_settled(self.agreement, need) if self.agreement and self.is_shared(directory) else None

    def _require_own(self, inode: Inode, name: bytes) -> None:
        """Raise Busy for the directory of the shared names."""
        if self.agreement is not None and inode in {self.agreement.root, self.agreement.local}:
            raise Busy(f"{shown(name)}: the fleet's names are there")

    def _refuse_loop(self, moved: Inode, target: Inode, new_name: bytes) -> None:
        """Raise Invalid if a directory would move into itself or below itself.

        The search walks up from the directories of both names, at most MAX_WALK levels each. So a move between
        directories that are near each other works at any depth.
        """
        if target is moved.parent or not (moved.num_subdirectories or moved is target):
            return
        above = set(self._upwards(moved.parent))
        for directory in self._upwards(target):
            if directory is moved:
                raise Invalid(f"{shown(new_name)}: can't move a directory into itself")
            if directory in above or directory is self.root:
                return
        raise NameTooLong(f"{shown(new_name)} lies {MAX_WALK} directories away or more: move it there in steps")

    def _upwards(self, directory: Inode | None) -> Iterator[Inode]:
        """Yield a directory and the directories above it, at most MAX_WALK in all."""
        for _ in range(MAX_WALK):
            if directory is None:
                return
            yield directory
            directory = None if directory is self.root else directory.parent

    def _require_replaceable(self, moved: Inode, replaced: Inode, name: bytes) -> None:
        if replaced.is_directory and not moved.is_directory:
            raise IsDirectory(f"{shown(name)} is a directory")
        if moved.is_directory and not replaced.is_directory:
            raise NotDirectory(f"{shown(name)} is not a directory")
        if replaced.entries:
            self.require_fresh(replaced)
            raise NotEmpty(f"{shown(name)}: the directory is not empty")

    def _attach(self, directory: Inode, name: bytes, inode: Inode) -> None:
        directory.entries[name] = inode
        self._put(directory, name, inode)
        self.num_names += 1
        if inode.names and inode.account is not None:
            inode.account.charge_files()
        inode.names.add((directory.number, name))
        if inode.is_directory:
            inode.parent = directory
            directory.num_subdirectories += 1
        directory.modified()
        inode.changed()
        self.is_moved(inode)

    def is_moved(self, inode: Inode) -> None:
        """Count a new name, mode or owner of a directory that is not empty."""
        self.num_moves += bool(inode.entries)

    def _detach(self, directory: Inode, name: bytes) -> None:
        inode = directory.entries.pop(name)
        self._put(directory, name, None, before=inode)
        self.num_names -= 1
        inode.names.remove((directory.number, name))
        if isinstance(inode.content, KvFile):
            inode.content.table.name_gone()
        if inode.names and inode.account is not None:
            inode.account.charge_files(-1)
        directory.entries, inode.names = _fitting(directory.entries), _fitting(inode.names)
        if directory.order is not None:
            directory.order.entries = directory.entries
        if inode.is_directory:
            inode.parent = None
            directory.num_subdirectories -= 1
        directory.modified()
        inode.changed()

    def _put(self, directory: Inode, name: bytes, after: Inode | None, before: Inode | None = None) -> None:
        key = directory.number, name
        _, before, _ = self._puts.get(key, (directory, before, None))
        self._puts[key] = directory, before, after

    def _tell(self) -> None:
        """Report the changed names of a complete operation to the listener."""
        puts, self._puts = self._puts, {}
        for (_, name), (directory, before, after) in puts.items():
            if directory.order is not None and (before is None) != (after is None):
                directory.order.changed(name)
        kept = tuple(
            NamePut(directory, name, before, after, *_content_of(after))
            for (_, name), (directory, before, after) in puts.items()
            if not self.is_shared(directory)
        )
        if kept:
            self._changes.of_names(kept)
        for (_, name), (directory, before, _) in puts.items():
            if before is not None and before.lookups and not before.names and not self.is_kernels:
                self.lost.append((directory.number, name))
                self.bell.ring()

    # Restoring

    def restore(self, number: int, file_type: int, account: Account) -> Inode:
        """Make an inode that the index has, without names and attributes. The caller charges the inode. The listener
        gets no change.
        """
        inode = self._inodes[number] = Inode(number, file_type, 0, 0, 0, account, self._changes)
        return inode

    def restore_name(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Make a name that the index has. The listener gets no change, and the times of the inodes stay."""
        directory.entries[name] = inode
        self.num_names += 1
        inode.names.add((directory.number, name))
        if inode.file_type == stat.S_IFDIR:
            inode.parent = directory
            directory.num_subdirectories += 1

    # References

    def forget(self, inode: Inode, num_lookups: int) -> None:
        """Subtract lookups that the kernel has forgotten."""
        assert inode.lookups >= num_lookups, f"inode {inode.number}: {inode.lookups} lookups, {num_lookups} forgotten"
        inode.lookups -= num_lookups
        self.drop_if_unused(inode)

    def opened(self, inode: Inode) -> None:
        inode.opens += 1
        if inode.holder is not None and not inode.is_directory:
            inode.holder.withdraw(inode)
        self._end_lingering(inode)  # an O_PATH descriptor can open a removed file

    def closed(self, inode: Inode) -> None:
        assert inode.opens > 0
        inode.opens -= 1
        if inode.advice.ttl_ms and not inode.opens:
            self._idle(inode)
        self.drop_if_unused(inode)

    def drop_if_unused(self, inode: Inode) -> None:
        """Discard the content if the inode has no name and no handle. If the kernel has forgotten the inode, too, drop
        the inode.

        A program can keep the kernel from forgetting the inode (O_PATH). Meanwhile the inode stays charged, without its
        content.
        """
        if inode.opens or inode.names or inode is self.root:
            return
        self._discard(inode)
        inode.charge(-inode.xattrs.sums.num_bytes)
        inode.xattrs.clear()
        if inode.xattrs.kept is not None:
            self._changes.of_xattrs_gone(inode)
        inode.order = None
        if inode.domain is not None:
            self._changes.of_domain(inode, inode.domain.limits)
            inode.domain.close()
            inode.domain = None
        assert inode.account is not None
        if inode.lookups:
            if inode.number not in self._lingering:
                self._let_linger(inode)
            return
        inode.charge(-inode.other_bytes)
        inode.account.charge_files(-1)
        inode.account = None
        del self._inodes[inode.number]
        self._end_lingering(inode)

    def charged_to(self, inode: Inode, account: Account) -> None:
        """Move the inode's charge to another account."""
        inode.account = account
        if self._end_lingering(inode):
            self._let_linger(inode)

    def _let_linger(self, inode: Inode) -> None:
        assert inode.account is not None
        self._lingering[inode.number] = inode.account
        inode.account.linger(len(inode.target))

    def _end_lingering(self, inode: Inode) -> bool:
        """End the lingering of an inode if only the kernel referred to it so far. Return whether it was lingering."""
        lingered = self._lingering.pop(inode.number, None)
        if lingered is not None:
            lingered.forgotten(len(inode.target))
        return lingered is not None

    # Audit

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
            is_held = inode.holder is not None and not inode.is_directory
            _expect(not (is_held and inode.opens), f"inode {inode.number} is open, and its attributes are held")
            _expect(not inode.is_directory or len(inode.names) <= 1, f"directory {inode.number} has several names")
        self._check_accounts()
        num_names = sum(len(names) for names in found.values())
        _expect(self.num_names == num_names, f"{num_names} names, counted as {self.num_names}")

    def _check_accounts(self) -> None:
        charged, lingering = list[tuple[Account, int]](), list[tuple[Account, int]]()
        for inode in self:
            assert inode.account is not None, f"inode {inode.number} is charged to nobody"
            charged.append((inode.account, inode.num_files))
            if not (inode.names or inode.opens or inode is self.root):
                lingering.append((inode.account, len(inode.target)))
            if inode.domain is not None:
                payer = domain_around(inode) or self._accounts.of(inode.uid)
                _expect(inode.domain.parent is payer, f"the domain of inode {inode.number} is paid for by another")
            for child in inode.entries.values():
                around, below = domain_around(child), domain_below(inode)
                _expect(around is below, f"inode {child.number} lies in a domain that does not pay for it")
        self._accounts.check("num_files", charged)
        self._accounts.check("num_lingering", ((account, 1) for account, _ in lingering))
        self._accounts.check("lingering_bytes", lingering)
        self._accounts.check_users()


@dataclass(frozen=True, slots=True)
class PathOf:
    """A path of an inode below the root, for messages. The path is built when it is shown, from its last name to its
    first.

    If the file has several hard links, only one of its paths is shown. A path beyond MAX_SHOWN_BYTES or MAX_SHOWN_NAMES
    is shortened.
    """

    tree: Tree
    inode: Inode

    def __str__(self) -> str:
        here, parts, num_bytes = self.inode, list[str](), 0
        if not (here.names or here.is_directory):
            return f"(unnamed file {here.number})"
        while here is not self.tree.root:
            number, name = min(islice(here.names, SOME_NAMES), default=(ROOT_NUMBER, b"(removed)"))
            part = shown(name)
            num_bytes += 1 + len(part.encode())
            if num_bytes > MAX_SHOWN_BYTES - len("…".encode()) or len(parts) == MAX_SHOWN_NAMES:
                parts.append("…")
                break
            parts.append(part)
            here = self.tree.get(number)
        else:
            parts.append("")
        return "/".join(reversed(parts)) or "/"


_Table = TypeVar("_Table", dict[bytes, Inode], set[tuple[int, bytes]])


def _fitting(table: _Table) -> _Table:
    """Return the table, or a copy of the table if most of its memory belongs to removed members.

    Python never shrinks a table. Without the copy, the table would keep the memory of its largest size, and a search
    for its first member would visit all of that memory.
    """
    return type(table)(table) if sys.getsizeof(table) > 4096 + 512 * len(table) else table


def domain_around(inode: Inode) -> Account | None:
    """Return the domain that the inode lies in. For a domain's own directory, return the domain around it."""
    return inode.account if inode.account is not None and inode.account.is_domain else None


def domain_below(directory: Inode) -> Account | None:
    """Return the domain that files made in the directory belong to."""
    return directory.domain or domain_around(directory)


def _content_of(inode: Inode | None) -> tuple[Content | None, int]:
    """Return the current content of an inode, and its number of entries."""
    content = None if inode is None else inode.content
    return content, content.table.length if isinstance(content, KvFile) else 0


def require_directory(inode: Inode, name: bytes) -> None:
    if not inode.is_directory:
        raise NotDirectory(f"{shown(name)}: its parent is not a directory")


def is_possible_name(directory: int, name: bytes) -> bool:
    """Whether an inode in that directory can have this name."""
    is_control = directory == ROOT_NUMBER and name == CONTROL_NAME
    is_text = 0 < len(name) <= MAX_NAME_BYTES and b"/" not in name and b"\0" not in name
    return is_text and name not in {b".", b".."} and not is_control


def check_name(name: bytes) -> None:
    if len(name) > MAX_NAME_BYTES:
        raise NameTooLong(f"{shown(name[:20])}…: a name may have {MAX_NAME_BYTES} bytes, this has {len(name)}")
    if not name or b"/" in name or b"\0" in name:
        raise Invalid(f"{shown(name)!r} is no file name")


def _expect(condition: bool, facts: str) -> None:
    if not condition:
        raise AssertionError(facts)
