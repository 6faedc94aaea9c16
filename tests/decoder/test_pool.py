"""The threads of a step beside busy neighbours: a late one must not stray into the next step."""

import subprocess
import sys

import numpy as np
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.tiny import random_weights, tiny_config

ENTRIES_ON_ALL_THREADS = 200
NUM_ROUNDS = 400


@pytest.fixture
def busy_neighbours():
    """More runnable processes than cores, so that threads are preempted in the middle of everything."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for neighbour in neighbours:
        neighbour.kill()
        neighbour.wait()


def chunk(tokens, first_page, rows=()):
    """A prefill of an empty file whose pages begin at `first_page`."""
    tokens = np.asarray(tokens, np.int32)
    pages = np.arange(first_page, first_page + 1 + len(tokens) // 32, dtype=np.int32)
    return Chunk(tokens, np.arange(len(tokens), dtype=np.int32), pages, 0, rows)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("busy_neighbours")
def test_steps_of_all_threads_and_of_one_alternate_without_meeting_each_other():
    config = tiny_config()
    arena = Arena(config, 64)
    work_per_row = config.num_layers * config.hidden_size**2 * 10  # more than a row's, so that three rows stay alone
    decoder = CpuDecoder(config, random_weights(config), arena, 3, solo_work=20 * work_per_row)
    rows = []
    for number in range(NUM_ROUNDS):
        # Without wanted rows a step ends early: the moment when a late thread could read the next step's batch.
        decoder.step(StepBatch((chunk([1 + number % 7] * ENTRIES_ON_ALL_THREADS, 0),)))
        row = np.full(config.vocab_size, np.nan, np.float32)
        decoder.step(StepBatch((chunk([3, 4, 5], 32, (memoryview(row),)),)))
        rows.append(row)
    decoder.close()
    assert all((row == rows[0]).all() for row in rows)
