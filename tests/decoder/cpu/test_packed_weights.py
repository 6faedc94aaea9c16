"""Weights as the step has them: rounded once, or the codes of a file themselves; and those that do not fit."""

import errno

import gguf
import numpy as np
import pytest

from decoder.checkpoints.llama import EMBED, layer_name
from decoder.checkpoints.quants import ENCODINGS
from decoder.checkpoints.stored import StoredTensor
from decoder.cpu import packed_weights as packing
from decoder.cpu._step import ffi
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.cpu.packed_weights import pack_weights
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid, SymError
from tests.decoder.bench import Bench, Call, require, tokens_of
from tests.decoder.cpu.quantized import HALVES, blocks_of, quantized, random_blocks, replaced, unpacked


@pytest.mark.parametrize("isa", ["amx", "amx-emulated", "avx512-bf16", "avx512"])
@pytest.mark.parametrize("kinds", [(), ("Q4_0",), ("Q4_1",), ("Q8_0", "Q4_0"), ("Q5_0", "Q4_1")])
def test_codes_are_summed_exactly_so_products_are_the_same_everywhere(isa, kinds):
    """K and V of one layer depend on products and element-wise arithmetic alone (plain C does not fuse its sums)."""
    require(isa)
    config = tiny_config(num_layers=1, hidden_size=96)
    weights, pages, precision = random_weights(config, seed=7), [], "int4" if kinds else "int8"
    weights = quantized(weights, *kinds) if kinds else weights
    for name in (isa, "avx2"):
        arena = Arena(config, 2, "BF16")
        decoder = CpuDecoder(config, weights, arena, 2, name, precision=precision)
        bench = Bench(config, decoder, arena)
        bench.step(Call(bench.file(40), tokens_of(40), "none"))
        pages.append(arena.pages.copy())
        decoder.close()
    assert pages[0].any()
    assert np.array_equal(pages[0], pages[1])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *HALVES])
def test_the_codes_of_a_file_are_kept_exactly(kind):
    """Rows of a packed embedding equal the file's values."""
    config = tiny_config(hidden_size=256, ffn_size=256, num_heads=16, num_kv_heads=16)
    encoding, rng = ENCODINGS[kind], np.random.default_rng(5)
    size = config.vocab_size * 256 // encoding.block_values, encoding.block_bytes
    if kind in HALVES:
        blocks = random_blocks(kind, size[0], rng)
    else:
        blocks = rng.integers(0, 256, size, dtype=np.uint8)
        blocks[:, 0:2] = (rng.uniform(0.5, 1, len(blocks)) * 0.01).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind.endswith("_1"):
        blocks[:, 2:4] = rng.uniform(-0.1, 0.1, len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    weights = random_weights(config)
    other = gguf.quants.quantize(weights.read(layer_name(0, "o")), gguf.GGMLQuantizationType.Q4_0)
    weights = replaced(weights, blocks_of(EMBED, kind, (config.vocab_size, 256), blocks))
    weights = replaced(weights, blocks_of(layer_name(0, "o"), "Q4_0", (256, 256), other))
    packed, expected = pack_weights(config, weights, "int4"), weights.read(EMBED)
    for row in (0, 1, 15, 16, 31, 32, 258):
        assert np.array_equal(unpacked(packed.embed, row, 256), expected[row]), row


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0.0), ("bf16", 2**-8), ("int8", 4 / 127)])
@pytest.mark.parametrize("hidden", [64, 80, 16 * 67])  # a power of two; times 5; times a number too large to mix
def test_packing_rounds_a_weight_once(precision, tolerance, hidden):
    """Rotated codes come back to their places too: the rotation is its own inverse."""
    config = tiny_config(hidden_size=hidden, num_layers=1)
    weights = random_weights(config)
    packed = pack_weights(config, weights, precision)
    for row, expected in enumerate(weights.read(EMBED)):
        assert np.abs(unpacked(packed.embed, row, hidden) - expected).max() <= tolerance * np.abs(expected).max()


def test_floats_become_4_bit_codes_with_less_error_than_q4_1():
    """Embedding and head get 8 bits."""
    config = tiny_config(hidden_size=96, num_layers=1, ffn_size=512)
    weights = random_weights(config, seed=3)
    packed = pack_weights(config, weights, "int4")
    for field in ("o", "down"):
        values = weights.read(layer_name(0, field))
        kind = gguf.GGMLQuantizationType.Q4_1
        theirs = np.square(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) - values).sum()
        matrix = ffi.addressof(packed.layers[0], field)
        ours = np.square([unpacked(matrix, row, len(each)) - each for row, each in enumerate(values)]).sum()
        assert ours < 0.95 * theirs
    for row, expected in enumerate(weights.read(EMBED)):
        assert np.abs(unpacked(packed.embed, row, 96) - expected).max() <= 1 / 127 * np.abs(expected).max()


@pytest.mark.parametrize("values", [[0.0], [0.3], [-2.0, 5.0], [1e-6, -1e-6], [249.0, -249.0], [1.0] * 31 + [-200.0]])
def test_odd_groups_of_floats_are_rounded_to_their_levels(values):
    config = tiny_config(hidden_size=80, num_layers=1)  # a short group ends each row
    name = layer_name(0, "o")
    matrix = np.resize(np.array(values, np.float32), (80, config.num_heads * config.head_dim))
    weights = replaced(random_weights(config), StoredTensor.of_array(name, matrix))
    packed = pack_weights(config, weights, "int4")
    for row, expected in enumerate(matrix):
        found = unpacked(ffi.addressof(packed.layers[0], "o"), row, len(expected))
        assert np.abs(found - expected).max() <= 1.01 / 30 * np.ptp(expected) + 2**-10 * np.abs(expected).max()


def test_a_file_of_other_codes_is_refused_4_bits():
    config = tiny_config()
    with pytest.raises(Invalid, match=r"other codes \(\d+ Q8_0, .*\): give a file of 4 to 6 bits or of floats"):
        pack_weights(config, quantized(random_weights(config), "Q8_0"), "int4")


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_weights_that_do_not_fit_are_refused_with_the_figures(monkeypatch, precision):
    monkeypatch.setattr(packing, "available_memory_bytes", lambda: 1000)
    with pytest.raises(
        SymError, match=r"the weights take 0\.0 GB in this precision, 0\.0 GB of memory are available"
    ) as raised:
        pack_weights(tiny_config(), random_weights(tiny_config()), precision)
    assert raised.value.errno == errno.ENOMEM


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan, 250, -6e4])
def test_a_scale_of_4_bit_codes_that_does_not_fit_is_refused(scale):
    weights, name = quantized(random_weights(tiny_config()), "Q4_0"), layer_name(0, "up")
    stored = weights.stored(name)
    blocks = np.frombuffer(stored.parts[0].data, np.uint8).reshape(-1, 18).copy()
    blocks[7, :2] = np.array([249.9], np.float16).view(np.uint8)
    pack_weights(tiny_config(), replaced(weights, blocks_of(name, "Q4_0", stored.shape, blocks)), "int4")
    blocks[7, :2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(Invalid, match="not finite or too large for codes"):
        pack_weights(tiny_config(), replaced(weights, blocks_of(name, "Q4_0", stored.shape, blocks)), "int4")


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("kind", "at"), [("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208), ("Q3_K", 108), ("IQ4_XS", 0)])
def test_a_super_scale_that_is_not_finite_is_refused_without_a_warning(kind, at, scale):
    """The matrix beside it has scales for groups, so the factors are multiplied: infinity times 0 is one case."""
    config = tiny_config(hidden_size=256)
    weights, name = quantized(random_weights(config), "Q4_0"), layer_name(0, "up")
    shape = weights.shape(name)
    blocks = random_blocks(kind, shape[0], np.random.default_rng(5))
    blocks[3] = 0
    blocks[3, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(Invalid, match="not finite or too large for codes"):
        pack_weights(config, replaced(weights, blocks_of(name, kind, shape, blocks)), "int4")


@pytest.mark.parametrize(("precision", "value"), [("int8", np.inf), ("int4", np.nan), ("int4", 1e4)])
def test_weights_that_codes_cannot_hold_are_refused(precision, value):
    weights, name = quantized(random_weights(tiny_config()), "Q4_0"), layer_name(0, "up")
    damaged = weights.read(name)
    damaged[3, 5] = value
    with pytest.raises(Invalid, match="not finite"):
        pack_weights(tiny_config(), replaced(weights, StoredTensor.of_array(name, damaged)), precision)
