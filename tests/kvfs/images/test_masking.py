"""Masking the end of a page of another model gives the bytes that the model's own arena would give."""

import numpy as np
import pytest

from decoder.cpu.arena import Arena
from decoder.tiny import tiny_config
from kvfs.durable.identity import KeptFacts
from kvfs.images.masking import masked
from tests.kvfs.fakes import FakeFacts, FakeStore


@pytest.mark.parametrize("num_entries", [0, 7, 31])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_it_masks_as_the_arena_of_the_cpu_does(dtype: str, num_entries: int) -> None:
    config = tiny_config()
    arena = Arena(config, 1, dtype)
    page = np.random.default_rng(1).integers(1, 255, arena.page_bytes, np.uint8).tobytes()
    facts = KeptFacts(config.page_shape, dtype, 0, 0, "", {"layout": arena.layout})
    assert masked(memoryview(page), facts, num_entries) == arena.masked(memoryview(page), num_entries)


def test_it_masks_entry_after_entry() -> None:
    store = FakeStore(FakeFacts(), 1)
    store.pages[:] = np.random.default_rng(1).random(store.pages.shape)
    assert masked(store.view(0), FakeFacts(), 5) == store.masked(store.view(0), 5)
