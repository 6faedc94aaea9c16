"""Simulation: the replay of a workload. Turns arrive, wait for pages, are computed in steps, and end.

The loop is closed: a program's next turn arrives when the previous turn has ended and a pause has passed. The daemon's
planner plans the steps, and its cost model times them. While only decodes run and no other event is due, all
steps are alike. Then the simulation advances by many steps in one leap.

The simulation leaves out hints, writing ahead, extracts and merges.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvfs.tiers.policy import FloatArray, Rank
from libsym.errors import NoSpace
from scheduler.batch.policy import CANDIDATE, NO_DEADLINE, Policy, new_shares
from symphony.policy.machine import Machine
from symphony.policy.memory import Memory
from symphony.policy.workload import Turn, Workload


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Result of a replay."""

    seconds: float
    latency_s: FloatArray
    """Latency of each turn: the time from its arrival to its end."""
    num_resumes: int
    """Turns on files that already had computed entries."""
    num_hidden: int
    """Resumes that neither waited for a page nor recomputed an entry."""
    num_appended: int
    num_generated: int
    num_again: int
    """Tokens that were recomputed, since their pages had been evicted."""
    num_in: int
    num_out: int
    num_frames: int
    most_used: int
    num_decisions: int
    num_steps: int


@dataclass(slots=True)
class _Running:
    """Turn that has arrived and has not ended."""

    program: int
    turn: Turn
    came_s: float
    is_resume: bool
    order: tuple[int, int]
    """Sort key for admission: priority, then arrival."""
    left: int = 0
    """Number of entries that the turn must still compute before its first token."""
    num_again: int = 0

    def __lt__(self, other: _Running) -> bool:
        return self.order < other.order


class Simulation:
    """Replay of a workload under one policy. `num_frames`: memory, in pages. `rank`: the policy; None: no tiers."""

    def __init__(self, workload: Workload, machine: Machine, num_frames: int, rank: Rank | None) -> None:
        self._programs = workload.programs
        self._machine = machine
        self._memory = Memory(workload.segments, num_frames, machine, rank)
        self._policy = Policy(machine.limits, machine.cost)
        self._shares = new_shares([-1, 0, *[1] * len(self._programs)])
        self._next = [0] * len(self._programs)
        self._needed_by = Counter(
            segment for program in self._programs for turn in program.turns for segment in turn.chain
        )
        self._named = [segment.is_named for segment in workload.segments]
        self._sizes = [(segment.start, segment.size) for segment in workload.segments]
        self._events: list[
            tuple[float, int, int, _Running | None]
        ] = []  # heap of (time, tie-breaker, program, turn whose pages are in memory; None: a turn arrives)
        self._num_events = 0
        self._waiting: list[_Running] = []
        self._calls = np.zeros(0, CANDIDATE)
        self._left = np.zeros(0, np.int64)  # [calls]: tokens that each call has still to draw
        self._members: list[_Running] = []
        self._read: Counter[int] = Counter()
        """Number of decodes that read each segment."""
        self._num_entries = 0
        """Number of distinct entries that decodes read."""
        self._now_s = 0.0
        self._num_steps = self._num_resumes = self._num_hidden = self._num_again = 0
        self._latency_s: list[float] = []

    def run(self) -> ReplayOutcome:
        """Replay the workload. NoSpace: a single turn needs more memory than the machine has."""
        for number, program in enumerate(self._programs):
            if program.turns:
                self._come_later(number, program.turns[0].pause_s)
        while self._events or self._members:
            if not self._members:
                self._now_s = max(self._now_s, self._events[0][0])
            while self._events and self._events[0][0] <= self._now_s:
                _, _, program_number, ready = heappop(self._events)
                if ready is None:
                    self._come(program_number)
                else:
                    self._join(ready)
            if self._members:
                self._step()
            if self._waiting and not self._members and not self._events:
                need = self._waiting[0].turn
                raise NoSpace(f"a turn on {need.after:,} entries does not fit into the memory: give more with --memory")
        memory, turns = self._memory, [turn for program in self._programs for turn in program.turns]
        return ReplayOutcome(
            seconds=self._now_s,
            latency_s=np.array(self._latency_s),
            num_resumes=self._num_resumes,
            num_hidden=self._num_hidden,
            num_appended=sum(turn.num_appended for turn in turns),
            num_generated=sum(turn.num_generated for turn in turns),
            num_again=self._num_again,
            num_in=memory.num_in,
            num_out=memory.num_out,
            num_frames=memory.num_frames,
            most_used=memory.most_used,
            num_decisions=memory.num_decisions,
            num_steps=self._num_steps,
        )

    # ---- arrivals of turns ----

    def _come_later(self, program: int, at_s: float, ready: _Running | None = None) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, self._num_events, program, ready))

    def _come(self, program: int) -> None:
        turn = self._programs[program].turns[self._next[program]]
        self._next[program] += 1
        self._num_events += 1
        is_resume = self._memory.has_any(turn)
        found = _Running(program, turn, self._now_s, is_resume, (-turn.priority, self._num_events))
        insort(self._waiting, found)
        self._admit()

    def _admit(self) -> None:
        """Admit waiting turns by priority and arrival, until a turn lacks memory.
        Behind that turn, only turns whose pages are all in memory are admitted. Turns that miss few pages wait.
        """
        place = 0
        while place < len(self._waiting):
            found = self._waiting[place]
            taken = (
                None if place and not self._memory.is_here(found.turn) else self._memory.take(found.turn, self._now_s)
            )
            if taken is None:
                place += 1
                continue
            self._waiting.pop(place)
            found.left = found.turn.num_appended + taken.num_compute
            found.num_again = taken.num_again
            self._num_again += taken.num_again
            if found.is_resume:
                self._num_resumes += 1
                waits = taken.ready_s > self._now_s or self._now_s > found.came_s
                self._num_hidden += not waits and not taken.num_again
            if taken.ready_s <= self._now_s:
                self._join(found)
            else:
                self._come_later(found.program, taken.ready_s, found)

    def _join(self, found: _Running) -> None:
        calls = np.zeros(len(self._calls) + 1, CANDIDATE)  # concatenate() would drop the padding of records
        calls[:-1] = self._calls
        call = calls[-1:]
        call["since_ns"] = call["begun_ns"] = round(found.came_s * 1e9)
        call["deadline_ns"] = NO_DEADLINE
        call["share"], call["priority"] = 2 + found.program, found.turn.priority
        call["length"] = found.turn.before + found.turn.num_appended - found.left
        call["left"] = found.left
        self._calls = calls
        self._left = np.append(self._left, found.turn.num_generated)
        self._members.append(found)

    # ---- steps ----

    def _step(self) -> None:
        calls = self._calls
        is_decode = calls["is_decode"] == 1
        num_decodes = int(is_decode.sum())
        if num_decodes == len(calls) <= self._machine.limits.max_calls:
            now, num_steps = np.ones(len(calls), np.int32), self._leap()
        else:
            now, num_steps = self._policy.plan(calls, self._shares, round(self._now_s * 1e9)), 1
        seated = now > 0
        decodes, prefills = seated & is_decode, seated & ~is_decode
        rows = now[prefills].astype(np.int64)
        num_pairs = int((rows * calls["length"][prefills] + rows * (rows + 1) // 2).sum())
        num_seated = int(decodes.sum())
        middle = (num_steps - 1) // 2 * num_seated  # mean growth: each step adds an entry to each decode
        step_s = self._machine.step_s(
            num_rows=int(now.sum()),
            num_wanted=num_seated + int((rows == calls["left"][prefills]).sum()),
            num_entries=(self._num_entries * num_seated // num_decodes + middle) if num_decodes else 0,
            num_seen=int(calls["length"][decodes].sum()) + middle,
            num_pairs=num_pairs,
        )
        self._now_s += num_steps * step_s
        self._num_steps += num_steps
        calls["length"] += now * num_steps
        calls["left"][prefills] -= now[prefills]
        calls["since_ns"][decodes] = round(self._now_s * 1e9)
        self._left[decodes] -= num_steps
        self._num_entries += num_seated * num_steps
        self._end_some(prefills & (calls["left"] == 0), decodes & (self._left == 0))

    def _leap(self) -> int:
        """Return the number of steps until a decode ends or an event is due."""
        most = int(self._left.min())
        if not self._events:
            return most
        num_seen = int(self._calls["length"].sum())
        count = len(self._calls)
        step_s = self._machine.step_s(count, count, self._num_entries, num_seen)
        return max(1, min(most, math.ceil((self._events[0][0] - self._now_s) / step_s)))

    def _end_some(
        self, computed: np.ndarray[tuple[int], np.dtype[np.bool_]], drawn: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> None:
        """End turns that are over. The other turns whose prefill is computed begin to decode."""
        over = drawn | (computed & (self._left == 0))
        begins = computed & ~over
        self._calls["is_decode"][begins] = self._calls["left"][begins] = 1
        self._calls["begun_ns"][begins] = round(self._now_s * 1e9)
        for place in np.flatnonzero(begins).tolist():
            self._read_begins(self._members[place].turn)
        if not over.any():
            return
        ended = [(self._members[place], bool(drawn[place])) for place in np.flatnonzero(over).tolist()]
        self._calls, self._left = self._calls[~over], self._left[~over]
        self._members = [member for member, is_over in zip(self._members, over.tolist(), strict=True) if not is_over]
        for member, was_decode in ended:
            if was_decode:
                self._read_ends(member.turn)
            self._end(member)
        self._admit()

    def _end(self, member: _Running) -> None:
        turn, program = member.turn, member.program
        self._memory.give_back(turn, self._now_s)
        self._latency_s.append(self._now_s - member.came_s)
        for segment in turn.chain:
            self._needed_by[segment] -= 1
            if not self._needed_by[segment] and not self._named[segment]:
                self._memory.drop(segment)
        turns = self._programs[program].turns
        if self._next[program] < len(turns):
            self._come_later(program, self._now_s + turns[self._next[program]].pause_s)

    def _read_begins(self, turn: Turn) -> None:
        for segment in turn.chain:
            if not self._read[segment]:
                start, size = self._sizes[segment]
                self._num_entries += min(size, turn.before + turn.num_appended - start)
            self._read[segment] += 1

    def _read_ends(self, turn: Turn) -> None:
        for segment in turn.chain:
            self._read[segment] -= 1
            if not self._read[segment]:
                start, size = self._sizes[segment]
                self._num_entries -= min(size, turn.after - start)
