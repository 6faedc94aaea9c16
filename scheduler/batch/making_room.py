"""Members leave the run so that others find room: memory that their pages are in, and pages that they do not use."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.tiers.pager import Pager
from libsym.abi import PAGE_ENTRIES
from scheduler.batch.call import FileCall
from scheduler.batch.member import Member
from scheduler.batch.standing import StandingRun

QUANTUM_S = 2.0
"""Where calls wait for memory, one that has been computed for so long lets one go before it that has waited as long."""
THINKS_S = 1.0
"""Where memory is short, a program that thinks for so long is not in the middle of anything."""


class Reclaiming:
    """Pages that are reserved and not used come back, for calls that found no room."""

    def __init__(self, run: StandingRun, start_again: Callable[[PageTable], None]) -> None:
        """`start_again`: a file's next call, which was short, has its last try."""
        self._run = run
        self._start_again = start_again
        self._short: list[PageTable] = []
        """Files whose next call found no room, and there may be some when others have given back what they don't use.
        """
        self._asked: set[Member] = set()
        """Members that are to give back theirs."""
        self._held: list[Callable[[], None]] = []
        """Members that have left, and go on when those that are short have had their turn."""

    def begin(self, table: PageTable, *, of_user: bool) -> bool:
        """Have members give back pages that they don't use yet, and then start this file's next call. False: none has
        any. `of_user`: it is the user's room that is short; what others have would not help.
        """
        holders = [
            member
            for member in self._run.members
            if member.num_spare > PAGE_ENTRIES
            and member not in self._asked
            and (not of_user or _user_of(member.call.file.table) == _user_of(table))
        ]
        if not holders and not self._asked:
            return False
        self._short.append(table)
        self._asked.update(holders)
        for member in holders:
            self._run.leave_soon(member)
        return True

    def settled(self, member: Member, go_on: Callable[[], None]) -> None:
        """A member has left and given back its room: its call goes on, now or behind the calls that are short."""
        if member not in self._asked:
            go_on()
            return
        self._asked.discard(member)
        self._held.append(go_on)
        if not self._asked:
            short, self._short = self._short, []
            held, self._held = self._held, []
            for table in short:
                self._start_again(table)
            for function in held:
                function()


class Preemption:
    """Members leave so that other calls' pages find memory: as `Engine` says."""

    def __init__(self, run: StandingRun, pool: PagePool, pager: Pager) -> None:
        self._run = run
        self._pool = pool
        self._pager = pager
        self._leaving: set[Member] = set()

    def preempt(self, num_frames: int, user: int, priority: int, waited_s: float) -> bool:
        """See `Engine`: first those leave whose programs think, then what is of lower priority, and what has
        been here for longer than it is worth.
        """
        self._leaving &= set(self._run.members)
        num_frames -= sum(self._num_frames_of(member) for member in self._leaving)
        for member in self._who_may_leave(user, priority, waited_s):
            if num_frames <= 0:
                break
            num_frames -= self._num_frames_of(member)
            self._pager.num_preempted += self._run.thinks_ns(member, time.monotonic_ns()) is None
            self._leave_soon(member)
        return bool(self._leaving)

    def _who_may_leave(self, user: int, priority: int, waited_s: float) -> list[Member]:
        """A priority is one among the calls of one user: to others it says nothing."""
        now_ns = time.monotonic_ns()
        thinking, lower, others = list[tuple[int, Member]](), list[tuple[int, Member]](), list[tuple[float, Member]]()
        for member in self._run.members:
            if member in self._leaving:
                continue
            thinks_ns = self._run.thinks_ns(member, now_ns)
            if thinks_ns is not None:
                thinking.append((-thinks_ns, member))
                continue
            is_own = _user_of(member.call.file.table) == user
            its_priority = priority_of(member.call)
            if is_own and its_priority < priority:
                lower.append((its_priority, member))
            elif waited_s > QUANTUM_S and (not is_own or its_priority == priority):
                here_s = now_ns * 1e-9 - member.entered_s
                if here_s > QUANTUM_S:
                    others.append((-here_s, member))
        found: list[Member] = []
        for group in (thinking, lower, others):
            found += [member for _, member in sorted(group, key=itemgetter(0))]
        return found

    def _num_frames_of(self, member: Member) -> int:
        """Count a member's frames that nobody else needs where they are."""
        reservation = member.call.reservation
        if reservation is None or reservation.pinned is None:
            return 0
        return int(np.count_nonzero(self._pool.pins[reservation.pinned] == 1))

    def idle_out(self) -> None:
        """Memory is short: programs that think for long keep their files from being chosen, so they leave the run."""
        now_ns = time.monotonic_ns()
        for member in self._run.members:
            if member not in self._leaving and (self._run.thinks_ns(member, now_ns) or 0) > THINKS_S * 1e9:
                self._leave_soon(member)

    def _leave_soon(self, member: Member) -> None:
        self._leaving.add(member)
        self._run.leave_soon(member)


def _user_of(table: PageTable) -> int:
    return table.pool.accounts.of(table.owner).numbers[0]


def priority_of(call: FileCall) -> int:
    """Return a call's priority where memory is short: its own, and what was said of its file."""
    return call.priority + call.file.inode.advice.priority
