#!/usr/bin/env python3
"""Measure upper limits of this machine: the rate of memory reads, and operations a second of each instruction.

    .venv/bin/python scripts/bench/limits.py [--threads N]

limits.c does the measurements. The system's compiler compiles it for each run, and no compiled file stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from harness import arguments, compiled, processor

READ_BYTES = 512 << 20
"""Number of bytes that threads read, far more than any cache holds."""


@dataclass(frozen=True, slots=True)
class Limits:
    read: float
    """Bytes a second."""
    ops: dict[str, float]
    """Operations a second of the instructions that the processor has, by name (such as `bf16 vdpbf16ps`)."""

    def peak(self, kind: str) -> float:
        """Return the operations a second of the fastest instruction of a kind: `fma`, `bf16` or `int8`. If the
        processor has no instruction of the kind, return the figure of `fma`.
        """
        rates = [rate for name, rate in self.ops.items() if name.split()[0] == kind]
        return max(rates) if rates else self.peak("fma")


class Meter:
    """The compiled limits.c, called by threads that begin together."""

    def __init__(self) -> None:
        self._lib = compiled(Path(__file__).with_suffix(".c"))
        self._lib.limit_name.restype = ctypes.c_char_p
        self._lib.limit_ops.restype = ctypes.c_double
        self._lib.limit_run.argtypes = [ctypes.c_int, ctypes.c_long]
        self._lib.limit_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def _fastest_s(self, threads: int, run: Callable[[int], object], passes: int) -> float:
        """Return the time of the fastest pass, from the first thread's start to the last one's end."""
        barrier = threading.Barrier(threads)

        def work(number: int) -> list[tuple[float, float]]:
            times_s = []
            for _ in range(passes):
                barrier.wait()
                began_s = time.perf_counter()
                run(number)
                times_s.append((began_s, time.perf_counter()))
            return times_s

        with ThreadPoolExecutor(threads) as pool:
            rounds = zip(*pool.map(work, range(threads)), strict=True)
            return float(min(max(end for _, end in each) - min(begin for begin, _ in each) for each in rounds))

    def read(self, threads: int) -> float:
        size = READ_BYTES // threads // mmap.PAGESIZE * mmap.PAGESIZE
        memory = np.ones(threads * size + mmap.PAGESIZE, np.uint8)
        first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        took_s = self._fastest_s(threads, lambda number: self._lib.limit_read(first + number * size, size), 7)
        return threads * size / took_s

    def _run(self, kind: int, rounds: int, _number: int) -> None:
        self._lib.limit_run(kind, rounds)

    def ops(self, threads: int) -> dict[str, float]:
        found = {}
        for kind in range(self._lib.limit_kinds()):
            if not (each := self._lib.limit_ops(kind)):
                continue
            rounds = 1000
            while self._fastest_s(1, partial(self._run, kind, rounds), 1) < 0.02:
                rounds *= 2
            took_s = self._fastest_s(threads, partial(self._run, kind, rounds), 5)
            found[self._lib.limit_name(kind).decode()] = each * rounds * threads / took_s
        return found

    def limits(self, threads: int) -> Limits:
        return Limits(self.read(threads), self.ops(threads))


def main() -> None:
    args = arguments(__doc__, threads=len(os.sched_getaffinity(0)), quick=False).parse_args()
    threads = 1 if args.quick else args.threads
    limits = Meter().limits(threads)
    print(processor())
    print(f"{'reads':18} {limits.read / 1e9:8.1f} GB/s, {threads} threads")
    for name, rate in limits.ops.items():
        print(f"{name:18} {rate / 1e9:8.0f} G operations/s")


if __name__ == "__main__":
    main()
