"""Stays: branches in the run that the core alone has, and how Python takes one over.

The core begins calls for one token, answers them in the run, and commits what was computed; Python hears of a stay when
something else is to become of it. Then the branch gets its objects, and the stay is a `Member` with a `PredCall`, as if
the gate had begun it. `scheduler/core/stays.h` has the other half.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvfs.fs import FileSystem
from kvfs.pages.accounts import Account
from libsym.abi import ROWS_LAST, Op
from libsym.channel.hot import HOT_FUNCTIONS, address
from libsym.channel.server import Request
from scheduler._loop import ffi, lib
from scheduler.batch.accounting import Accounting
from scheduler.batch.call import Asked, Caller, Connection, PredCall
from scheduler.batch.shares import Shares

NO_LIMIT = (1 << 63) - 1


class Connected(NamedTuple):
    """A connection whose calls the core may begin."""

    caller: Connection
    core: Any
    """A `sym_connection`."""
    asked: Callable[[Request], Asked]
    """Makes the request that a call of the core's was, for Python."""
    account: Account


class Stays:
    """All stays of a run, on the trio thread."""

    def __init__(self, fs: FileSystem, loop: Any, vocab_size: int, shares: Shares, accounting: Accounting) -> None:
        self._fs = fs
        self._shares = shares
        self._accounting = accounting
        plan = {
            "files": fs.volume.tree.core,
            "loop": loop,
            "pool": fs.pool.core,
            "wake_fd": -1,
            "hot": ffi.cast("sym_hot_functions *", HOT_FUNCTIONS),
            "vocab_size": vocab_size,
            "max_entries": NO_LIMIT,
            "last_call": -1,
        }
        self.gate = ffi.gc(ffi.new("sym_gate *", plan), lib.sym_gate_free)
        self._connected: dict[int, Connected] = {}
        """By their number in the run."""

    def __len__(self) -> int:
        return int(self.gate.num_stays)

    # ---- connections

    def connect(self, connected: Connected, number: int) -> None:
        """Let the core begin calls of a connection."""
        caller, core = connected.caller, connected.core
        core.gate, core.in_run, core.program = self.gate, number, caller.pid
        core.server = ffi.cast("sym_server *", address(caller.channel.memory[0]))
        core.share = self._shares.of(caller.program, connected.account)
        self._connected[number] = connected

    def pay(self, caller: Caller, account: Account) -> None:
        """Another account pays for the branches of a connection, which has none now."""
        number = next((number for number, each in self._connected.items() if each.caller is caller), None)
        if number is None:
            return
        connected = self._connected[number]
        self.count()
        self._shares.over(connected.caller.program)
        connected.core.share = self._shares.of(connected.caller.program, account)
        self._connected[number] = connected._replace(account=account)

    def disconnect(self, number: int) -> None:
        """A connection has gone, and Python has taken over its stays."""
        self.count()
        connected = self._connected.pop(number, None)
        if connected is not None:
            self._shares.over(connected.caller.program)

    def caller(self, number: int) -> Connection | None:
        """Return a connection by its number in the run."""
        connected = self._connected.get(number)
        return None if connected is None else connected.caller

    # ---- what they do

    def at(self, index: int) -> Any:
        """Return the `sym_stay` of a place in the run, NULL if there is none."""
        return lib.sym_stay_at(self.gate, index)

    def cores(self, caller: Caller | None = None) -> Iterator[Any]:
        """Give the tables of the stays of a connection, or of all. Python may take over each as it is given."""
        core = next((each.core for each in self._connected.values() if each.caller is caller), None)
        if caller is not None and core is None:
            return
        at = -1
        while (at := lib.sym_stays_next(self.gate, core or ffi.NULL, at + 1)) >= 0:
            yield self.at(at).table

    def show(self, *, copying: bool = False) -> None:
        """Let files show what was computed. `copying`: of those alone that hold a page which they copied from."""
        if self.gate.num_stays:
            lib.sym_stays_show(self.gate, copying)
            self._fs.pool.take_news()

    def count(self) -> None:
        """Count what calls of the core's have used."""
        core, self.gate.used = self.gate.used, ffi.NULL
        while core:
            core.is_used = False
            used, connected = core.used, self._connected[core.in_run]
            self._accounting.count_used(connected.caller.program, connected.account, used)
            used.calls = used.tokens = used.steps = used.compute_ns = used.queue_ns = 0
            core = core.next_used

    # ---- Python takes one over

    def adopt(self, stay: Any) -> PredCall:
        """Return a stay's call: its branch has objects, and the core has the stay no more."""
        caller, _, make, account = self._connected[stay.member.connection]
        member, table = stay.member, stay.table
        payload = struct.pack("=i", stay.token)
        request = Request(Op.PRED, ROWS_LAST, member.call_id, stay.handle, (1, 0, 0, 0), payload, member.stream)
        asked, tokens = make(request), np.array([stay.token], np.int32)
        call = PredCall(caller, caller.file(stay.handle), tokens, None, 1, asked.answer)
        call.loop(asked)
        call.number, call.stream = member.number, member.stream
        call.take_slots(member.decode.slot)
        call.enter(member.arrived_ns * 1e-9)
        self._shares.of(caller.program, account)
        lib.sym_stay_adopted(self.gate, stay)
        assert call.file.table.core == table
        return call
