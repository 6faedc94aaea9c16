"""Handles of a connection: files that Python has objects of, and branches that the core alone has.

A branch is a fork without a name. Most of them live for a call or two, which the core carries out by itself; whoever
asks for such a handle here gets objects for it, and has them from then on.
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
"""Makes the objects of a branch, a `core_table`: see `Volume.see`."""


class Handles:
    """Handles by number."""

    def __init__(self) -> None:
        self.core = ffi.gc(ffi.new("sym_connection *"), lib.sym_connection_free)
        """The core's part of the connection, a `sym_connection`."""
        self._seen: dict[int, OpenKv] = {}
        self._see: See | None = None
        self._page_seconds: PageSeconds | None = None
        self._holdings: Holdings | None = None
        self._account: Account | None = None

    def serve(self, channel: ServerChannel, see: See, holdings: Holdings, page_seconds: PageSeconds) -> None:
        """Have the core carry out what it can of a program's calls, which knows the run and who pays already.

        `page_seconds`: the program's.
        """
        self._see, self._page_seconds, self._holdings = see, page_seconds, holdings
        self.core.holdings = holdings.core
        page_seconds.has(self)
        channel.serve_by(_SERVE, int(ffi.cast("uintptr_t", self.core)), OPERATIONS)
        if not lib.sym_gate_listen(self.core.gate, self.core, channel.doorbell):
            raise MemoryError("no memory for one more connection")

    def ignore(self) -> None:
        """Let Python alone look at what the program asks for."""
        if self.core.gate:
            lib.sym_gate_ignore(self.core.gate, self.core)

    def make_for(self, creds: Credentials, account: Account) -> None:
        """Have an account pay for forks without a name from now on."""
        self._account = account
        maker = self.core.maker
        maker.account, maker.uid, maker.gid = account.core, creds.uid, creds.gid

    def close(self) -> None:
        """The last handle is closed, and the channel, too."""
        if self._page_seconds is not None:
            self._page_seconds.has_no_more(self)

    # ---- by number

    def add(self, file: OpenKv) -> int:
        """Return the number of a new handle. Numbers are not used twice: a stale one is an error, no other file."""
        number = int(lib.sym_handle_new(self.core, file.table.core))
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
            found = self._seen.get(number)  # who computes with it has asked for it meanwhile
            if found is None:
                found = self._seen[number] = OpenKv(inode, kv, writable=True, origin=None)
                lib.sym_handle_seen(self.core, number)
                self._page_seconds.opened(found.table)
        return found

    def get(self, number: int) -> OpenKv | None:
        """Return the file; None: no such handle is open."""
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
        """Give the handles whose files Python has objects of: a program may have a million of others."""
        return ((number, self[number]) for number in sorted(self._numbers(len(self), lib.SYM_KNOWN_FILES)))

    def idle_branches(self, count: int) -> list[OpenKv]:
        """Return the files of other handles that were not used for longest."""
        numbers = ffi.new("uint64_t[]", count)
        return [self[number] for number in numbers[0 : lib.sym_branches_idle(self.core, numbers, count)]]

    def remove(self, number: int) -> None:
        """Forget a handle that Python has objects of."""
        del self._seen[number]
        lib.sym_handle_forget(self.core, number)

    # ---- all of them, when the program has gone

    def take(self, count: int) -> list[OpenKv]:
        """Forget so many handles, and return their files: those of branches, too, that got objects meanwhile."""
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
        """Close so many branches that the core alone has; return how many there were."""
        num_closed = int(lib.sym_branches_close(self.core, count))
        assert num_closed >= 0, "a branch can't be closed"
        return num_closed

    # ---- what branches cost

    def page_seconds(self) -> tuple[float, int]:
        """Pages times seconds of the branches, while nobody had seen them; and the pages of those that nobody has."""
        return float(lib.sym_branches_page_seconds(self.core)), int(self.core.num_pages)

    def branch_pages(self) -> IntArray:
        """Return the pages of the branches that nobody saw; shared ones more than once."""
        found = np.empty(self.page_seconds()[1], np.int32)
        lib.sym_branches_pages(self.core, pointer(found))
        return found
