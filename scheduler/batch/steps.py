"""The steps of a run: counts, the latest ones, and how long they may take."""

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
    """Steps by number. Seats, which say whose calls a step had, are noted while the run is traced."""

    def __init__(self, loop: Any) -> None:
        """`loop`: a `sym_loop`."""
        self._loop = loop

    def counts(self) -> Any:
        """Give the `sym_counts`."""
        return lib.sym_loop_counts(self._loop)

    def may_take(self, step_s: float) -> None:
        """Let steps take so long from the next one on: see `Limits.step_s`."""
        lib.sym_loop_set_step_ns(self._loop, round(step_s * 1e9))

    def since(self, number: int) -> npt.NDArray[np.void]:
        """Give the latest steps from a number on, as far as they are known: of STEP."""
        return self._read(number, None)

    def trace(self, is_traced: bool) -> None:
        """Whether seats are noted, too."""
        lib.sym_loop_trace(self._loop, is_traced)

    def traced_since(self, number: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Give steps as `since` does, and their seats, of SEAT: `first_seat` says where a step's begin."""
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
