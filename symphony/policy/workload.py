"""The workload of a replay: programs, each with a sequence of turns. When a turn has ended, the next turn begins after
a pause.

Turns are derived from a recorded trace. Calls on one file that follow each other closely make one turn, since a loop
over pred() makes a call for each token. Files that one process uses one after the other make one program. Files that a
process uses at the same time make separate programs, since they may proceed in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libsym.errors import Invalid
from scheduler.trace.file import Trace
from symphony.policy.segments import Segment, Segments
from symphony.traces.trace_calls import UNKNOWN, calls_of

TOGETHER_S = 0.005
"""Shortest pause between calls that ends a turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Growth of a file, first by given tokens (appended), then by generated tokens, one in each step."""

    chain: tuple[int, ...]
    """Segments that the turn reads and writes, in order."""
    before: int
    """Length of the file when the turn begins, in entries."""
    num_appended: int
    num_generated: int
    pause_s: float
    """Seconds since the program's previous turn ended; for the first turn, since the trace's first call."""
    priority: int

    @property
    def after(self) -> int:
        return self.before + self.num_appended + self.num_generated


@dataclass(frozen=True, slots=True)
class ReplayedProgram:
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    header: Mapping[str, Any]
    segments: tuple[Segment, ...]
    programs: tuple[ReplayedProgram, ...]

    @property
    def num_turns(self) -> int:
        return sum(len(program.turns) for program in self.programs)


@dataclass(slots=True)
class _Turn:
    """Turn under construction, to which calls are added."""

    file: int
    tip: int
    priority: int
    began_ns: int
    ended_ns: int
    before: int
    num_appended: int
    num_generated: int


@dataclass(slots=True)
class _Row:
    """Turns of a program under construction. The turns of its files do not overlap in time."""

    free_ns: int
    turns: list[_Turn] = field(default_factory=list)


def workload_of(trace: Trace) -> Workload:
    """Derive a workload from a trace. Invalid: no call in the trace appended anything."""
    segments = Segments()
    turns: dict[tuple[int, int], list[_Turn]] = {}
    about = {int(each["file"]): each for each in trace.files}
    began_ns: int | None = None
    for call in _calls(trace):
        began_ns = call.began_ns if began_ns is None else began_ns
        _settle(segments, about, call.file, call.before)
        call.tip = segments.append(call.file, call.num_appended + call.num_generated)
        _add(turns.setdefault((call.pid, call.file), []), call)
    if began_ns is None:
        raise Invalid("there is no call in the trace that appended anything: nothing to replay")
    segments.finish()
    rows = _rows(turns)
    programs = tuple(ReplayedProgram(tuple(_finished(row, segments, began_ns))) for row in rows)
    return Workload(trace.header, tuple(segments.all), programs)


@dataclass(slots=True)
class _Call(_Turn):
    pid: int


def _calls(trace: Trace) -> Iterator[_Call]:
    """Yield the calls of a trace that appended entries, in order of arrival."""
    calls = calls_of(trace)
    answered = dict(zip(trace.answers["call"].tolist(), trace.answers["num_entries"].tolist(), strict=True))
    first: set[int] = set()
    for place in np.lexsort((calls.number, calls.arrived_ns)).tolist():
        if calls.arrival[place] == UNKNOWN:
            continue
        arrival = trace.arrivals[calls.arrival[place]]
        number = int(calls.number[place])
        is_first = number not in first
        first.add(number)
        num_rows = int(calls.num_rows[place]) or int(answered.get(number, 0))
        if not num_rows:
            continue
        seat = calls.seats[calls.first_seat[place]] if calls.num_seats[place] else None
        before = int(arrival["num_before"]) if is_first or seat is None else int(trace.seats["length"][seat])
        num_appended = min(int(arrival["num_tokens"]), num_rows) if is_first else 0
        yield _Call(
            file=int(arrival["file"]),
            tip=0,
            priority=int(arrival["priority"]),
            began_ns=int(calls.arrived_ns[place]),
            ended_ns=int(calls.ended_ns[place]),
            before=before,
            num_appended=num_appended,
            num_generated=num_rows - num_appended,
            pid=int(arrival["pid"]),
        )


def _settle(segments: Segments, about: Mapping[int, Any], file: int, length: int) -> None:
    """Update the segments of a file to its present `length`, by a fork, a cut or an append."""
    if not segments.has(file):
        told = about.get(file)
        is_named = bool(told["is_named"]) if told is not None else False
        source, num_shared = (int(told["source"]), int(told["num_shared"])) if told is not None else (0, 0)
        if source and num_shared <= length:
            if not segments.has(source):
                first = about.get(source)
                segments.begin(source, num_shared, is_named=bool(first["is_named"]) if first is not None else True)
            if segments.length_of(source) < num_shared:  # entries from before the first record of `source`
                segments.append(source, num_shared - segments.length_of(source))
            segments.fork(file, source, num_shared, is_named=is_named)
        else:
            segments.begin(file, length, is_named=is_named)
    known = segments.length_of(file)
    if known > length:
        segments.cut(file, length)
    elif known < length:
        segments.append(file, length - known)


def _add(turns: list[_Turn], call: _Call) -> None:
    last = turns[-1] if turns else None
    if (
        last is not None
        and last.tip == call.tip
        and call.before == last.before + last.num_appended + last.num_generated
    ):
        is_loop = call.num_appended + call.num_generated == 1 or not call.num_appended
        if is_loop and call.began_ns - last.ended_ns < TOGETHER_S * 1e9:
            last.num_generated += call.num_appended + call.num_generated
            last.ended_ns = max(last.ended_ns, call.ended_ns)
            return
    turns.append(call)


def _rows(turns: Mapping[tuple[int, int], list[_Turn]]) -> list[list[_Turn]]:
    """Return the turns of each program. `turns`: turns by process and file.
    Files are assigned in the order of their first use. A file joins a program of its process whose earlier files are
    over. If there is no such program, the file begins a new program.
    """
    rows: dict[int, list[_Row]] = {}
    for (pid, _), found in sorted(turns.items(), key=lambda each: each[1][0].began_ns):
        mine = rows.setdefault(pid, [])
        free = [row for row in mine if row.free_ns <= found[0].began_ns]
        row = max(free, key=lambda each: each.free_ns) if free else _Row(0)
        if not free:
            mine.append(row)
        row.turns += found
        row.free_ns = found[-1].ended_ns
    return [row.turns for each in rows.values() for row in each]


def _finished(row: list[_Turn], segments: Segments, began_ns: int) -> Iterator[Turn]:
    before_ns = began_ns
    for each in row:
        length = each.before + each.num_appended + each.num_generated
        # A step computes at least one given token. If a turn begins within a loop, its first token counts as given.
        more = 1 if not each.num_appended else 0
        yield Turn(
            chain=segments.chain(each.tip, length),
            before=each.before,
            num_appended=each.num_appended + more,
            num_generated=each.num_generated - more,
            pause_s=max(0.0, (each.began_ns - before_ns) * 1e-9),
            priority=each.priority,
        )
        before_ns = each.ended_ns
