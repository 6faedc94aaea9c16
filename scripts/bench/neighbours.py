#!/usr/bin/env python3
"""What busy neighbours cost a decode: the rate beside one and two endless loops, and with both threads on one core.

    .venv/bin/python scripts/bench/neighbours.py [--precision bf16] [--steps 60]

An engine whose threads only spin while they wait for each other loses one to two orders of magnitude here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import load_model
from decoder.model_config import KV_DTYPE

PAGES = 3
"""Of each sequence: 64 entries and the one that is decoded."""


@contextmanager
def busy_neighbour() -> Iterator[None]:
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.3)
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


@contextmanager
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    _pin({min(cores)})
    try:
        yield
    finally:
        _pin(cores)


def _pin(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precision", default="bf16", choices=KV_DTYPE)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    model = load_model(None)
    arena = Arena(model.config, 8 * PAGES, KV_DTYPE[options.precision])
    arena.pages[:] = 0  # touched, so that no step waits for the kernel
    decoder = CpuDecoder(model.config, model.weights, arena, precision=options.precision)
    logits = np.zeros((8, model.config.vocab_size), np.float32)

    def rate(batch: int) -> float:
        tables = np.arange(8 * PAGES, dtype=np.int32).reshape(8, PAGES)
        token, position = np.array([5], np.int32), np.array([64], np.int32)
        chunks = [Chunk(token, position, tables[i], 64, (memoryview(logits[i]),)) for i in range(batch)]
        step = StepBatch(tuple(chunks))
        decoder.step(step)
        began = time.perf_counter()
        for _ in range(options.steps):
            decoder.step(step)
        return batch * options.steps / (time.perf_counter() - began)

    print(f"{options.precision}, {decoder.num_threads} threads; tokens a second, and the share of the quiet rate")
    for batch in (1, 8):
        quiet = rate(batch)
        found = {"quiet": quiet}
        with ExitStack() as neighbours:
            for name in ("one neighbour", "two neighbours"):
                neighbours.enter_context(busy_neighbour())
                found[name] = rate(batch)
        with one_core():
            found["on one core"] = rate(batch)
        print(
            f"batch {batch}: " + ", ".join(f"{name} {value:.0f} ({value / quiet:.2f})" for name, value in found.items())
        )
    decoder.close()


if __name__ == "__main__":
    main()
