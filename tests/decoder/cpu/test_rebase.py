"""Entries that move: what a page assembled of others holds, and that it computes what it would have computed there."""

import numpy as np
import pytest

from decoder.cpu.arena import Arena
from decoder.model_config import RopeScaling
from decoder.rope import inverse_frequencies
from decoder.tiny import tiny_config
from tests.decoder.bench import Call

KINDS = {
    "plain": {},
    "linear": {"rope_scaling": RopeScaling("linear", factor=4.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 256, low_freq_factor=1.0, high_freq_factor=4.0)},
    "yarn": {"rope_scaling": RopeScaling("yarn", factor=4.0, original_positions=256, attention_factor=1.14)},
    "factors": {"rope_scaling": RopeScaling("factors", factors=(1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))},
    "sliding layers with a theta of their own": {
        "window": 24,
        "sliding_layers": (True, False, True),
        "num_layers": 3,
        "local_rope_theta": 100.0,
        "rope_scaling": RopeScaling("linear", factor=8.0),
    },
    "sliding layers with the same theta": {"window": 24, "sliding_layers": (True, False)},
    "grouped heads": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 32},
}
PRECISIONS = {"float32": (4e-6, 1e-12), "bf16": (0.03, 1e-4)}
"""Largest error of a row's logits relative to its largest, and KL divergence: some three times what was measured."""


def plain_entries(arena, config, page):
    """A page as `[layer, head, entry, dim]` of K and of V, by the layouts that `decoder.cpu.arena` defines."""
    keys, values = arena.pages[page][:, 0], arena.pages[page][:, 1]
    heads, dim = (config.num_layers, config.num_kv_heads), config.head_dim
    if arena.dtype == "F32":
        return keys.reshape(*heads, dim, 32).swapaxes(2, 3), values.reshape(*heads, 32, dim)

    def wide(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    keys = wide(keys).reshape(*heads, dim // 2, 32, 2).transpose(0, 1, 3, 2, 4).reshape(*heads, 32, dim)
    return keys, wide(values).reshape(*heads, 16, dim, 2).swapaxes(3, 4).reshape(*heads, 32, dim)


@pytest.fixture(params=["F32", "BF16"])
def filled_arena(request):
    def make(config):
        arena = Arena(config, 6, request.param)
        values = np.random.default_rng(5).standard_normal(arena.pages.shape, dtype=np.float32)
        arena.pages[:] = values if request.param == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return arena

    return make


@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS)
def test_every_entry_lands_in_its_slot_with_its_own_turn(filled_arena, shape):
    config = tiny_config(**shape)
    arena = filled_arena(config)
    rng = np.random.default_rng(6)
    sources, slots = rng.integers(0, 5, 13).astype(np.int32), rng.integers(0, 32, 13).astype(np.int32)
    sources[4:9], slots[4:9] = 3, np.arange(11, 16)  # a piece that lies together, too
    shifts = rng.integers(-3000, 3000, 13).astype(np.int32)
    arena.assemble(5, sources, slots, shifts)
    keys, values = plain_entries(arena, config, 5)
    half = config.head_dim // 2
    for entry, (source, slot, shift) in enumerate(zip(sources, slots, shifts, strict=True)):
        from_keys, from_values = plain_entries(arena, config, source)
        assert (values[:, :, entry] == from_values[:, :, slot]).all()
        for layer in range(config.num_layers):
            pairs = from_keys[layer, :, slot, :half] + 1j * from_keys[layer, :, slot, half:]
            pairs = pairs * np.exp(1j * shift * inverse_frequencies(config, config.slides(layer)))
            expected = np.concatenate((pairs.real, pairs.imag), axis=1)
            rounding = 1e-6 if arena.dtype == "F32" else 2**-8
            assert np.abs(keys[layer, :, entry] - expected).max() <= rounding * np.abs(expected).max()
    assert not keys[:, :, 13:].any()
    assert not values[:, :, 13:].any()


def test_what_does_not_move_is_copied_bit_for_bit(filled_arena):
    config = tiny_config()
    arena = filled_arena(config)
    arena.assemble(5, np.full(32, 2, np.int32), np.arange(32, dtype=np.int32), np.zeros(32, np.int32))
    assert arena.view(5) == arena.view(2)
    arena.assemble(5, np.full(7, 2, np.int32), np.arange(7, dtype=np.int32), np.zeros(7, np.int32))
    assert arena.view(5) == arena.masked(arena.view(2), 7)


def errors(expected, got):
    """The largest error of a row's logits relative to its largest logit, and the mean KL divergence."""
    expected, got = expected.astype(np.float64), got.astype(np.float64)
    worst = (np.abs(got - expected).max(axis=1) / np.abs(expected).max(axis=1)).max()
    logs = [logits - np.logaddexp.reduce(logits, axis=1, keepdims=True) for logits in (expected, got)]
    return worst, (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1).mean()


def rebased(bench, tokens, start, length):
    """A file of `length` of the tokens, computed at positions from `start` on and then moved to begin at 0."""
    far = bench.file(length)
    bench.step(Call(far, tokens[:length], "none", range(start, start + length)))
    near = bench.file(len(tokens))
    for index in range(-(-length // 32)):
        count = min(32, length - 32 * index)
        slots = np.arange(count, dtype=np.int32)
        page = np.full(count, far.pages[index], np.int32)
        bench.arena.assemble(int(near.pages[index]), page, slots, np.full(count, -start, np.int32))
    near.length = length
    return near


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS)
def test_rebased_entries_serve_as_if_computed_there(cpu_bench, shape, precision):
    bench = cpu_bench(precision=precision, **shape)
    tokens = np.random.default_rng(8).integers(0, 256, 120).tolist()
    file = rebased(bench, tokens, 1000, 80)
    got = bench.step(Call(file, tokens[80:]))[0]
    fresh, _ = bench.prefill(tokens[:80], reserve=40)
    expected = bench.step(Call(fresh, tokens[80:]))[0]
    worst, kl = errors(expected, got)
    assert worst < PRECISIONS[precision][0]
    assert kl < PRECISIONS[precision][1]
    stale = bench.file(120)  # the test can tell: the same entries, not turned
    bench.step(Call(stale, tokens[:80], "none", range(1000, 1080)))
    wrong = bench.step(Call(stale, tokens[80:], "all", range(80, 120)))[0]
    assert errors(expected, wrong)[0] > 10 * worst
