"""Steps in Python that C calls."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.tiny import random_weights, tiny_config
from tests.decoder.bench import Bench, Call, tokens_of
from tests.scheduler.through_c import ThroughC

CONFIG = tiny_config()
NUM_PAGES = 64


@pytest.fixture
def decoders():
    """Two of the same model."""
    weights = random_weights(CONFIG)
    both = [CpuDecoder(CONFIG, weights, Arena(CONFIG, NUM_PAGES), 1) for _ in range(2)]
    yield both
    for decoder in both:
        decoder.close()


@pytest.fixture
def through_c(request):
    """Makes a way through C to a step."""

    def make(step):
        found = ThroughC(step, CONFIG)
        request.addfinalizer(found.close)
        return found

    return make


def mixed_calls(bench):
    """Prefills, decodes, a mask over old entries and one of each row's own, all rows, last rows and none."""
    files = [bench.prefill(tokens_of(length, length), reserve=8)[0] for length in (40, 5, 33, 64)]
    over_old = np.tri(6, 6 + 40, 40, dtype=np.bool_)
    over_old[:, 3:37] = False
    own = np.random.default_rng(2).random((2, 2 + 33)) < 0.5
    own[np.arange(2), 33 + np.arange(2)] = True
    silent, fresh = bench.file(3), bench.file(40)
    return [
        Call(files[0], tokens_of(6), mask=over_old, mass=bench.no_mass(46)),
        Call(silent, [1, 2, 3], "none"),
        Call(files[1], [9], positions=[77]),
        Call(files[2], [8, 9], "last", mask=own),
        Call(fresh, tokens_of(37), "last"),
        Call(files[3], [4], mass=bench.no_mass(70)),
    ]


def test_every_kind_of_chunk_gives_the_bits_of_the_step_itself(decoders, through_c):
    benches = [Bench(CONFIG, decoder, decoder.arena) for decoder in decoders]
    outs, masses = [], []
    for bench, decoder in zip(benches, (decoders[0], through_c(decoders[1].step)), strict=True):
        calls = mixed_calls(bench)
        bench.decoder = decoder
        outs.append(
            bench.step(*calls, copies=[(int(calls[0].file.pages[0]), 3, 32), (int(calls[2].file.pages[0]), 4, 32)])
        )
        masses.append([call.mass for call in calls if call.mass is not None])
    assert all(mass.any() and np.array_equal(mass, called) for mass, called in zip(*masses, strict=True))
    assert [out.shape for out in outs[0]] == [out.shape for out in outs[1]]
    for direct, called in zip(*outs, strict=True):
        assert np.isfinite(direct).all()
        assert np.array_equal(direct, called)
    assert decoders[0].arena.pages.any()
    assert np.array_equal(decoders[0].arena.pages, decoders[1].arena.pages)


def test_a_batch_of_copies_alone_is_one(decoders, through_c):
    seen = []
    through_c(seen.append).step(StepBatch((), ((1, 2, 32), (3, 4, 5))))
    assert seen == [StepBatch((), ((1, 2, 32), (3, 4, 5)))]


def test_what_c_has_in_its_arrays_may_change_after(through_c):
    """A decoder on a GPU keeps page tables from one step to the next, and C fills the same arrays anew."""
    laid_out, seen = [], []

    def step(batch):
        seen.append(batch)
        for array in (laid_out[0].tokens, laid_out[0].positions, laid_out[0].pages, laid_out[0].masks[0]):
            array[0] = 0

    mask = np.array([[True, True, False, True]])
    chunk = Chunk(*(np.array(each, np.int32) for each in ([7], [3], [5])), 3, (), mask)
    through_c(step).step(StepBatch((chunk,)), laid_out.append)
    kept = seen[0].chunks[0]
    assert [kept.tokens.tolist(), kept.positions.tolist(), kept.pages.tolist(), kept.start] == [[7], [3], [5], 3]
    assert np.array_equal(kept.mask, mask)


def test_an_exception_is_an_error_for_c_and_is_taken_once(through_c):
    seen = []

    def step(batch):
        seen.append(weakref.ref(batch.chunks[0].tokens))
        try:
            batch.chunks[1]
        except IndexError as error:
            raise RuntimeError("the GPU is full") from error

    through = through_c(step)
    out = np.zeros(CONFIG.vocab_size, np.float32)
    chunk = Chunk(*(np.zeros(1, np.int32) for _ in range(3)), 0, (memoryview(out),))
    with pytest.raises(RuntimeError, match="the GPU is full") as failed:
        through.step(StepBatch((chunk,)))
    assert failed.value.__cause__ is not None
    assert seen[0]() is None, "a failed step keeps its rows"
    assert through.callback.native.take_failure() is None


def test_after_a_step_that_failed_the_next_one_is_computed(decoders, through_c):
    failures = [MemoryError("full")]

    def step(batch):
        if failures:
            raise failures.pop()
        decoders[0].step(batch)

    through = through_c(step)
    out = np.full(CONFIG.vocab_size, np.nan, np.float32)
    batch = StepBatch((Chunk(*(np.zeros(1, np.int32) for _ in range(3)), 0, (memoryview(out),)),))
    with pytest.raises(MemoryError):
        through.step(batch)
    assert np.isnan(out).all()
    through.step(batch)
    assert np.isfinite(out).all()


def test_the_addresses_are_good_as_long_as_their_owner(through_c):
    seen = []
    through = through_c(seen.append)
    before = through.callback.native
    for _ in range(3):
        gc.collect()
        through.step(StepBatch((), ((0, 1, 32),)))
    assert through.callback.native == before
    assert len(seen) == 3


def test_its_owner_goes_when_nobody_has_it(through_c):
    through = through_c(lambda _batch: None)
    gone = weakref.ref(through.callback._called.step)
    gc.disable()
    try:
        through.callback = None
        assert gone() is None, "only the collector finds it"
    finally:
        gc.enable()
