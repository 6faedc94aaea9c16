"""Reconstruction of the calls of a trace from its records: the arrival, computation and end of each call.

In a trace, all calls of a decode loop that runs in C have the same serial number. Their arrival times tell them apart.
If the record of an arrival is missing (it was lost, or the file is torn), the call's program is not known: the call's
`arrival` is `UNKNOWN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler.trace.file import Trace

Ints: TypeAlias = "npt.NDArray[np.int64]"

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """Columns with one element for each call, in no particular order. Times are of the daemon's monotonic clock."""

    arrival: Ints
    """Index of the call's record in `trace.arrivals`, or UNKNOWN. Calls of one loop share a record."""
    number: Ints
    arrived_ns: Ints
    ended_ns: Ints
    """End of the call. If the call was not over, the end of the trace."""
    is_over: npt.NDArray[np.bool_]
    errno: Ints
    num_rows: Ints
    """Rows that were computed for the call."""
    compute_ns: Ints
    """Total time of the steps that computed a part of the call."""
    first_seat: Ints
    num_seats: Ints
    """Number of the call's elements in `seats`, from `first_seat` on: one for each of its steps, in order."""
    seats: Ints
    """Indices into `trace.seats`, grouped by call."""
    step_of_seat: Ints
    """Step of each seat in `trace.seats`."""

    def __len__(self) -> int:
        return len(self.number)


def span_ns(trace: Trace) -> tuple[int, int]:
    """Return the time of the first and the last event of a trace. Calls may have begun before the recording."""
    began = _clock_ns(trace)
    times = [trace.arrivals["ns"], trace.answers["ns"], trace.steps["began_ns"], trace.steps["ended_ns"]]
    found = np.concatenate([*times, trace.lost["ns"]])
    if isinstance(began, int):
        found = np.append(found, began)
    return (int(found.min()), int(found.max())) if len(found) else (0, 0)


def recorded_ns(trace: Trace, otherwise: int) -> int:
    """Return the time at which the recording began, or `otherwise` if the trace does not tell it."""
    began = _clock_ns(trace)
    return began if isinstance(began, int) else otherwise


def _clock_ns(trace: Trace) -> object:
    clock = trace.header.get("clock")
    return clock.get("monotonic_ns") if isinstance(clock, dict) else None


def calls_of(trace: Trace) -> TracedCalls:
    """Reconstruct the calls of a trace."""
    seats, steps = trace.seats, trace.steps
    step_of_seat = np.repeat(np.arange(len(steps)), steps["num_calls"])
    order = np.lexsort((step_of_seat, seats["call"]))
    number, arrived = seats["call"][order], seats["arrived_ns"][order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (number[1:] != number[:-1]) | (arrived[1:] != arrived[:-1])
    first = np.flatnonzero(is_first)
    counts = np.diff(np.append(first, len(order)))
    step_ns = (steps["ended_ns"] - steps["began_ns"])[step_of_seat[order]]
    last_step = step_of_seat[order][first + counts - 1]

    # Append the calls that were never in a step.
    waiting = np.flatnonzero(~np.isin(trace.arrivals["call"], number))
    number = np.concatenate((number[first], trace.arrivals["call"][waiting]))
    arrived = np.concatenate((arrived[first], trace.arrivals["ns"][waiting]))
    computed_ns = np.concatenate((steps["ended_ns"][last_step], np.zeros(len(waiting), np.int64)))
    nothing = np.zeros(len(waiting), np.int64)
    # Of the calls with the same serial number, all but the last were answered right after their last step.
    is_last = np.ones(len(number), np.bool_)
    is_last[: len(first)][:-1] = number[: len(first)][:-1] != number[: len(first)][1:]
    answer, has_answer = _places(trace.answers["call"], number)
    has_answer &= is_last
    end_ns = span_ns(trace)[1]
    ended = np.where(is_last, end_ns, computed_ns)
    ended[has_answer] = trace.answers["ns"][answer[has_answer]]
    errors = np.zeros(len(number), np.int64)
    errors[has_answer] = trace.answers["errno"][answer[has_answer]]
    arrival, is_known = _places(trace.arrivals["call"], number)
    return TracedCalls(
        arrival=np.where(is_known, arrival, UNKNOWN),
        number=number,
        arrived_ns=np.minimum(arrived, ended),
        ended_ns=ended,
        is_over=~is_last | has_answer,
        errno=errors,
        num_rows=np.concatenate((_sums(seats["num_now"][order], first), nothing)),
        compute_ns=np.concatenate((_sums(step_ns, first), nothing)),
        first_seat=np.concatenate((first, nothing)),
        num_seats=np.concatenate((counts, nothing)),
        seats=order,
        step_of_seat=step_of_seat,
    )


def _places(numbers: Any, wanted: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the last index of each number of `wanted` in `numbers`, and whether `numbers` has it."""
    if not len(numbers):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    order = np.argsort(numbers, kind="stable")
    place = np.searchsorted(numbers, wanted, side="right", sorter=order) - 1
    found = order[np.maximum(place, 0)]
    return found, numbers[found] == wanted


def _sums(values: Any, first: Ints) -> Ints:
    """Return the sum of each group of `values`. `first`: index at which each group begins."""
    return np.add.reduceat(values.astype(np.int64), first) if len(first) else np.zeros(0, np.int64)
