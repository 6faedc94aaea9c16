"""Steps of the run: counters, records of the latest steps, and their time limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler._loop import ffi, lib
from scheduler.batch.views import dtype_of
from scheduler.trace.records import SEAT

STEP = dtype_of("sym_step_record")
_MAX_STEPS, _MAX_SEATS = 4096, 65536

assert dtype_of("sym_seat") == SEAT


class Steps:
    """Records of steps by number. Seats, the calls of each step, are recorded while the run is traced."""

    def __init__(self, loop: Any) -> None:
        """Read the steps of `loop`, a `sym_loop`."""
        self._loop = loop

    def counts(self) -> Any:
        """Return the counters, a `sym_counts`."""
        return lib.sym_loop_counts(self._loop)

    def may_take(self, step_s: float) -> None:
        """Set the time limit of the next steps: see `StepLimits.step_s`."""
        lib.sym_loop_set_step_ns(self._loop, round(step_s * 1e9))

    def since(self, number: int) -> npt.NDArray[np.void]:
        """Return the records, of type STEP, of the steps whose number is at least `number`. Steps that the run no
        longer has are left out.
        """
        return self._read(number, None)

    def trace(self, is_traced: bool) -> None:
        """Begin or stop recording seats."""
        lib.sym_loop_trace(self._loop, is_traced)

    def traced_since(self, number: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Return steps as `since` does, and their seats as SEAT. A step's seats begin at its `first_seat`."""
        seats = np.zeros(_MAX_SEATS, SEAT)
        steps = self._read(number, seats)
        steps = steps[steps["first_seat"] >= 0]
        return steps, seats[: int(steps["num_calls"].sum())]

    def _read(self, number: int, seats: npt.NDArray[np.void] | None) -> npt.NDArray[np.void]:
        steps = np.empty(_MAX_STEPS, STEP)
        room = ffi.NULL if seats is None else ffi.cast("sym_seat *", seats.ctypes.data)
        found = ffi.cast("sym_step_record *", steps.ctypes.data)
        count = lib.sym_loop_steps(self._loop, number, found, steps.size, room, 0 if seats is None else seats.size)
        return steps[:count]
