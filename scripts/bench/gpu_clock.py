"""Time on a GPU, and what it is compared with: a copy's bandwidth and a large product's rate, of the same run."""

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
    """Runs what it times; under Triton's interpreter once, so that every line is run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"

    def finish(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def device_times(self, run: Callable[[int], object], *, sets: int = 1, runs: int = 60) -> Times:
        """Time on the device of `run(0) ... run(sets - 1)`, per call, replayed as one graph: no launch is in it.

        Several sets of inputs, where one would fit into the cache.
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
        """Between events around each run, all of them queued before the first is waited for."""
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
        """As the caller sees it, with what it waits for."""
        return self.in_turns([run], runs=runs)[0]

    def in_turns(self, sides: Sequence[Callable[[], object]], *, runs: int) -> list[Times]:
        """As callers see it, one after the other in every round."""
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
    """What this device does at best, of which shares are given."""

    copy_bytes_per_s: float
    """Read plus written."""
    products_flop_per_s: float
    """bf16, of random data, by the library."""


def measure_ceilings(clock: Clock, num_bytes: int, side: int) -> Ceilings:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    copy = clock.device_times(lambda _: target.copy_(source), runs=30)
    left, right = (torch.randn(side, side, device=clock.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(side, side, dtype=torch.bfloat16, device=clock.device)
    product = clock.device_times(lambda _: torch.mm(left, right.t(), out=out), runs=30)
    return Ceilings(2 * num_bytes / copy.median, 2 * side**3 / product.median)
