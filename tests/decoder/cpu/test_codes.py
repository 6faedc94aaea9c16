"""Codes of files in the kernels: each layout on each instruction set, and layouts that meet in one matrix."""

import numpy as np
import pytest

from decoder.checkpoints.llama import layer_name
from decoder.cpu._step import ffi
from decoder.cpu.packed_weights import pack_weights
from decoder.tiny import random_weights, tiny_config
from tests.decoder.bench import Call, assert_close, require, tokens_of
from tests.decoder.cpu.quantized import quantized, unpacked

SHAPE = {"hidden_size": 256, "ffn_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
ISAS = ["amx", "amx-emulated", "avx512-bf16", "avx512", "avx2", "plain"]
MIXES = [
    ("Q4_K",),
    ("Q5_K",),
    ("Q6_K",),
    ("Q4_K", "Q6_K", "Q5_K", "Q4_K", "Q4_K"),
    ("Q6_K", "Q4_0", "Q8_0", "Q5_1"),
    ("Q6_K", "Q5_0", "Q4_1"),
    ("Q2_K", "Q3_K"),
    ("Q3_K", "Q4_K", "Q6_K", "Q5_K"),
    ("IQ4_XS",),
    ("IQ4_NL", "MXFP4"),
    ("MXFP4",),
    ("IQ4_NL", "Q5_K", "IQ4_XS", "Q4_1", "Q4_0"),
]
"""In a mix, matrices take the types in turn. The last mixes are of types that llama.cpp does not mix."""


def weights_of(*kinds: str, **changes):
    return quantized(random_weights(tiny_config(**SHAPE | changes), seed=7), *kinds)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kinds", MIXES, ids=" ".join)
def test_products_of_codes_are_near_the_reference(cpu_bench, reference_bench, isa, kinds):
    require(isa)
    weights, prompt = weights_of(*kinds), tokens_of(70)
    cpu = cpu_bench(isa=isa, precision="int4", weights=weights, **SHAPE)
    expected = reference_bench(weights=weights, **SHAPE).prefill(prompt)[1]
    assert_close(cpu.prefill(prompt)[1], expected, tolerance=0.05)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kinds", MIXES, ids=" ".join)
def test_bits_of_a_row_are_the_same_in_every_chunk(cpu_bench, isa, kinds):
    require(isa)
    prompt = tokens_of(40)
    options = {"isa": isa, "precision": "int4", "weights": weights_of(*kinds)} | SHAPE
    whole = cpu_bench(**options).prefill(prompt)[1]
    for piece in (1, 7):
        assert np.array_equal(cpu_bench(seed=piece, **options).prefill(prompt, piece)[1], whole), piece


@pytest.mark.parametrize("isa", ["amx", "amx-emulated", "avx512-bf16", "avx512"])
@pytest.mark.parametrize("kinds", MIXES, ids=" ".join)
def test_instruction_sets_that_fuse_give_the_same_keys_and_values(cpu_bench, isa, kinds):
    require(isa)
    pages = []
    for name in (isa, "avx2"):
        bench = cpu_bench(
            isa=name, precision="int4", weights=weights_of(*kinds, num_layers=1), **SHAPE | {"num_layers": 1}
        )
        bench.step(Call(bench.file(40), tokens_of(40), "none"))
        pages.append(bench.arena.pages.copy())
    assert pages[0].any()
    assert np.array_equal(*pages)


@pytest.mark.parametrize("kinds", MIXES, ids=" ".join)
def test_a_packed_matrix_has_the_numbers_of_its_tensors(kinds):
    """Codes of a type are kept if another type shares the matrix; rounded are 16 inputs a scale beside 8-bit codes."""
    config = tiny_config(**SHAPE)
    weights = weights_of(*kinds)
    packed = pack_weights(config, weights, "int4")
    for layer in range(config.num_layers):
        whole = [matrix for matrix in packed.layers[layer].qkv if matrix.n]
        rows = [unpacked(ffi.addressof(matrix), row, 256) for matrix in whole for row in range(matrix.n)]
        expected = np.concatenate([weights.read(layer_name(layer, field)) for field in "qkv"])
        assert np.array_equal(rows, expected)
        gate_up = ffi.addressof(packed.layers[layer], "gate_up")
        for first, field in enumerate(("gate", "up")):
            values = weights.read(layer_name(layer, field))
            found = [unpacked(gate_up, row // 16 * 32 + 16 * first + row % 16, 256) for row in range(len(values))]
            assert np.abs(found - values).max() <= 2**-8 * np.abs(values).max()
