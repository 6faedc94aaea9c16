"""Steps in Python that C calls."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.tiny import random_weights, tiny_config
from tests.decoder.bench import Bench
from tests.scheduler.through_c import ThroughC, mixed_calls

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


def one_token(*rows, mask=None):
    """A chunk of token 7 at position 3, in page 5, behind three entries with a mask, or behind none."""
    token, position, page = (np.array([each], np.int32) for each in (7, 3, 5))
    return Chunk(token, position, page, 0 if mask is None else 3, tuple(memoryview(row) for row in rows), mask)


def test_a_batch_of_copies_alone_is_one(decoders, through_c):
    seen = list[Any]()
    through_c(seen.append).step(StepBatch((), ((1, 2, 32), (3, 4, 5))))
    assert seen == [StepBatch((), ((1, 2, 32), (3, 4, 5)))]


def test_what_c_has_in_its_arrays_may_change_after(through_c):
    """A decoder on a GPU keeps page tables from one step to the next, and C fills the same arrays anew."""
    laid_out, seen = list[Any](), list[Any]()

    def step(batch):
        seen.append(batch)
        for array in (laid_out[0].tokens, laid_out[0].positions, laid_out[0].pages, laid_out[0].masks[0]):
            array[0] = 0

    mask = np.array([[True, True, False, True]])
    chunk = one_token(mask=mask)
    through_c(step).step(StepBatch((chunk,)), laid_out.append)
    kept = seen[0].chunks[0]
    assert [kept.tokens.tolist(), kept.positions.tolist(), kept.pages.tolist(), kept.start] == [[7], [3], [5], 3]
    assert np.array_equal(kept.mask, mask)


def test_an_exception_is_an_error_for_c_is_taken_once_and_the_next_step_is_computed(decoders, through_c):
    seen = list[Any]()

    def step(batch):
        if seen:
            decoders[0].step(batch)
            return
        seen.append(weakref.ref(batch.chunks[0].tokens))
        try:
            batch.chunks[1]
        except IndexError as error:
            raise RuntimeError("the GPU is full") from error

    through, out = through_c(step), np.full(CONFIG.vocab_size, np.nan, np.float32)
    batch = StepBatch((one_token(out),))
    with pytest.raises(RuntimeError, match="the GPU is full") as failed:
        through.step(batch)
    assert failed.value.__cause__ is not None
    assert seen[0]() is None, "a failed step keeps its rows"
    assert through.callback.native.take_failure() is None
    assert np.isnan(out).all()
    through.step(batch)
    assert np.isfinite(out).all()


@pytest.mark.slow
def test_the_addresses_are_good_as_long_as_their_owner_who_goes_when_nobody_has_it(through_c, no_collector):
    seen = list[Any]()
    through = through_c(lambda batch: seen.append(batch))  # noqa: PLW0108 - what can be referred to weakly
    before = through.callback.native
    for _ in range(3):
        gc.collect()
        through.step(StepBatch((), ((0, 1, 32),)))
    assert through.callback.native == before
    assert len(seen) == 3
    gone = weakref.ref(through.callback._called.step)
    through.callback = None
    del before
    assert gone() is None, "only the collector finds it"
