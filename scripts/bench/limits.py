#!/usr/bin/env python3
"""Measures what this machine can do at most: memory reads, and operations of each precision's best instruction.

    .venv/bin/python scripts/bench/limits.py [--threads N]

limits.c says how; it is compiled with the system compiler when it is needed, and nothing of it is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from compiled import compiled

READ_BYTES = 512 << 20
"""Far beyond any cache, so that memory is what is read."""


@dataclass(frozen=True, slots=True)
class Limits:
    read: float
    """Bytes a second."""
    ops: dict[str, float]
    """Operations a second by instruction, such as `bf16 vdpbf16ps`; those that the processor has."""

    def peak(self, kind: str) -> float:
        """Operations a second of the best instruction for `fma`, `bf16` or `int8`; without one, of fma."""
        rates = [rate for name, rate in self.ops.items() if name.split()[0] == kind]
        return max(rates) if rates else self.peak("fma")


class Meter:
    """The compiled half."""

    def __init__(self) -> None:
        self._lib = compiled(Path(__file__).with_suffix(".c"), "-pthread")
        self._lib.limit_name.restype = ctypes.c_char_p
        self._lib.limit_ops.restype = ctypes.c_double
        self._lib.limit_read.restype = ctypes.c_double
        self._lib.limit_read.argtypes = [ctypes.c_int, ctypes.c_size_t]

    def read(self, threads: int) -> float:
        return float(self._lib.limit_read(threads, READ_BYTES))

    def ops(self, threads: int) -> dict[str, float]:
        rates = {
            self._lib.limit_name(kind).decode(): float(self._lib.limit_ops(kind, threads))
            for kind in range(self._lib.limit_kinds())
        }
        return {name: rate for name, rate in rates.items() if rate}

    def limits(self, threads: int) -> Limits:
        return Limits(self.read(threads), self.ops(threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    limits = Meter().limits(threads)
    print(f"{'reads':18} {limits.read / 1e9:8.1f} GB/s, {threads} threads")
    for name, rate in limits.ops.items():
        print(f"{name:18} {rate / 1e9:8.0f} G operations/s")


if __name__ == "__main__":
    main()
