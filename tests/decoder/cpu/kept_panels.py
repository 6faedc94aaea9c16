"""Panels to keep in a cache, and a process that keeps them and can be killed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from decoder.cpu import panel_cache
from decoder.cpu.panel_cache import BLOCK_BYTES, REVISION, About, PanelCache, checkpoint_files
from decoder.cpu.panel_memory import PanelMemory

NUM_BLOCKS = 5
ROOT = Path(__file__).resolve().parents[3]


def no_checkpoint(_share):
    pass


def a_checkpoint(path) -> About:
    files = checkpoint_files([Path(path)])
    return About(REVISION, "avx2", "int4", "A model/8B", "f" * 64, files, [[3, 64, 64, 0]])


def memory_of(seed: int) -> PanelMemory:
    memory = PanelMemory("a model", NUM_BLOCKS * BLOCK_BYTES - 1)
    memory.array[:] = np.random.default_rng(seed).integers(0, 256, memory.num_bytes, np.uint8)
    return memory


def new_memory() -> PanelMemory:
    return PanelMemory("a model", NUM_BLOCKS * BLOCK_BYTES)


def writer(cache: PanelCache, about: About, stop_at: object):
    """Start a process that keeps panels of seed 7, tells each block that it has written, and waits behind `stop_at`."""
    words = [sys.executable, "-m", "tests.decoder.cpu.kept_panels", cache.directory, about.checkpoint[0][0], stop_at]
    return subprocess.Popen(
        list(map(str, words)),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main(directory: str, path: str, stop_at: str) -> None:
    write = panel_cache._write_all

    def tell(fd, data, block):
        write(fd, data, block)
        print(block, flush=True)
        if stop_at == str(block):
            sys.stdin.readline()

    panel_cache._write_all = tell
    PanelCache(Path(directory)).keep(a_checkpoint(path), memory_of(7))


if __name__ == "__main__":
    main(*sys.argv[1:])
