#!/usr/bin/env python3
"""What `pred(attention=...)` costs: decodes and a prefill of 512 tokens that ask and that don't, in turns.

    .venv/bin/python scripts/bench/attention.py [--precision bf16] [--rounds 10] [--other DIR] [--thread-time]

The step alone, then the calls of a program to a daemon: a token at the end of files of some lengths, and 512 tokens at
the end of an empty file and of a longer one. `--other`: a checkout of another version, built. Its plain steps take
turns with this one's, in which nobody asks: whether the bits are the same, and what the times differ by.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, os.environ.get("BENCH_TREE") or str(Path(__file__).resolve().parents[2]))

import libsym as sym
from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import load_model
from decoder.model_config import KV_DTYPE

ROOT = Path(sys.path[0])
LENGTHS = (128, 2048, 7600)
PREFILL = 512
DECODES = 8
"""Tokens of one measurement."""
MAX_ENTRIES = 8192


class Steps:
    """One file of a decoder, that is cut to a length before each measurement."""

    def __init__(self, model: str, precision: str, *, of_thread: bool) -> None:
        self._clock = time.thread_time if of_thread else time.perf_counter
        loaded = load_model(model)
        self.config = loaded.config
        arena = Arena(self.config, MAX_ENTRIES // 32, KV_DTYPE[precision])
        self._decoder = CpuDecoder(self.config, loaded.weights, arena, 1 if of_thread else None, precision=precision)
        self._pages = np.arange(MAX_ENTRIES // 32, dtype=np.int32)
        self.row = np.empty(self.config.vocab_size, np.float32)
        self.append(0, PREFILL)
        written = PREFILL // 32
        for first in range(written, MAX_ENTRIES // 32, written):  # what is there does not change how long it takes
            arena.pages[first : first + written] = arena.pages[:written]

    def append(self, start: int, count: int, how: dict[str, Any] | None = None) -> None:
        """In chunks of 512, as the daemon has them."""
        for first in range(start, start + count, 512):
            places = np.arange(first, min(first + 512, start + count), dtype=np.int32)
            tokens = (places * 7919 + 13) % self.config.vocab_size
            chunk = Chunk(tokens.astype(np.int32), places, self._pages, first, (memoryview(self.row),), **(how or {}))
            self._decoder.step(StepBatch((chunk,)))

    def measure(self, length: int, count: int, *, asks: bool) -> float:
        """Milliseconds for a decode's token, or for a prefill."""
        began_s = self._clock()
        if count == 1:
            for token in range(DECODES):
                self.append(length + token, 1, self._how(length + token + 1, asks=asks))
            return (self._clock() - began_s) * 1000 / DECODES
        self.append(length, count, self._how(length + count, asks=asks))
        return (self._clock() - began_s) * 1000

    def _how(self, entries: int, *, asks: bool) -> dict[str, Any]:
        shape = (self.config.num_layers, self.config.num_kv_heads, entries)
        return {"mass": np.zeros(shape, np.float32)} if asks else {}


CASES = [(f"decode at {length}", length, 1) for length in LENGTHS]
CASES += [(f"prefill of 512 after {length}", length, PREFILL) for length in (0, 2048)]


def in_turns(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, measure in variants.items():
            took = measure()
            if number:  # the first round warms up
                times[name].append(took)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and ratios to the first variant, round by round."""
    first = next(iter(times))
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, times[first], strict=True)) for name, each in times.items()
    }
    return {"ms": {name: statistics.median(each) for name, each in times.items()}, "ratio": ratios}


def bench_steps(model: str, precision: str, rounds: int, *, of_thread: bool) -> dict[str, Any]:
    steps, found = Steps(model, precision, of_thread=of_thread), {}
    for name, length, count in CASES:
        variants = {
            "plain": lambda length=length, count=count: steps.measure(length, count, asks=False),
            "asks": lambda length=length, count=count: steps.measure(length, count, asks=True),
        }
        found[name] = summary(in_turns(variants, rounds))
    return found


# ---- another version's plain steps


def worker(model: str, precision: str, *, of_thread: bool) -> None:
    """Measures what it is told of by lines, and says how long it took and what the bits were."""
    steps = Steps(model, precision, of_thread=of_thread)
    print("ready", flush=True)
    for line in sys.stdin:
        length, count = map(int, line.split())
        took = steps.measure(length, count, asks=False)
        print(took, sha256(steps.row.tobytes()).hexdigest(), flush=True)


class Worker:
    def __init__(self, tree: Path, model: str, precision: str, *, of_thread: bool) -> None:
        command = [sys.executable, __file__, "--worker", "--model", model, "--precision", precision]
        command += ["--thread-time"] * of_thread
        environment = {**os.environ, "BENCH_TREE": str(tree), "PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.bits: set[str] = set()
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, length: int, count: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{length} {count}\n")
        self.process.stdin.flush()
        took, bits = self._line().split()
        self.bits.add(bits)
        return float(took)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def bench_versions(other: Path, model: str, precision: str, rounds: int, *, of_thread: bool) -> dict[str, Any]:
    trees = {"other": other, "this": ROOT}
    workers = {name: Worker(tree, model, precision, of_thread=of_thread) for name, tree in trees.items()}
    found = {}
    for name, length, count in CASES:
        variants = {
            each: lambda worker=worker, length=length, count=count: worker.measure(length, count)
            for each, worker in workers.items()
        }
        found[name] = summary(in_turns(variants, rounds))
        bits = [worker.bits for worker in workers.values()]
        found[name]["same_bits"] = bits[0] == bits[1] and len(bits[0]) == 1
        for worker in workers.values():
            worker.bits = set()
    for worker in workers.values():
        worker.close()
    return found


# ---- calls of a program


@contextmanager
def daemon(model: str, precision: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "kv").mkdir()
        options = ["--model", model, "--precision", precision, "--state", str(where / "state")]
        options += ["--mount", str(where / "kv"), "--socket", str(where / "socket")]
        command = [sys.executable, "-m", "symphony", "serve", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        served = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        try:
            assert served.stdout is not None
            assert served.stdout.readline().startswith("symphony:"), "the daemon did not start"
            sym.connect(str(where / "socket"))
            yield
        finally:
            sym.close()
            served.terminate()
            served.wait()


def bench_calls(model: str, precision: str, rounds: int) -> dict[str, Any]:
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "pages": {"attention": "pages"},
        "entries": {"attention": "entries"},
        "pages by layer": {"attention": "pages", "by": "layer"},
    }
    found = {}
    with daemon(model, precision):
        size = sym.model_info().vocab_size

        def tokens(start: int, count: int) -> list[int]:
            return [(place * 7919 + 13) % size for place in range(start, start + count)]

        def measure(base: sym.KV, length: int, count: int, how: dict[str, Any]) -> float:
            with sym.kv_fork(base) as kv:
                repeats = DECODES if count == 1 else 1
                began_s = time.perf_counter()
                for each in range(repeats):
                    sym.pred(kv, tokens(length + each, count), **how)
                return (time.perf_counter() - began_s) * 1000 / repeats

        for name, length, count in CASES:
            with sym.kv_create() as base:
                if length:
                    sym.kv_write(base, tokens(0, length))
                variants = {
                    form: lambda how=how, base=base, length=length, count=count: measure(base, length, count, how)
                    for form, how in forms.items()
                }
                found[name] = summary(in_turns(variants, rounds))
    return found


def show(title: str, found: dict[str, Any]) -> None:
    print(title)
    for name, numbers in found.items():
        first, *others = numbers["ms"]
        said = "  ".join(f"{each} {numbers['ms'][each]:.2f} ms (x {numbers['ratio'][each]:.3f})" for each in others)
        same = "" if "same_bits" not in numbers else f"  {'same bits' if numbers['same_bits'] else 'OTHER BITS'}"
        print(f"  {name:28} {first} {numbers['ms'][first]:.2f} ms  {said}{same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--other", type=Path, help="a built checkout of another version")
    parser.add_argument("--only", choices=("steps", "versions", "calls"), help="one part alone")
    parser.add_argument("--thread-time", action="store_true", help="steps: one thread, and the time that it computes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.model, asked.precision, of_thread=asked.thread_time)
        return
    how = (asked.model, asked.precision, asked.rounds)
    found = {}
    if asked.only in (None, "steps"):
        found["steps"] = bench_steps(*how, of_thread=asked.thread_time)
    if asked.only in (None, "versions") and asked.other is not None:
        found["versions"] = bench_versions(asked.other.resolve(), *how, of_thread=asked.thread_time)
    if asked.only in (None, "calls"):
        found["calls"] = bench_calls(*how)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    for title, each in found.items():
        show(title, each)


if __name__ == "__main__":
    main()
