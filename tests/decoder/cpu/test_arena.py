import numpy as np
import pytest

from decoder.cpu.arena import Arena
from decoder.tiny import tiny_config
from kvfs.pages.store import PageStore
from libsym.errors import Invalid


def test_an_arena_is_a_page_store_of_the_configs_shape():
    config = tiny_config(num_layers=3, num_kv_heads=2, head_dim=16)
    store: PageStore = Arena(config, 5)
    assert store.num_pages == 5
    assert store.page_bytes == 3 * 2 * 2 * 32 * 16 * 4 == 32 * config.entry_bytes()
    assert Arena(config, 5).pages.shape == (5, *config.page_shape)
    assert (Arena(config, 1).layout, Arena(config, 1).dtype) == ("k=dim,entry v=entry,dim", "F32")


def test_a_view_is_the_arenas_own_memory():
    arena = Arena(tiny_config(), 4)
    arena.pages[2] = 3.0
    assert np.frombuffer(arena.view(2), np.float32).min() == 3.0
    assert arena.view(1, 2).readonly
    arena.writable(2)[:] = bytes(arena.page_bytes)
    assert not arena.pages.any()


def test_zero_touches_one_page_only():
    arena = Arena(tiny_config(), 4)
    arena.pages[:] = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1, 1)
    arena.zero(2)
    assert [float(page.min()) for page in arena.pages] == [0.0, 1.0, 0.0, 3.0]
    assert [float(page.max()) for page in arena.pages] == [0.0, 1.0, 0.0, 3.0]


def test_a_pool_larger_than_memory_costs_nothing_until_it_is_touched():
    config = tiny_config(num_layers=30, num_kv_heads=3, head_dim=64)
    arena = Arena(config, 1 << 18)  # 377 GiB
    arena.pages[-1, 0, 0, 0, 0] = 1.0
    assert arena.view(arena.num_pages - 1)[:4] == np.float32(1.0).tobytes()


def test_an_arena_without_pages_or_of_another_dtype_is_refused():
    with pytest.raises(Invalid, match="0 pages"):
        Arena(tiny_config(), 0)
    with pytest.raises(Invalid, match="F16"):
        Arena(tiny_config(), 1, "F16")
