"""Times on a GPU, and the ceilings that they are compared with: rates of a copy and of a large product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each of many runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(0.99 * len(self.seconds)))]

    def figures(self) -> dict[str, float]:
        return {"median_us": 1e6 * self.median, "p99_us": 1e6 * self.p99, "runs": len(self.seconds)}


class Clock:
    """Clock that runs functions and measures their times. Under Triton's interpreter each function runs only once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"

    def finish(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def device_times(self, run: Callable[[int], object], *, sets: int = 1, runs: int = 60) -> Times:
        """Return the device time of one call. The calls `run(0) ... run(sets - 1)` are captured and replayed as one
        graph.

        If one set of inputs would fit into the cache, use several sets.
        """
        if not self.is_gpu:
            return self.host_times(lambda: run(0), runs=1)
        for index in range(sets):
            run(index)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(sets):
                run(index)
        return self.events(graph.replay, sets=sets, runs=runs)

    def events(self, start: Callable[[], object], *, sets: int = 1, runs: int = 60) -> Times:
        """Measure the time between events around each run; all runs are queued before the first is awaited."""
        for _ in range(3):
            start()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for before, after in marks:
            before.record()
            start()
            after.record()
        self.finish()
        return Times(tuple(before.elapsed_time(after) / 1e3 / sets for before, after in marks))

    def host_times(self, run: Callable[[], object], *, runs: int) -> Times:
        """Measure the time of a run for its caller, including the wait for the device."""
        return self.in_turns([run], runs=runs)[0]

    def in_turns(self, sides: Sequence[Callable[[], object]], *, runs: int) -> list[Times]:
        """Measure the times of several sides for their callers. In every round each side runs once."""
        seconds: list[list[float]] = [[] for _ in sides]
        for _ in range(runs if self.is_gpu else 1):
            for run, times in zip(sides, seconds, strict=True):
                self.finish()
                started = time.perf_counter()
                run()
                self.finish()
                times.append(time.perf_counter() - started)
        return [Times(tuple(times)) for times in seconds]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates of the device. Figures are shares of these."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    products_flop_per_s: float
    """Rate of the library's bf16 product of random data."""


def measure_ceilings(clock: Clock, num_bytes: int, side: int) -> Ceilings:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    copy = clock.device_times(lambda _: target.copy_(source), runs=30)
    left, right = (torch.randn(side, side, device=clock.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(side, side, dtype=torch.bfloat16, device=clock.device)
    product = clock.device_times(lambda _: torch.mm(left, right.t(), out=out), runs=30)
    return Ceilings(2 * num_bytes / copy.median, 2 * side**3 / product.median)
