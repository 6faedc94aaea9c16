"""Making room: members leave the run so that other calls get the members' memory or unused pages."""

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
"""Time in the run after which a call must leave its memory to a call that has waited for memory equally long."""
THINKS_S = 1.0
"""Time of thinking after which a program counts as idle while memory is short."""


class Reclaiming:
    """Reclaims pages that are reserved and unused, for calls that found no room."""

    def __init__(self, run: StandingRun, start_again: Callable[[PageTable], None]) -> None:
        """Reclaim from the members of `run`. `start_again` lets the next call of a file try once more for room."""
        self._run = run
        self._start_again = start_again
        self._short: list[PageTable] = []
        """Files whose next call found no room. The call tries again after the members have given back unused pages."""
        self._asked: set[Member] = set()
        """Members that were asked to give back unused pages, and have not done so yet."""
        self._held: list[Callable[[], None]] = []
        """Functions that continue members which left. They run after the calls that lacked room have tried again."""

    def begin(self, table: PageTable, *, of_user: bool) -> bool:
        """Have members give back unused pages, and then start this file's next call. False: no member has unused pages.

        `of_user`: the quota of the user is reached, so only members of this user can help.
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
        """Continue the call of a member that has left: now, or after the calls that lacked room have tried again."""
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
    """Preemption: members leave the run so that the pages of other calls get memory. See `Engine`."""

    def __init__(self, run: StandingRun, pool: PagePool, pager: Pager) -> None:
        self._run = run
        self._pool = pool
        self._pager = pager
        self._leaving: set[Member] = set()

    def preempt(self, num_frames: int, user: int, priority: int, waited_s: float) -> bool:
        """Have members leave until `num_frames` frames are free: see `Engine`. Return whether any member is leaving.

        The order is: members whose programs think, members of lower priority, members whose QUANTUM_S has passed.
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
        """Return the members that may leave, in the order of leaving. Priorities compare only calls of one user."""
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
        """Count the frames that only this member has pinned."""
        reservation = member.call.reservation
        if reservation is None or reservation.pinned is None:
            return 0
        return int(np.count_nonzero(self._pool.pins[reservation.pinned] == 1))

    def idle_out(self) -> None:
        """Have members of idle programs leave the run while memory is short: only then may their files leave memory."""
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
    """Return the priority of a call for memory: the priority of the call plus that of the advice for its file."""
    return call.priority + call.file.inode.advice.priority
