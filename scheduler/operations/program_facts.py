"""Facts about programs: their identity, their usage, and the reason why they wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from libsym.abi import Op
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import Caller
from scheduler.batch.states import CallState
from scheduler.programs.program import Program

IDLE = "idle"
_STEPS = {
    CallState.RUNNING: "computing",
    CallState.SETTLING: "computing",
    CallState.QUEUED: "queued",
    CallState.WAITS_FOR_ROOM: "waiting for room",
    CallState.WAITS_FOR_PAGES: "waiting for pages",
    CallState.ZEROING: "waiting for pages",
    CallState.WAITS_FOR_SLOTS: "waiting for slots",
}
_OTHERS = {
    Op.KV_LOCK: "waiting for a lock",
    Op.KV_CLAIM: "waiting for a lock",
    Op.RECV: "waiting for a message",
    Op.WAIT: "waiting for a program",
    Op.KV_PRESSURE: "waiting for pressure",
    Op.KV_CHANGES: "waiting for changes",
    Op.SPAWN: "waiting for its launcher",
    Op.KILL: "waiting for its launcher",
}
_WORKING = "working"
"""State of a program whose call needs no step. The call works on a text, a listing or the disk."""
_ORDER = [*dict.fromkeys(_STEPS.values()), _WORKING, *dict.fromkeys(_OTHERS.values()), IDLE]
"""Order of states. A program in several states is shown in the first of these states."""
_NOT_TOLD = frozenset({Op.PRED, Op.PRED_BATCH, Op.GENERATE, Op.PROGRAMS})
"""Operations whose states the scheduler reports, and PROGRAMS, the request for these facts."""

States = Mapping[Caller, Counter[tuple[CallState, str]]]


class ProgramFacts:
    """Facts about programs for `symphony ps` and for `.symphony/proc`."""

    def __init__(self, batches: BatchScheduler) -> None:
        self._batches = batches

    def states(self) -> States:
        """Return the states of all calls. One result serves `of` for any number of programs."""
        return self._batches.states()

    def of(self, program: Program, states: States) -> dict[str, Any]:
        """Return a program's facts, in plain values."""
        facts = program.facts()
        if program.ended is None:
            facts["state"], facts["call"] = _state(program, states)
        return facts


def _state(program: Program, states: States) -> tuple[str, str | None]:
    """Return a program's state and the name of its call, with the number of such calls if there are several."""
    found: Counter[tuple[str, str]] = Counter()
    for connection in program.connections:
        for (state, word), count in states.get(connection, _NOTHING).items():  # type: ignore[call-overload]
            found[_STEPS[state], word] += count
        for op, count in connection.waits_for.items():
            if op not in _NOT_TOLD:
                found[_OTHERS.get(op, _WORKING), op.name.lower()] += count
    if not found:
        return IDLE, None
    (state, call), count = min(found.items(), key=lambda each: (_ORDER.index(each[0][0]), -each[1]))
    return state, call if count == 1 else f"{call} ({count})"


_NOTHING: Counter[tuple[CallState, str]] = Counter()
