"""The load of this machine, as other machines of its fleet see it."""

from __future__ import annotations

import math
import time
from typing import Protocol

import numpy as np

from scheduler.batch.accounting import Statistics
from scheduler.batch.cost_model import RECORD, Floats, Records
from symphony.fleet.membership import Load

WINDOW_S = 1.0
"""Least time over which a load is a mean."""
CHUNK_ROWS, CHUNK_SEES = 512, 2048
"""A typical chunk of a prompt, for the time of a row: its rows, and the entries that each of them sees."""
LITTLE = 0.05
"""Mean number of calls that counts as no call: a program that calls now and then."""
PARTS = 8
"""Steps between a number and its double: numbers that change by less than an eighth mostly stay the same."""


class Costs(Protocol):
    """The cost model of steps."""

    def predict(self, records: Records) -> Floats:
        """Predict the nanoseconds of steps."""
        ...


class Loaded(Protocol):
    """The numbers of a `BatchScheduler`."""

    @property
    def cost(self) -> Costs: ...

    @property
    def statistics(self) -> Statistics: ...

    @property
    def num_rows_waiting(self) -> int: ...


class LoadMeter:
    """Measures the load between two readings."""

    def __init__(self, batches: Loaded) -> None:
        self._batches = batches
        self._read_s, self._counts = time.monotonic(), (0, 0, 0.0)
        self._calls, self._busy, self._mean_us = 0.0, 0.0, 0.0

    def read(self) -> Load:
        """Return the load of the last seconds."""
        now_s = time.monotonic()
        if now_s - self._read_s >= WINDOW_S:
            self._measure(now_s)
        records = np.zeros(2, RECORD)
        records["num_rows"], records["num_wanted"] = (1, CHUNK_ROWS), (1, 1)
        records["num_pairs"] = (0, CHUNK_ROWS * CHUNK_SEES)
        first_us, chunk_us = self._batches.cost.predict(records) * 1e-3
        row_us = chunk_us / CHUNK_ROWS
        step_us = first_us + self._busy * max(self._mean_us - first_us, 0.0)
        backlog_us = self._batches.num_rows_waiting * row_us
        calls = math.ceil(self._calls * self._busy - LITTLE)
        return Load(*map(coarse, (calls, step_us, row_us, backlog_us)))

    def _measure(self, now_s: float) -> None:
        numbers = self._batches.statistics
        counts = numbers.num_steps, numbers.num_calls_in_steps, numbers.step_s
        num_steps, num_calls, step_s = (new - old for new, old in zip(counts, self._counts, strict=True))
        self._busy = min(step_s / (now_s - self._read_s), 1.0)
        self._calls = num_calls / num_steps if num_steps else 0.0
        self._mean_us = step_s / num_steps * 1e6 if num_steps else 0.0
        self._read_s, self._counts = now_s, counts


def coarse(number: float) -> int:
    """Round a number to one of PARTS numbers between two powers of two."""
    whole = round(number)
    if whole <= PARTS:
        return max(whole, 0)
    unit: int = (1 << (whole.bit_length() - 1)) // PARTS
    return round(whole / unit) * unit
