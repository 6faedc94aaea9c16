"""Stays: branches in the run that have no objects in Python, and how Python takes a stay over.

C begins a stay's first call, the run answers this call and the next calls, and C commits the computed entries. Python
takes a stay over when anything else has to be done. Then the branch gets its objects, and the stay becomes a `Member`
with a `PredCall`, as if the gate had begun it. `scheduler/core/stays.h` has C's part.
"""

from __future__ import annotations

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
from scheduler.batch.call import Caller, CallingConnection, PendingCall, PredCall
from scheduler.batch.group import GroupCall
from scheduler.batch.shares import Shares

NO_LIMIT = (1 << 63) - 1


class Connected(NamedTuple):
    """Connection whose calls C may begin."""

    caller: CallingConnection
    core: Any
    """State of the connection in C, a `sym_connection`."""
    asked: Callable[[Request], PendingCall]
    """Function that makes Python's object of a request that C took."""
    account: Account


class Stays:
    """All stays of a run, and the connections that may have stays, on the trio thread."""

    def __init__(self, fs: FileSystem, loop: Any, vocab_size: int, shares: Shares, accounting: Accounting) -> None:
        self._fs = fs
        self._loop = loop
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
        """Connections by their number in the run."""

    def __len__(self) -> int:
        return int(self.gate.num_stays)

    # ---- connections

    def connect(self, connected: Connected, number: int) -> None:
        """Let C begin calls of a connection. `number`: the connection's number in the run."""
        caller, core = connected.caller, connected.core
        core.gate, core.in_run, core.program = self.gate, number, caller.pid
        core.server = ffi.cast("sym_server *", address(caller.channel.memory[0]))
        core.share = self._shares.of(caller.program, connected.account)
        self._connected[number] = connected

    def pay(self, caller: Caller, account: Account) -> None:
        """Change the account that pays for a connection's branches. The connection has no branches now."""
        number = next((number for number, each in self._connected.items() if each.caller is caller), None)
        if number is None:
            return
        connected = self._connected[number]
        self.count()
        self._shares.over(connected.caller.program)
        connected.core.share = self._shares.of(connected.caller.program, account)
        self._connected[number] = connected._replace(account=account)

    def disconnect(self, number: int) -> None:
        """Forget a connection that has gone, after Python has taken over its stays."""
        self.count()
        connected = self._connected.pop(number, None)
        if connected is not None:
            self._shares.over(connected.caller.program)

    def caller(self, number: int) -> CallingConnection | None:
        """Return a connection by its number in the run."""
        connected = self._connected.get(number)
        return None if connected is None else connected.caller

    # ---- stays and their work

    def at(self, index: int) -> Any:
        """Return the `sym_stay` at a place in the run, or NULL."""
        return lib.sym_stay_at(self.gate, index)

    def cores(self, caller: Caller | None = None) -> Iterator[Any]:
        """Yield the tables of the stays of one connection or of all. Meanwhile the caller may take over each stay."""
        core = next((each.core for each in self._connected.values() if each.caller is caller), None)
        if caller is not None and core is None:
            return
        at = -1
        while (at := lib.sym_stays_next(self.gate, core or ffi.NULL, at + 1)) >= 0:
            yield self.at(at).table

    def show(self, *, copying: bool = False) -> None:
        """Commit the computed entries of stays. `copying`: only stays that hold the source page of a copy."""
        if self.gate.num_stays:
            lib.sym_stays_show(self.gate, copying)
            self._fs.pool.take_news()

    def count(self) -> None:
        """Count the usage of calls that C began."""
        core, self.gate.used = self.gate.used, ffi.NULL
        while core:
            core.is_used = False
            used, connected = core.used, self._connected[core.in_run]
            self._accounting.count_used(connected.caller.program, connected.account, used)
            used.calls = used.tokens_in = used.tokens = used.steps = used.compute_ns = used.queue_ns = 0
            core = core.next_used

    def group_call(self, ended: Any) -> GroupCall | None:
        """Return the batch's call that a member has left unanswered; None: there is no such call.

        `ended`: a `sym_member`.
        """
        connected = self._connected.get(ended.connection)
        if not ended.decode.group:
            return None
        if connected is None:
            lib.sym_group_abandon(ended.decode.group)
            return None
        asked = connected.asked(Request(Op.PRED_BATCH, 0, ended.decode.group.id, 0, (0, 0, 0, 0), b"", ended.stream))
        return GroupCall(self._loop, ended.decode, asked)

    # ---- taking over a stay

    def adopt(self, stay: Any) -> PredCall:
        """Take over a stay, whose branch has objects now. Return its call."""
        caller, _, make, account = self._connected[stay.member.connection]
        member, table = stay.member, stay.table
        asked = make(Request(Op.PRED, ROWS_LAST, member.call_id, stay.handle, (1, 0, 0, 0), b"", member.stream))
        tokens = np.array(list(stay.tokens[0 : member.num_tokens]), np.int32)
        call = PredCall(caller, caller.file(stay.handle), tokens, None, 1, asked.answer)
        call.loop(asked)
        call.num_slots = 0 if member.decode.slot < 0 else 1
        call.number, call.stream = member.number, member.stream
        call.take_slots(member.decode.slot)
        call.enter(member.arrived_ns * 1e-9)
        self._shares.of(caller.program, account)
        lib.sym_stay_adopted(self.gate, stay)
        assert call.file.table.core == table
        return call
