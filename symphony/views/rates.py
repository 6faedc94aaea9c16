"""Rates of a daemon between two samples, and quantiles of its times.

The daemon's counters only grow, so rates are differences of two samples. Times are counted in buckets, and a sample
tells the bounds of the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

Info = Mapping[str, Any]
"""Facts about a daemon, as `sym.daemon_stat()` returns them."""


@dataclass(frozen=True, slots=True)
class TimeQuantiles:
    """Median and 99th percentile of times. None: no time was counted in the interval."""

    p50_s: float | None
    p99_s: float | None

    @classmethod
    def between(cls, bounds_s: Sequence[float], before: Sequence[int], now: Sequence[int]) -> Self:
        nums = [late - early for early, late in zip(before, now, strict=True)]
        return cls(quantile(bounds_s, nums, 0.5), quantile(bounds_s, nums, 0.99))


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a daemon in one interval."""

    seconds: float
    steps_per_s: float
    tokens_per_s: float
    prefill_per_s: float
    calls_per_s: float
    calls_a_step: float
    rows_a_step: float
    busy: float
    """Share of the interval in which steps were computed."""
    steps: TimeQuantiles
    calls: TimeQuantiles
    """Times of pred() calls and of generate() tokens, from the request to the end of the computation."""
    waits: TimeQuantiles
    """Waiting times: the parts of the times of `calls` in which no step computed the call."""

    @classmethod
    def between(cls, before: Info, now: Info) -> Self | None:
        """Return the rates between two samples. None: the samples are of different daemons, or of the same moment."""
        seconds = now["uptime_s"] - before["uptime_s"]
        if now["pid"] != before["pid"] or seconds <= 0:
            return None
        grown = {name: now[name] - before[name] for name in _COUNTERS}
        steps = max(grown["num_steps"], 1)
        stretches = sum(now["stretch_times"]["nums"]) - sum(before["stretch_times"]["nums"])
        bounds_s = now["time_bounds_s"]

        def times(name: str) -> TimeQuantiles:
            return TimeQuantiles.between(bounds_s, before[name]["nums"], now[name]["nums"])

        return cls(
            seconds=seconds,
            steps_per_s=grown["num_steps"] / seconds,
            tokens_per_s=grown["num_tokens"] / seconds,
            prefill_per_s=grown["num_prefill_tokens"] / seconds,
            calls_per_s=stretches / seconds,
            calls_a_step=grown["num_calls_in_steps"] / steps,
            rows_a_step=grown["num_tokens"] / steps,
            busy=min(1.0, grown["step_s"] / seconds),
            steps=times("step_times"),
            calls=times("stretch_times"),
            waits=times("wait_times"),
        )

    def with_times_of(self, longer: Self) -> Self:
        """Return these rates with the quantiles of a longer interval, whose counts are larger."""
        return replace(self, steps=longer.steps, calls=longer.calls, waits=longer.waits)


_COUNTERS = ("num_steps", "num_tokens", "num_prefill_tokens", "num_calls_in_steps", "step_s")


def quantile(bounds_s: Sequence[float], nums: Sequence[int], part: float) -> float | None:
    """Return a quantile: the share `part` of all times is at most this long. None: no time was counted.
    The result assumes that times are spread evenly within a bucket. For the last bucket, which has no end, it is the
    start of the bucket.
    """
    below, wanted = 0, part * sum(nums)
    if not wanted:
        return None
    for index, num in enumerate(nums[:-1]):
        if num and below + num >= wanted:
            first_s = bounds_s[index - 1] if index else 0.0
            return first_s + (bounds_s[index] - first_s) * (wanted - below) / num
        below += num
    return bounds_s[-1]


def human_time(seconds: float | None) -> str:
    """Format a time with three digits: `430 µs`, `12.3 ms`, `1.20 s`; `-` for None."""
    if seconds is None:
        return "-"
    for size, unit in ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s")):
        if seconds < 999.5 * size or size == 1.0:
            value = seconds / size
            return f"{value:.{0 if value >= 99.95 or size < 1e-3 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError


def human_count(number: float) -> str:
    """Format a number with four digits, or with three and a letter: `1234`, `56.7k`, `8.9M`."""
    if number < 9_999.5:
        return f"{number:.0f}"
    for unit in "kMGT":
        number /= 1000
        if number < 999.5:
            return f"{number:.0f}{unit}" if number >= 99.95 else f"{number:.1f}{unit}"
    return f"{number:.0f}P"
