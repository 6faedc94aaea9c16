#!/usr/bin/env python3
"""Draws from many rows of 49,152 logits, by one thread and by all of a decoder's: from how many on that pays.

Each time a step of a tiny model comes first, which all threads take part in. Then the draws follow at once, when the
others still look for work (`at once`), or after a rest, when they sleep (`rested`). The two ways take turns. Shown are
the first decile and the median of each, in microseconds, and how many times as fast all threads are. The first decile
is what it takes where no other process wanted a core.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from compiled import compiled
from sampling import SETTINGS, SHAPES, VOCAB_SIZE, make_row

import libsym as sym
from decoder.batch import Chunk, StepBatch
from decoder.cores import available_cores
from decoder.cpu._step import ffi
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.tiny import random_weights, tiny_config
from libsym.channel.hot import HOT_FUNCTIONS
from libsym.rows.sampler import RowSampler

COUNTS = (1, 2, 3, 4, 8, 16, 64)
REST_NS = {"at once": 0, "rested": 3_000_000}


class Draws(ctypes.Structure):
    """`struct draws` of draws.c."""

    _fields_ = (
        ("hot", ctypes.c_void_p),
        ("samplers", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("index", ctypes.c_uint64),
    )


def compiled_draws() -> Any:
    time_draws = compiled(Path(__file__).with_suffix(".c"), f"-I{Path(sym.__file__).parent}").time_draws
    time_draws.restype = ctypes.c_int64
    time_draws.argtypes = [ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_void_p] * 4, ctypes.c_int64]
    return time_draws


class Meter:
    """A decoder, 64 rows and 64 samplers."""

    def __init__(self, num_threads: int, shape: str, settings: dict[str, float]) -> None:
        config = tiny_config()
        self._decoder = CpuDecoder(config, random_weights(config), Arena(config, 8), num_threads, solo_work=0)
        self.native = self._decoder.native
        self._rows = [np.asarray(make_row(shape, seed)) for seed in range(max(COUNTS))]
        self._samplers = [RowSampler(sym.Sampler(seed=seed, **settings).block(), VOCAB_SIZE) for seed in range(64)]
        self._pointers = (
            np.array([sampler.address for sampler in self._samplers], np.uint64),
            np.array([row.ctypes.data for row in self._rows], np.uint64),
            np.zeros(max(COUNTS), np.int64),
        )
        self._draws = Draws(HOT_FUNCTIONS, *(array.ctypes.data for array in self._pointers), 0)
        tokens = np.arange(64, dtype=np.int32)
        chunk = Chunk(tokens, tokens, np.arange(2, dtype=np.int32), 0, ())
        self._laid_out, self._keep = self._decoder._lay_out(StepBatch((chunk,)))  # noqa: SLF001 - as a loop in C has it
        self._time_draws = compiled_draws()

    def tokens(self, count: int) -> list[int]:
        return self._pointers[2][:count].tolist()

    def us(self, count: int, parallel: int, rest_ns: int) -> float:
        """Of one turn."""
        self._draws.index += 1
        batch = int(ffi.cast("uintptr_t", self._laid_out))
        time_ns = self._time_draws(
            ctypes.byref(self._draws),
            count,
            parallel or None,
            self.native.function,
            self.native.decoder,
            batch,
            rest_ns,
        )
        assert time_ns >= 0
        return time_ns / 1000

    def close(self) -> None:
        self._decoder.close()


def measure(meter: Meter, count: int, rest: str, num_rounds: int) -> dict[str, object]:
    alone, together = [], []
    for _ in range(num_rounds):
        alone.append(meter.us(count, 0, REST_NS[rest]))
        together.append(meter.us(count, meter.native.parallel, REST_NS[rest]))
    found: dict[str, object] = {"draws": count, "when": rest}
    for name, part in (("p10", 0.1), ("p50", 0.5)):
        alone_us, together_us = (sorted(times)[int(num_rounds * part)] for times in (alone, together))
        found[f"alone_{name}_us"], found[f"together_{name}_us"] = round(alone_us, 1), round(together_us, 1)
        found[f"ratio_{name}"] = round(alone_us / together_us, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure draws of many rows by one thread and by all.")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--row", choices=SHAPES, default="open")
    parser.add_argument("--sampler", choices=SETTINGS, default="top_p 0.9")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    meter = Meter(args.threads, args.row, SETTINGS[args.sampler])
    table = [measure(meter, count, rest, args.rounds) for rest in REST_NS for count in COUNTS]
    meter.close()
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    named = f"{processor.split(': ')[1]}, {args.threads} threads; {args.row} rows, {args.sampler}"
    if args.json:
        print(json.dumps({"processor": named, "draws": table}, indent=2))
        return
    print(f"{named}\n{'when':9}{'draws':>6}" + f"{'alone':>11}{'together':>10}{'ratio':>7}" * 2 + "   (p10, p50)")
    for row in table:
        line = "{when:9}{draws:>6}{alone_p10_us:>11}{together_p10_us:>10}{ratio_p10:>7}"
        print((line + "{alone_p50_us:>11}{together_p50_us:>10}{ratio_p50:>7}").format(**row))


if __name__ == "__main__":
    main()
