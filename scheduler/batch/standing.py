"""Python's side of the standing run: calls join and leave, and computed entries are committed.

`sync` commits computed entries before a reader looks at files: until then the files do not show them. C runs the steps:
see `loop.c`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import trio

from decoder.batch import NativeStep
from decoder.cores import available_cores
from decoder.cpu.crew import Crew
from kvfs.fs import FileSystem
from kvfs.pages.table import PageTable
from libsym.channel.hot import HOT_FUNCTIONS, address
from libsym.channel.server import ServerChannel
from scheduler._loop import ffi, lib
from scheduler.batch.accounting import Accounting
from scheduler.batch.aside import Aside
from scheduler.batch.call import Caller, FileCall, PredCall
from scheduler.batch.generation import GenerateCall
from scheduler.batch.member import Member
from scheduler.batch.policy import StepLimits
from scheduler.batch.scratch import Scratch
from scheduler.batch.shares import Shares
from scheduler.batch.states import CallState, Early
from scheduler.batch.stays import Connected, Stays
from scheduler.batch.steps import Steps

WAIT_PERCENT = 25
"""Longest wait of a step, in percent of the step's time, for streams of other accounts or for the rest of a request."""
WAIT_MIN_NS = 300_000
"""Lower bound of that wait. A step evicts a Python program's code from the caches, so the program's next call takes 0.2
ms.
"""
WAIT_MAX_NS = 20_000_000
MAX_CREW = 8
"""Maximum number of threads that draw tokens if the decoder lends none. One thread takes 2 ms for 64 rows of 49,152
logits.
"""
_MAX_NEWS = 256
LEAVE_ANSWERED, LEAVE_NOW = int(lib.SYM_LEAVE_ANSWERED), int(lib.SYM_LEAVE_NOW)


class StandingRun:
    """The run, its members and its threads, on the trio thread."""

    def __init__(self, fs: FileSystem, accounting: Accounting, vocab_size: int, limits: StepLimits) -> None:
        self._fs = fs
        self._accounting = accounting
        self.vocab_size = vocab_size
        self._scratch = Scratch(vocab_size)
        self._wake_fd = -1
        self.aside = Aside()
        loop = lib.sym_loop_new(
            ffi.new(
                "sym_loop_plan *",
                {
                    "hot": ffi.cast("sym_hot_functions *", HOT_FUNCTIONS),
                    "vocab_size": vocab_size,
                    "num_pages": fs.pool.store.store.num_pages,
                    "limits": {
                        "max_calls": limits.max_calls,
                        "max_tokens": limits.max_tokens,
                        "min_chunk": limits.min_chunk,
                        "max_digested": limits.max_digested,
                        "step_ns": int(limits.step_s * 1e9),
                    },
                    "wait": (WAIT_PERCENT, WAIT_MIN_NS, WAIT_MAX_NS),
                },
            )
        )
        if loop == ffi.NULL:
            raise MemoryError("no memory for a loop over steps")
        self.loop = ffi.gc(loop, lib.sym_loop_free)
        self.shares = Shares(self.loop)
        self.steps = Steps(self.loop)
        self.stays = Stays(fs, self.loop, vocab_size, self.shares, accounting)
        """Stays: branches in the run that have no member in Python."""
        self._members: dict[int, Member] = {}
        """Members by their place in the run."""
        self._of: dict[PageTable, Member] = {}
        self._news, self._look = ffi.new("sym_news[]", _MAX_NEWS), ffi.new("sym_news *")
        self._connections: dict[Caller, int] = {}
        """Numbers of connections in the run."""
        self._synced = self._copies_synced = 0
        self._copying: set[Member] = set()
        """Members whose last page is copied from a source page, which they hold until their first commit."""
        self._ended: list[Member] = []
        """Members that have ended and are not settled yet."""
        self._low: list[Member] = []
        self._thread: threading.Thread | None = None
        self._crew: Crew | None = None
        """Threads for a decoder that has no threads to lend."""
        self._native: NativeStep | None = None

    # ---- the thread

    def start(self, native: NativeStep) -> None:
        self._native = native
        parallel, crew = native.parallel, native.decoder
        if not parallel:
            self._crew = Crew(min(available_cores(), MAX_CREW))
            parallel, crew = self._crew.parallel, self._crew.address
        self._wake_fd = os.eventfd(bool(self._ended), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.stays.gate.wake_fd, self.stays.gate.is_rung = self._wake_fd, bool(self._ended)
        self.aside.start(self.loop)
        engine = ffi.new(
            "sym_engine *",
            {
                "step": ffi.cast("sym_step_function *", native.function),
                "decoder": ffi.cast("sym_decoder *", native.decoder),
                "parallel": ffi.cast("sym_parallel_function *", parallel),
                "crew": ffi.cast("sym_decoder *", crew),
                "wake_fd": self._wake_fd,
                "guide_fd": self.aside.fd,
            },
        )
        self._thread = threading.Thread(target=lib.sym_loop_run, args=(self.loop, engine), name="step", daemon=True)
        self._thread.start()

    def take_failure(self) -> BaseException | None:
        """Return the exception of the last step if the step failed in Python. Only the first call returns it."""
        return None if self._native is None else self._native.take_failure()

    def close(self) -> None:
        """End the run and its threads, after the step under way."""
        if self._thread is not None:
            lib.sym_loop_close(self.loop)
            self._thread.join()
            self.aside.close()
            os.close(self._wake_fd)
            self._wake_fd = self.stays.gate.wake_fd = -1
            self._thread = None
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    # ---- members

    def member_of(self, table: PageTable) -> Member | None:
        return self._of.get(table)

    def join(self, call: FileCall) -> Member:
        """Let a call that has room join the run. The call is a member until there is news of its end."""
        table = call.file.table
        share = self.shares.of(call.caller.program, table.pool.accounts.of(table.owner))
        try:
            member = Member(call, share, self._scratch, self._connection_of(call))
        except BaseException:
            self.shares.over(call.caller.program)
            raise
        if call.joined_s is None:
            call.joined_s = time.monotonic()
        if isinstance(call, GenerateCall) and call.grammar is not None:
            self.aside.add(call.number, call.generation, call.decide)
        index = int(lib.sym_loop_join(self.loop, member.record))
        if index < 0:
            self._forget(member)
            raise MemoryError("no memory for one more file in the run")
        member.index = table.core.place = index
        self._members[index] = self._of[table] = member
        if call.reservation is not None and call.reservation.copies:
            self._copying.add(member)
        return member

    def adopt(self, stay: Any) -> Member:
        """Take over a stay: make a member of it."""
        call = self.stays.adopt(stay)
        member = Member(call, 0, self._scratch, -1, stay)
        self._members[member.index] = self._of[call.file.table] = member
        if call.reservation is not None and call.reservation.copies:
            self._copying.add(member)
        self._show(member, self._look_at(member))
        return member

    def _adopted(self, index: int) -> Member | None:
        """Return the member at a place. If a stay is at the place, take it over first. None: the place is free."""
        if stay := self.stays.at(index):
            self._fs.volume.see(stay.table)
        return self._members.get(index)

    def take_over(self, caller: Caller | None = None) -> None:
        """Take over all stays of a connection, or of all connections."""
        for core in self.stays.cores(caller):
            self._fs.volume.see(core)

    def take(self, member: Member, call: FileCall) -> bool:
        """Give the run a call that the gate took, if this member waits for it. Return whether the run took it."""
        loop = member.loop
        if loop is None or not isinstance(call, PredCall) or call.run_kind != lib.SYM_PROGRAM:
            return False
        begins = ffi.new("sym_beginning *", {"index": member.index, "handle": call.handle})
        begins.server = ffi.cast("sym_server *", address(call.channel.memory[0]))
        begins.position = -1 if call.positions is None else int(call.positions[0])
        found = begins.call
        found.id, found.slot, found.token = call.request_id, call.slot, int(call.tokens[0])
        found.stream = call.stream
        found.row = ffi.from_buffer("float[]", call.rows[0], require_writable=True)
        taken = bool(lib.sym_loop_begin(self.loop, begins, 1))
        if taken:
            call.entered()
        return taken

    def leave(self, member: Member, how: int) -> bool:
        """Ask a member to leave. True: the member has ended, and may be taken back. False: there will be news of its
        end.
        """
        return bool(lib.sym_loop_leave(self.loop, member.index, how))

    def leave_soon(self, member: Member) -> None:
        """Have a member leave as soon as its call is answered. The member is settled later, because a queue may be in
        use now.
        """
        if self.leave(member, LEAVE_ANSWERED):
            self._ended.append(member)
            self._ring()

    def _ring(self) -> None:
        if self._thread is not None:
            self.stays.gate.is_rung = True
            os.eventfd_write(self._wake_fd, 1)

    def take_back(self, member: Member) -> None:
        """Take an ended member out of the run. Its record then has its final state, and its entries are committed."""
        self._show(member, self._look_at(member))
        lib.sym_loop_take_back(self.loop, member.index, member.record)
        del self._members[member.index]
        member.index = -1
        member.call.promise(0)
        self._forget(member)

    def _forget(self, member: Member) -> None:
        call = member.call
        self._copying.discard(member)
        if self._of.get(call.file.table) is member:
            del self._of[call.file.table]
            call.file.table.core.place = -1
        self.shares.over(call.caller.program)
        if member.loop is not None:
            member.loop.caller.wake()  # the run may no longer watch this program's ring
        elif isinstance(call, GenerateCall):
            self.aside.remove(call.number)

    def find_taken(self, channel: ServerChannel, call_id: int) -> Iterator[Member]:
        """Yield the members that compute this call of a program: one, or several for a batch."""
        loops = (each.loop for each in self._members.values())
        if not self.stays and not any(loop is not None and loop.channel is channel for loop in loops):
            return
        server, at = ffi.cast("sym_server *", address(channel.memory[0])), -1
        while (at := int(lib.sym_loop_find(self.loop, server, call_id % 2**64, at + 1))) >= 0:
            if (member := self._adopted(at)) is not None:
                yield member

    def state_of(self, member: Member) -> CallState | None:
        """Return the state of a member's call: QUEUED until there is a decoder. None: the program has its answer."""
        if not self.is_running:
            return CallState.QUEUED
        return None if self._look_at(member).state == lib.SYM_WAITING else CallState.RUNNING

    def has_ended(self, member: Member) -> bool:
        """Return whether a member may be taken back. If a step under way holds it, there will be news later."""
        return bool(self._look_at(member).has_ended)

    def thinks_ns(self, member: Member, now_ns: int) -> int | None:
        """Return how long a member's program has had its answer. None: the run has entries to compute for it."""
        if not self.is_running:
            return None
        answered_ns = int(self._look_at(member).answered_ns)
        return now_ns - answered_ns if answered_ns else None

    def _look_at(self, member: Member) -> Any:
        """Return a member's `sym_news`, which is valid until the next call of this function."""
        lib.sym_loop_look(self.loop, member.index, self._look)
        return self._look[0]

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    @property
    def members(self) -> list[Member]:
        self.take_over()
        return list(self._members.values())

    # ---- results

    def sync(self) -> None:
        """Commit the entries that the run has computed, and update the counters."""
        progress = lib.sym_loop_progress(self.loop)
        if progress != self._synced:
            self._synced = progress
            self._take_news(of_all=True)
            if self._ended or self._low:
                self._ring()  # wakes `news`: the run does not ring for news that is read
            self.stays.show()
        self.stays.count()

    def sync_file(self, table: PageTable) -> None:
        """Commit the entries that the run has computed for one file.

        Entries of members that hold the source page of a copy are committed, too, because such members then release
        that page. News of other members is left for later.
        """
        members = {self._of[table]} if table in self._of else set()
        progress = lib.sym_loop_progress(self.loop)
        if progress != self._copies_synced:
            self._copies_synced = progress
            members |= self._copying
            self.stays.show(copying=True)
        for member in members:
            self._show(member, self._look_at(member))

    def _take_news(self, *, of_all: bool) -> None:
        """Read the news of all members, or only of those that need the scheduler, and commit what they have computed.

        Each member takes some 10 us.
        """
        count = _MAX_NEWS
        while count == _MAX_NEWS:
            count = int(lib.sym_loop_news(self.loop, self._news, _MAX_NEWS, of_all))
            for at in range(count):
                news = self._news[at]
                member = self._members.get(news.index)
                if member is not None:
                    self._show(member, news)
                elif (member := self._of_stay(news)) is None:
                    continue  # the member was taken back meanwhile, or is a stay that remains in the run
                if news.is_rung and member.loop is not None:
                    member.loop.caller.wake()
                if news.state == lib.SYM_ENDED:
                    self._ended.append(member)
                elif news.is_low and not member.is_low:
                    member.is_low = True
                    self._low.append(member)

    def _of_stay(self, news: Any) -> Member | None:
        """Handle news of a stay. Take it over and return its member if Python has to act; otherwise None."""
        stay = self.stays.at(news.index)
        if not stay:
            return None
        if news.state == lib.SYM_ENDED or news.is_low:
            return self._adopted(news.index)
        if news.is_rung and (caller := self.stays.caller(stay.member.connection)) is not None:
            caller.wake()
        return None

    def _show(self, member: Member, now: Any) -> None:
        """Count and commit what a member has computed. `now`: its `sym_news`."""
        call, before, num_done = member.call, int(member.counted.num_done), int(now.num_done)
        self._accounting.count_member(call, member.counted, now)
        if num_done > before:
            assert call.reservation is not None
            call.reservation.commit_first(member.log[before:num_done])
            self._fs.committed(call.file)
            self._copying.discard(member)

    async def news(self) -> tuple[list[Member], list[Member]]:
        """Wait for news. Return the members that have ended, and those that need more room soon."""
        await trio.lowlevel.wait_readable(self._wake_fd)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self.stays.gate.is_rung = False
        self._take_news(of_all=False)
        found, self._ended, self._low = (self._ended, self._low), [], []
        return found

    # ---- connections

    def gone(self, caller: Caller) -> None:
        """Forget the streams of a connection that has gone. Its stays become members, and end as members do."""
        self.take_over(caller)
        if (connection := self._connections.pop(caller, None)) is not None:
            self.stays.disconnect(connection)
            lib.sym_loop_disconnect(self.loop, connection)

    def connect(self, connected: Connected) -> None:
        """Let the core begin calls of a connection: see `Stays`."""
        self._connections[connected.caller] = number = int(lib.sym_loop_connect(self.loop))
        self.stays.connect(connected, number)

    def _connection_of(self, call: FileCall) -> int:
        """Return the number of a call's connection in the run. -1: the connection has gone."""
        if call.caller not in self._connections and call.early is not Early.GONE:
            self._connections[call.caller] = int(lib.sym_loop_connect(self.loop))
        return self._connections.get(call.caller, -1)

    def expect(self, more: int) -> None:
        lib.sym_loop_expect(self.loop, more)

    # ---- steps

    @property
    def is_stepping(self) -> bool:
        return bool(lib.sym_loop_is_stepping(self.loop))

    def set_cost(self, cost: Any) -> None:
        """Set the cost of steps, a `sym_cost`."""
        lib.sym_loop_set_cost(self.loop, cost)

    def stepping_since(self) -> tuple[int, list[Member]]:
        """Return the start of the step under way by CLOCK_MONOTONIC, and its members. 0: there is no step."""
        places, count = ffi.new("int32_t[]", 1024), ffi.new("int32_t *")
        since_ns = int(lib.sym_loop_stepping_since(self.loop, places, 1024, count))
        return since_ns, [member for at in range(count[0]) if (member := self._adopted(places[at])) is not None]
