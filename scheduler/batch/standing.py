"""The standing run as the scheduler sees it: calls join it and leave it, and what it has computed is committed.

The steps themselves are C's: see `loop.c`. Files do not show what was computed by themselves: `sync` brings them up to
date, before anybody looks at them.
"""

from __future__ import annotations

import os
import threading
import time
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
from scheduler.batch.policy import Limits
from scheduler.batch.scratch import Scratch
from scheduler.batch.shares import Shares
from scheduler.batch.states import CallState, Early
from scheduler.batch.stays import Connected, Stays
from scheduler.batch.steps import Steps

WAIT_PERCENT = 25
"""Share of a step that the next one may wait for programs that usually come back so soon, where it is worth it."""
WAIT_MIN_NS = 300_000
"""A program in Python needs some 0.2 ms after a step that has pushed its code out of the caches."""
WAIT_MAX_NS = 20_000_000
MAX_CREW = 8
"""Threads that draw for a decoder that lends none, where there are cores for them: one takes 2 ms for 64 rows of 49,152
logits."""
_MAX_NEWS = 256
LEAVE_ANSWERED, LEAVE_NOW = int(lib.SYM_LEAVE_ANSWERED), int(lib.SYM_LEAVE_NOW)


class StandingRun:
    """The run as Python sees it, on the trio thread."""

    def __init__(self, fs: FileSystem, accounting: Accounting, vocab_size: int, limits: Limits) -> None:
        self._fs = fs
        self._accounting = accounting
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
        """Stays: branches in the run that have no member here."""
        self._members: dict[int, Member] = {}
        """By their place."""
        self._of: dict[PageTable, Member] = {}
        self._news, self._look = ffi.new("sym_news[]", _MAX_NEWS), ffi.new("sym_news *")
        self._connections: dict[Caller, int] = {}
        """Numbers of connections in the run."""
        self._synced = self._copies_synced = 0
        self._copying: set[Member] = set()
        """Members whose tail's copy is not committed: they hold the page that it was made from."""
        self._ended: list[Member] = []
        """To be settled."""
        self._low: list[Member] = []
        self._thread: threading.Thread | None = None
        self._crew: Crew | None = None
        """Of a decoder that has no threads to lend."""
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
        """Return Python's exception that the last step failed with, once."""
        return None if self._native is None else self._native.take_failure()

    def close(self) -> None:
        """A step that has begun is waited for."""
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
        """A call that has room is part of the run until there are news of its end."""
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
        """Make a member of a stay, which Python takes over."""
        call = self.stays.adopt(stay)
        member = Member(call, 0, self._scratch, -1, stay)
        self._members[member.index] = self._of[call.file.table] = member
        if call.reservation is not None and call.reservation.copies:
            self._copying.add(member)
        self._show(member, self._look_at(member))
        return member

    def _adopted(self, index: int) -> Member | None:
        """Return the member of a place, if need be of a stay that is there."""
        if stay := self.stays.at(index):
            self._fs.volume.see(stay.table)
        return self._members.get(index)

    def take_over(self, caller: Caller | None = None) -> None:
        """Make members of all stays of a connection, or of all that there are."""
        for core in self.stays.cores(caller):
            self._fs.volume.see(core)

    def take(self, member: Member, call: FileCall) -> bool:
        """Whether a member waits for this call, which came by the gate: then it is the run's now."""
        loop = member.loop
        if loop is None or not isinstance(call, PredCall) or call.run_kind != lib.SYM_PROGRAM:
            return False
        found = ffi.new("sym_hot_call *")
        found.id, found.slot, found.token = call.request_id, call.slot, int(call.tokens[0])
        found.stream = call.stream
        found.row = ffi.from_buffer("float[]", call.rows[0], require_writable=True)
        position = -1 if call.positions is None else int(call.positions[0])
        server = ffi.cast("sym_server *", address(call.channel.memory[0]))
        taken = bool(lib.sym_loop_inject(self.loop, member.index, server, call.handle, found, position))
        if taken:
            call.entered()
        return taken

    def leave(self, member: Member, how: int) -> bool:
        """Ask a member to leave. True: the member has ended, and may be taken back; else there will be news."""
        return bool(lib.sym_loop_leave(self.loop, member.index, how))

    def leave_soon(self, member: Member) -> None:
        """Have a member leave as soon as its call is answered, and settle it later: now a queue may be looked at."""
        if self.leave(member, LEAVE_ANSWERED):
            self._ended.append(member)
            self._ring()

    def _ring(self) -> None:
        if self._thread is not None:
            self.stays.gate.is_rung = True
            os.eventfd_write(self._wake_fd, 1)

    def take_back(self, member: Member) -> None:
        """A member that has ended: what it was is in its record, and what counts is in its file."""
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
            member.loop.caller.wake()  # the run looks at its ring no more
        elif isinstance(call, GenerateCall):
            self.aside.remove(call.number)

    def find_taken(self, channel: ServerChannel, call_id: int) -> Member | None:
        """The member that computes this call of a program."""
        loops = (each.loop for each in self._members.values())
        if not self.stays and not any(loop is not None and loop.channel is channel for loop in loops):
            return None
        server = ffi.cast("sym_server *", address(channel.memory[0]))
        return self._adopted(int(lib.sym_loop_find(self.loop, server, call_id % 2**64)))

    def state_of(self, member: Member) -> CallState | None:
        """Give the state of a member's call as its program sees it: queued until there is a decoder. None: answered."""
        if not self.is_running:
            return CallState.QUEUED
        return None if self._look_at(member).state == lib.SYM_WAITING else CallState.RUNNING

    def has_ended(self, member: Member) -> bool:
        """Whether a member may be taken back. One that ends in the step under way may be later: there will be news."""
        return bool(self._look_at(member).has_ended)

    def thinks_ns(self, member: Member, now_ns: int) -> int | None:
        """Give how long a member's program has had its answer; None: something is computed for it."""
        if not self.is_running:
            return None
        answered_ns = int(self._look_at(member).answered_ns)
        return now_ns - answered_ns if answered_ns else None

    def _look_at(self, member: Member) -> Any:
        """Return a member's `sym_news`, good until the next look."""
        lib.sym_loop_look(self.loop, member.index, self._look)
        return self._look[0]

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    @property
    def members(self) -> list[Member]:
        self.take_over()
        return list(self._members.values())

    # ---- what has come of them

    def sync(self) -> None:
        """Let files show what was computed so far, and counters what was used."""
        progress = lib.sym_loop_progress(self.loop)
        if progress != self._synced:
            self._synced = progress
            self._take_news(of_all=True)
            if self._ended or self._low:
                self._ring()  # the run does not any more: the news is taken
            self.stays.show()
        self.stays.count()

    def sync_file(self, table: PageTable) -> None:
        """Let one file show what was computed so far, and members give back pages that they copied from; of all else
        members are told later.
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
        """Files show what is told of their members. That is some 10 us for each: not of all whenever one needs room."""
        count = _MAX_NEWS
        while count == _MAX_NEWS:
            count = int(lib.sym_loop_news(self.loop, self._news, _MAX_NEWS, of_all))
            for at in range(count):
                news = self._news[at]
                member = self._members.get(news.index)
                if member is not None:
                    self._show(member, news)
                elif (member := self._of_stay(news)) is None:
                    continue  # it was taken back in the meantime, or its stay goes on
                if news.is_rung and member.loop is not None:
                    member.loop.caller.wake()
                if news.state == lib.SYM_ENDED:
                    self._ended.append(member)
                elif news.is_low and not member.is_low:
                    member.is_low = True
                    self._low.append(member)

    def _of_stay(self, news: Any) -> Member | None:
        """Wake the gate for a stay's program; return a member if something is to be done for the stay by Python."""
        stay = self.stays.at(news.index)
        if not stay:
            return None
        if news.state == lib.SYM_ENDED or news.is_low:
            return self._adopted(news.index)
        if news.is_rung and (caller := self.stays.caller(stay.member.connection)) is not None:
            caller.wake()
        return None

    def _show(self, member: Member, now: Any) -> None:
        """Count what a member has computed, and commit it. `now`: its `sym_news`, good until the next look."""
        call, before, num_done = member.call, int(member.counted.num_done), int(now.num_done)
        self._accounting.count_member(call, member.counted, now)
        if num_done > before:
            assert call.reservation is not None
            call.reservation.commit_first(member.log[before:num_done])
            self._fs.committed(call.file)
            self._copying.discard(member)

    async def news(self) -> tuple[list[Member], list[Member]]:
        """Wait for members that have ended, and for those that need more room soon."""
        await trio.lowlevel.wait_readable(self._wake_fd)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self.stays.gate.is_rung = False
        self._take_news(of_all=False)
        ended, self._ended = self._ended, []
        low, self._low = self._low, []
        return ended, low

    # ---- whose calls it waits for

    def gone(self, caller: Caller) -> None:
        """Forget the streams of a connection. Its stays are members now, and end as those do."""
        self.take_over(caller)
        if (connection := self._connections.pop(caller, None)) is not None:
            self.stays.disconnect(connection)
            lib.sym_loop_disconnect(self.loop, connection)

    def connect(self, connected: Connected) -> None:
        """Let the core begin calls of a connection: see `Stays`."""
        caller = connected.caller
        self._connections[caller] = number = int(lib.sym_loop_connect(self.loop))
        self.stays.connect(connected, number)

    def _connection_of(self, call: FileCall) -> int:
        """Give the number of a call's connection in the run; -1: the connection has gone."""
        if call.caller not in self._connections and call.early is not Early.GONE:
            self._connections[call.caller] = int(lib.sym_loop_connect(self.loop))
        return self._connections.get(call.caller, -1)

    def expect(self, more: int) -> None:
        lib.sym_loop_expect(self.loop, more)

    # ---- its steps

    @property
    def is_stepping(self) -> bool:
        return bool(lib.sym_loop_is_stepping(self.loop))

    def set_cost(self, cost: Any) -> None:
        """A `sym_cost`: what steps take."""
        lib.sym_loop_set_cost(self.loop, cost)

    def stepping_since(self) -> tuple[int, list[Member]]:
        """Since when, in CLOCK_MONOTONIC, the step under way has been computed, or 0; and what is in it."""
        places, count = ffi.new("int32_t[]", 1024), ffi.new("int32_t *")
        since_ns = int(lib.sym_loop_stepping_since(self.loop, places, 1024, count))
        members = [self._adopted(places[at]) for at in range(count[0])]
        return since_ns, [member for member in members if member is not None]
