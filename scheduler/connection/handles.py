"""Handles of a connection: files with Python objects, and branches that exist only in the core.

A branch is a fork without a name. Most branches live for a call or two, which the core carries out by itself. When
Python looks a branch up here, the branch gets Python objects and keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.names.tree import Credentials
from kvfs.pages.accounts import Account
from kvfs.pages.free_list import IntArray, pointer
from kvfs.pages.holdings import Holdings
from libsym.channel.server import ServerChannel
from scheduler._loop import ffi, lib
from scheduler.programs.page_seconds import PageSeconds

OPERATIONS = int(lib.sym_connection_operations())
_SERVE = int(ffi.cast("uintptr_t", ffi.addressof(lib, "sym_connection_serve")))

See = Callable[[Any], tuple[Inode, KvFile]]
"""Function that makes the Python objects of a branch from its `core_table`: see `Volume.see`."""


class Handles:
    """Open handles of one connection, by number."""

    def __init__(self) -> None:
        self.core = ffi.gc(ffi.new("sym_connection *"), lib.sym_connection_free)
        """The core's part of the connection, a `sym_connection`."""
        self._seen: dict[int, OpenKv] = {}
        self._see: See | None = None
        self._page_seconds: PageSeconds | None = None
        self._holdings: Holdings | None = None
        self._account: Account | None = None

    def serve(self, channel: ServerChannel, see: See, holdings: Holdings, page_seconds: PageSeconds) -> None:
        """Let the core carry out the calls that need no Python. The core already knows the run and the paying account.

        `page_seconds` counts the pages of the program that the connection belongs to.
        """
        self._see, self._page_seconds, self._holdings = see, page_seconds, holdings
        self.core.holdings = holdings.core
        page_seconds.has(self)
        channel.serve_by(_SERVE, int(ffi.cast("uintptr_t", self.core)), OPERATIONS)
        if not lib.sym_gate_listen(self.core.gate, self.core, channel.doorbell):
            raise MemoryError("no memory for one more connection")

    def ignore(self) -> None:
        """Let only Python read the program's requests."""
        if self.core.gate:
            lib.sym_gate_ignore(self.core.gate, self.core)

    def is_of(self, program: str) -> None:
        """Note which program opens files by these handles."""
        self.core.program_id = int(program, 16)

    def make_for(self, creds: Credentials, account: Account) -> None:
        """Charge forks without a name to this account from now on."""
        self._account = account
        maker = self.core.maker
        maker.account, maker.uid, maker.gid = account.core, creds.uid, creds.gid

    def close(self) -> None:
        """Stop counting the branches' page-seconds, because the last handle and the channel are closed."""
        if self._page_seconds is not None:
            self._page_seconds.has_no_more(self)

    # ---- by number

    def add(self, file: OpenKv) -> int:
        """Return the number of a new handle. Numbers are never used again, so a stale number is an error."""
        number = int(lib.sym_handle_new(self.core, file.table.core, file.writable))
        if not number:
            raise MemoryError("no memory for one more handle")
        self._seen[number] = file
        return number

    def __getitem__(self, number: int) -> OpenKv:
        found = self._seen.get(number)
        if found is None:
            core = lib.sym_handle_find(self.core, number % 2**64)
            if not core:
                raise KeyError(number)
            assert self._see is not None
            assert self._page_seconds is not None
            inode, kv = self._see(core)
            found = self._seen.get(number)  # `see` may have asked for this handle itself
            if found is None:
                found = self._seen[number] = OpenKv(inode, kv, writable=True, origin=None)
                lib.sym_handle_seen(self.core, number)
                self._page_seconds.opened(found.table)
        return found

    def get(self, number: int) -> OpenKv | None:
        """Return the handle's file. None: no handle with this number is open."""
        try:
            return self[number]
        except KeyError:
            return None

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._numbers(len(self), lib.SYM_ALL_HANDLES)))

    def _numbers(self, count: int, which: int) -> list[int]:
        numbers = ffi.new("uint64_t[]", count)
        return list(numbers[0 : lib.sym_handles_list(self.core, which, numbers, count)])

    def __len__(self) -> int:
        return int(self.core.num_handles)

    def known(self) -> Iterator[tuple[int, OpenKv]]:
        """Yield the handles whose files have Python objects. A program may have a million other handles."""
        return ((number, self[number]) for number in sorted(self._numbers(len(self), lib.SYM_KNOWN_FILES)))

    def idle_branches(self, count: int) -> list[OpenKv]:
        """Return the files of the `count` branches whose last use is the oldest."""
        numbers = ffi.new("uint64_t[]", count)
        return [self[number] for number in numbers[0 : lib.sym_branches_idle(self.core, numbers, count)]]

    def remove(self, number: int) -> None:
        """Forget a handle whose file has Python objects."""
        del self._seen[number]
        lib.sym_handle_forget(self.core, number)

    # ---- all handles, after the program has gone

    def take(self, count: int) -> list[OpenKv]:
        """Forget up to `count` handles and return their files. Branches get the Python objects that they lack."""
        if len(self._seen) < count:
            for number in self._numbers(count, lib.SYM_UNSEEN_HANDLES):
                self[number]
        taken = list[OpenKv]()
        while self._seen and len(taken) < count:
            number, file = self._seen.popitem()
            lib.sym_handle_forget(self.core, number)
            taken.append(file)
        return taken

    def close_branches(self, count: int) -> int:
        """Close up to `count` branches that exist in the core alone. Return how many were closed."""
        num_closed = int(lib.sym_branches_close(self.core, count))
        assert num_closed >= 0, "a branch can't be closed"
        return num_closed

    # ---- what branches cost

    def page_seconds(self) -> tuple[float, int]:
        """Return the page-seconds of branches for the time in which these had no Python objects.

        Also return the number of pages of the branches that have no Python objects now.
        """
        return float(lib.sym_branches_page_seconds(self.core)), int(self.core.num_pages)

    def branch_pages(self) -> IntArray:
        """Return the pages of the branches without Python objects. Shared pages are repeated."""
        found = np.empty(self.page_seconds()[1], np.int32)
        lib.sym_branches_pages(self.core, pointer(found))
        return found
