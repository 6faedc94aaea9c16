"""The threads of a step: beside busy neighbours a late one must not stray into the next step. And their other work,
which a crew does, too: threads without a model."""

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.cpu.crew import Crew
from decoder.tiny import random_weights, tiny_config
from tests.decoder.foreign_threads import foreign_threads, have_ended

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
        decoder.step(StepBatch((chunk([3, 4, 5], 32, (row.data,)),)))
        rows.append(row)
    decoder.close()
    assert all((row == rows[0]).all() for row in rows)


# -- work between steps --

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


def decoder_of(threads):
    config = tiny_config(num_layers=1)
    decoder = CpuDecoder(config, random_weights(config), Arena(config, 1), threads)
    return decoder, decoder.native.parallel, decoder.native.decoder


def crew_of(threads):
    crew = Crew(threads)
    return crew, crew.parallel, crew.address


@pytest.fixture(params=[decoder_of, crew_of])
def parallel(request):
    """`parallel(threads, count, work)`: work(0 .. count - 1) by a decoder or crew of so many, this one included."""
    made = {}

    def run(threads, count, work):
        if threads not in made:
            made[threads] = request.param(threads)
        _, parallel, address = made[threads]
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, WORK, ctypes.c_void_p, ctypes.c_int32)(parallel)
        callback = WORK(lambda _context, index: work(index))
        function(address, callback, None, count)

    yield run
    for owner, *_ in made.values():
        owner.close()


def test_a_crews_threads_end_when_it_is_closed():
    before = foreign_threads()
    crew = Crew(3)
    threads = foreign_threads() - before
    assert len(threads) == 2
    crew.close()
    crew.close()
    assert have_ended(threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_item_is_done_once_however_many_there_are(parallel, threads):
    for count in (0, 1, 2, 3, 64, 1, 500):
        done = list[int]()
        parallel(threads, count, done.append)
        assert sorted(done) == list(range(count))


def test_items_are_done_at_the_same_time(parallel):
    both, met = threading.Barrier(2), []
    parallel(2, 2, lambda index: met.append((index, both.wait(20), threading.get_ident())))
    assert {index for index, _, _ in met} == {0, 1}
    assert len({thread for _, _, thread in met}) == 2


@pytest.mark.parametrize(("threads", "count"), [(3, 1), (1, 5)])
def test_one_item_and_one_thread_wake_nobody(parallel, threads, count):
    seen = []
    parallel(threads, count, lambda _index: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()] * count


def test_the_caller_does_what_nobody_else_takes(parallel):
    """The other thread is held by its first item until the rest is done."""
    here, rest_done, done_here = threading.get_ident(), threading.Event(), []

    def work(index):
        if threading.get_ident() != here:
            assert rest_done.wait(20)
            return
        done_here.append(index)
        if len(done_here) >= 9:
            rest_done.set()

    parallel(2, 10, work)
    assert len(done_here) >= 9
