"""Traces that tests make up: times in milliseconds, the trace beginning at 1,000."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scheduler.trace.file import Trace, TraceWriter, read_trace
from scheduler.trace.records import ANSWER, ARRIVAL, NO_DEADLINE, SEAT, STEP, Block, BlockKind, CallKind

MS = 1_000_000
BEGAN_NS = 1_000 * MS


class TraceMaker:
    """Takes what happens, in any order."""

    def __init__(self) -> None:
        self._arrivals: list[tuple[int, ...]] = []
        self._answers: list[tuple[int, ...]] = []
        self._steps: list[tuple[tuple[float, ...], list[tuple[int, ...]]]] = []

    def arrive(self, call: int, ms: float, *, pid: int = 1, file: int = 1, tokens: int = 1) -> None:
        values = (call, _ns(ms), NO_DEADLINE, file, 0, tokens, pid, 0, 0, 0, CallKind.PREDICTION, 0)
        self._arrivals.append(values)

    def answer(self, call: int, ms: float, code: int = 0) -> None:
        self._answers.append((call, _ns(ms), 1, code))

    def step(self, began: float, ended: float, seats: Sequence[tuple[int, int, float]], prefill: int = 0) -> None:
        """`seats`: call, rows, when the call came."""
        rows = sum(num_now for _, num_now, _ in seats)
        head = (_ns(began), _ns(ended), rows, prefill, len(seats), 0, 0, 0, (ended - began) * MS * 1.1, 0)
        self._steps.append((head, [(call, num_now, 0, _ns(ms)) for call, num_now, ms in seats]))

    def write(self, path: Path) -> Path:
        steps = np.array([head for head, _ in self._steps], STEP)
        steps["first_seat"] = np.cumsum(steps["num_calls"]) - steps["num_calls"]
        seats = np.array([seat for _, found in self._steps for seat in found], SEAT)
        with path.open("wb") as file:
            writer = TraceWriter(file, {"model": "made </script> up", "clock": {"monotonic_ns": BEGAN_NS}})
            writer.add(Block.of(BlockKind.ARRIVALS, np.array(self._arrivals, ARRIVAL)))
            writer.add(Block(BlockKind.STEPS, steps, seats))
            writer.add(Block.of(BlockKind.ANSWERS, np.array(self._answers, ANSWER)))
        return path

    def trace(self, directory: Path) -> Trace:
        return read_trace(self.write(directory / "made.trace"))


def _ns(ms: float) -> int:
    return BEGAN_NS + round(ms * MS)
