"""The precisions of the CPU step on every instruction set: against the reference, and each call's bits against itself.

AMX is not on every machine: `amx-emulated` runs its kernels with the tile instructions done in plain C.
"""

from __future__ import annotations

import errno
from pathlib import Path

import gguf
import numpy as np
import pytest

from decoder.checkpoints.llama import EMBED, layer_name
from decoder.checkpoints.quants import ENCODINGS
from decoder.checkpoints.stored import StoredTensor
from decoder.checkpoints.weights import Weights
from decoder.cpu import backend
from decoder.cpu import packed_weights as packing
from decoder.cpu._step import ffi, lib
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.cpu.packed_weights import pack_weights
from decoder.model_config import KV_DTYPE
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid, SymError
from tests.decoder.bench import Bench, Call, require, tokens_of

ISAS = [
    *("amx", "amx-emulated", "avx512-bf16"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("avx512", "avx2", "plain")),
]
PRECISIONS = ["float32", "bf16", "int8", "int4"]
SHAPES = {
    "gqa 2, head 16": {},
    "gqa 3, head 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 96, "ffn_size": 160},
    "gqa 4, head 80": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 80, "hidden_size": 80, "ffn_size": 144},
    "gqa 20, head 48, untied": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 48, "tie_embeddings": False},
}
CLOSE = {"float32": 1e-4, "bf16": 0.03, "int8": 0.06, "int4": 0.06}
"""Largest error of a logit beside the largest logit; measured: 0.012, 0.025, 0.025."""


def quantized(weights: Weights, *kinds: str) -> Weights:
    """The matrices in these GGUF types in turn, where whole blocks of 32 fit; the rest stays float32."""
    tensors = {}
    for index, name in enumerate(weights.names()):
        values, kind = weights.read(name), kinds[index % len(kinds)]
        tensors[name] = weights.stored(name)
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            tensors[name] = StoredTensor(name, Path("memory"), ENCODINGS[kind], values.shape, blocks.reshape(-1).data)
    return Weights(tensors)


def make(bench, precision: str, shape: dict, **options):
    """A bench of a precision; `int4` runs weights of the types that a 4-bit file mixes."""
    weights = random_weights(tiny_config(**shape), seed=7)
    if precision == "int4":
        weights = quantized(weights, "Q4_0", "Q4_1", "Q8_0", "Q4_0", "Q5_1")
    return bench(precision=precision, weights=weights, **shape, **options)


def assert_close(got: np.ndarray, expected: np.ndarray, limit: float) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < limit * np.abs(expected).max()


# ---- right ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_precision_on_every_instruction_set_is_near_the_reference(
    cpu_bench, reference_bench, isa, precision, shape
):
    require(isa)
    cpu = make(cpu_bench, precision, shape, isa=isa)
    assert cpu.decoder.isa == isa
    weights = quantized(random_weights(cpu.config, seed=7), "Q4_0", "Q4_1", "Q8_0", "Q4_0", "Q5_1")
    reference = reference_bench(weights=weights if precision == "int4" else None, **shape)
    prompt = tokens_of(150)
    expected = reference.prefill(prompt)[1]
    for piece in (150, 1) if isa == "avx512-bf16" else (150,):
        assert_close(cpu.prefill(prompt, piece)[1], expected, CLOSE[precision])


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
    assert np.array_equal(*pages)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_the_codes_of_a_file_are_kept_exactly(kind):
    """Rows of a packed embedding equal the file's values (to float16 of a K type's products)."""
    config = tiny_config(hidden_size=256, ffn_size=256, num_heads=16, num_kv_heads=16)
    weights = random_weights(config)
    encoding, rng = ENCODINGS[kind], np.random.default_rng(5)
    blocks = rng.integers(
        0, 256, (config.vocab_size * 256 // encoding.block_values, encoding.block_bytes), dtype=np.uint8
    )
    blocks[:, 0:2] = (rng.uniform(0.5, 1, len(blocks)) * 0.01).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind.endswith(("_1", "_K")):
        blocks[:, 2:4] = rng.uniform(-0.1, 0.1, len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    shape = (config.vocab_size, 256)
    tensors = {name: weights.stored(name) for name in weights.names()}
    tensors[EMBED] = StoredTensor(EMBED, Path("memory"), encoding, shape, blocks.reshape(-1).data)
    other = gguf.quants.quantize(weights.read(layer_name(0, "o")), gguf.GGMLQuantizationType.Q4_0)
    tensors[layer_name(0, "o")] = StoredTensor(
        "o", Path("memory"), ENCODINGS["Q4_0"], (256, 256), other.reshape(-1).data
    )
    weights = Weights(tensors)
    packed = pack_weights(config, weights, "int4")
    expected, got = weights.read(EMBED), np.empty(256, np.float32)
    for row in (0, 1, 15, 16, 31, 32, 258):
        lib.sym_unpack_row(packed.embed, row, 256, ffi.cast("float *", got.ctypes.data))
        tolerance = 1e-3 if kind.endswith("_K") else 1e-7
        assert np.abs(got - expected[row]).max() <= tolerance * np.abs(expected[row]).max(), row


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0.0), ("bf16", 2**-8), ("int8", 4 / 127)])
@pytest.mark.parametrize("hidden", [64, 80, 16 * 67])  # a power of two; times 5; times a number too large to mix
def test_packing_rounds_a_weight_once(precision, tolerance, hidden):
    """Rotated codes come back to their places too: the rotation is its own inverse."""
    config = tiny_config(hidden_size=hidden, num_layers=1)
    weights = random_weights(config)
    packed, got = pack_weights(config, weights, precision), np.empty(hidden, np.float32)
    for row, expected in enumerate(weights.read(EMBED)):
        lib.sym_unpack_row(packed.embed, row, hidden, ffi.cast("float *", got.ctypes.data))
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


# ---- the same call gives the same bits ----


def few_and_many(isa: str) -> list[int]:
    return [1, 33] if isa == "amx-emulated" else [1, 7, 33]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_do_not_depend_on_how_a_prefill_was_chunked(cpu_bench, isa, precision):
    require(isa)
    shape, prompt = SHAPES["gqa 3, head 64"], tokens_of(80 if isa == "amx-emulated" else 300)
    _, whole = make(cpu_bench, precision, shape, isa=isa).prefill(prompt)
    for piece in few_and_many(isa):
        _, pieces = make(cpu_bench, precision, shape, isa=isa, seed=piece).prefill(prompt, piece)
        assert np.array_equal(whole, pieces), piece


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_threads_or_on_the_batch(cpu_bench, precision, threads):
    def calls(bench):
        files = [bench.prefill(tokens_of(1 + 37 * i % 90, seed=i), reserve=40)[0] for i in range(12)]
        return [
            Call(f, tokens_of([1, 5, 40][i % 3], seed=100 + i), ["last", "all"][i % 2]) for i, f in enumerate(files)
        ]

    together = make(cpu_bench, precision, {}, threads=threads, num_pages=256)
    alone = make(cpu_bench, precision, {}, num_pages=256, seed=9)
    for got, call in zip(together.step(*calls(together)), calls(alone), strict=True):
        assert np.array_equal(got, alone.step(call)[0])


def family(bench, lengths: list[int], shared: int):
    """Files that begin with the pages of one prefix, as forks do, and go on each on its own."""
    base, _ = bench.prefill(tokens_of(shared))
    files = []
    for index, length in enumerate(lengths):
        file = bench.file(length + 8)
        file.pages = np.concatenate([base.pages, file.pages]).astype(np.int32)
        file.length = shared
        bench.step(Call(file, tokens_of(length, seed=50 + index), "none"))
        files.append(file)
    return files


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_do_not_depend_on_whether_pages_are_shared(cpu_bench, isa, precision):
    """Twenty forks of a prefix in one step: its pages are read once for all; alone each reads them for itself.

    The first and the last are computed anew as well, in pages of their own.
    """
    require(isa)
    shape, shared, count = {"num_layers": 3}, 544, 5 if isa == "amx-emulated" else 20
    lengths = [1 + 23 * i % 260 for i in range(count)]
    tokens = [tokens_of(1 + i % 3, seed=i) for i in range(count)]
    bench = make(cpu_bench, precision, shape, isa=isa, num_pages=512)
    files = family(bench, lengths, shared)
    together = bench.step(*(Call(file, t) for file, t in zip(files, tokens, strict=True)))
    assert bench.decoder.shared_rows == sum(map(len, tokens))
    for index, (length, t, got) in enumerate(zip(lengths, tokens, together, strict=True)):
        files[index].length = shared + length
        assert np.array_equal(got, bench.step(Call(files[index], t))[0]), index
        assert bench.decoder.shared_rows == 0
    for index in (0, count - 1):
        own = make(cpu_bench, precision, shape, isa=isa, seed=3)
        file, _ = own.prefill(tokens_of(shared) + tokens_of(lengths[index], seed=50 + index), reserve=8)
        assert np.array_equal(together[index], own.step(Call(file, tokens[index]))[0]), index
        assert own.decoder.shared_rows == 0


def test_a_tree_shares_each_of_its_branches_pages(cpu_bench):
    """Four files: all share split 0, two and two share split 1; the last pages are each file's own."""
    bench, alone = cpu_bench(num_pages=256, precision="bf16"), cpu_bench(num_pages=256, precision="bf16", seed=5)
    trunk, _ = bench.prefill(tokens_of(256))
    calls = []
    for branch in range(2):
        limb = bench.file(256)
        limb.pages, limb.length = np.concatenate([trunk.pages, limb.pages]).astype(np.int32), 256
        bench.step(Call(limb, tokens_of(256, seed=branch), "none"))
        for leaf in range(2):
            file = bench.file(64)
            file.pages, file.length = np.concatenate([limb.pages, file.pages]).astype(np.int32), 512
            bench.step(Call(file, tokens_of(7 + leaf, seed=10 + leaf), "none"))
            calls.append((branch, leaf, Call(file, [branch, leaf])))
    outs = bench.step(*(call for _, _, call in calls))
    assert bench.decoder.shared_rows == 8
    for (branch, leaf, _), got in zip(calls, outs, strict=True):
        text = tokens_of(256) + tokens_of(256, seed=branch) + tokens_of(7 + leaf, seed=10 + leaf)
        file, _ = alone.prefill(text, 100, reserve=2)
        assert np.array_equal(got, alone.step(Call(file, [branch, leaf]))[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [0x7FC0, 0xFFC0, 0x7F80, 0xFF7F], ids=["nan", "-nan", "inf", "-huge"])
def test_what_lies_in_unseen_slots_of_bfloat16_pages_never_shows(cpu_bench, isa, poison):
    require(isa)
    clean, dirty = (cpu_bench(isa=isa, precision="bf16") for _ in range(2))
    dirty.arena.pages[:] = poison
    prompt = tokens_of(271)
    for piece in (1, 50, 271) if isa != "amx-emulated" else (90,):
        (file, a), (file_too, b) = (bench.prefill(prompt, piece, reserve=1) for bench in (clean, dirty))
        assert np.array_equal(a, b)
        assert np.array_equal(clean.step(Call(file, [1]))[0], dirty.step(Call(file_too, [1]))[0])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [31, 33, 64, 270])
def test_an_exported_and_imported_prefix_goes_on_with_the_same_bits(cpu_bench, precision, length):
    """Export is the head of every page, import the bytes of it in other pages, tail zeroed."""
    bench = make(cpu_bench, precision, {})
    file, _ = bench.prefill(tokens_of(length), reserve=2)
    copy = bench.file(length + 2)
    for index, (source, target) in enumerate(zip(file.pages, copy.pages, strict=True)):
        entries = max(0, min(32, length - 32 * index))
        bench.arena.writable(int(target))[:] = bench.arena.masked(bench.arena.view(int(source)), entries)
    copy.length = length
    a, b = bench.step(Call(file, [1, 2])), bench.step(Call(copy, [1, 2]))
    assert np.array_equal(a[0], b[0])


# ---- masks and windows ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_mask_hides_entries_as_in_the_reference(cpu_bench, reference_bench, isa, precision):
    require(isa)
    rng, before, rows = np.random.default_rng(1), 290, 20
    mask = rng.random((rows, before + rows)) < 0.5
    mask[3, :256] = False  # a row that sees nothing of a whole split
    mask[np.arange(rows), before + np.arange(rows)] = True
    outs = []
    for bench in (cpu_bench(isa=isa, precision=precision), reference_bench()):
        file, _ = bench.prefill(tokens_of(before), reserve=rows)
        outs.append(bench.step(Call(file, tokens_of(rows), mask=mask))[0])
    assert_close(*outs, CLOSE[precision])


def test_rows_with_a_mask_have_the_same_bits_alone_and_in_a_batch(cpu_bench):
    bench, alone = cpu_bench(num_pages=256, precision="bf16"), cpu_bench(num_pages=256, precision="bf16", seed=2)
    files = family(bench, [3, 9, 14], 512)
    mask = np.ones((2, 516), bool)
    mask[:, 5:400] = False
    calls = [Call(files[0], [1, 2], mask=mask[:, : 512 + 3 + 2]), Call(files[1], [3]), Call(files[2], [4])]
    calls[0].mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    together = bench.step(*calls)
    for index, (length, call, got) in enumerate(zip([3, 9, 14], calls, together, strict=True)):
        file, _ = alone.prefill(tokens_of(512) + tokens_of(length, seed=50 + index), reserve=2)
        assert np.array_equal(got, alone.step(Call(file, call.tokens, mask=call.mask))[0])


def test_a_mask_of_the_wrong_shape_or_that_hides_a_rows_own_entry_is_refused(cpu_bench):
    bench = cpu_bench()
    with pytest.raises(ValueError, match=r"a mask of shape \(2, 3\) for 2 rows over 2 entries"):
        bench.step(Call(bench.file(2), [1, 2], mask=np.ones((2, 3), bool)))
    with pytest.raises(ValueError, match="every row must see itself"):
        bench.step(Call(bench.file(2), [1, 2], mask=np.zeros((2, 2), bool)))


@pytest.mark.parametrize("window", [1, 64, 300])
def test_sliding_layers_see_their_window_alone(cpu_bench, reference_bench, window):
    shape = {"num_layers": 3, "window": window, "sliding_layers": (True, False, True), "local_rope_theta": 500.0}
    cpu, reference = cpu_bench(**shape), reference_bench(**shape)
    prompt = tokens_of(600)
    (file, whole), (_, expected) = cpu.prefill(prompt, reserve=2), reference.prefill(prompt)
    assert_close(whole, expected, CLOSE["float32"])
    for piece in (7, 100):
        assert np.array_equal(whole, cpu_bench(seed=piece, **shape).prefill(prompt, piece)[1])
    forks = family(bench := cpu_bench(num_pages=256, **shape), [3, 40], 544)
    together = bench.step(*(Call(fork, [5]) for fork in forks))
    for index, length in enumerate([3, 40]):
        alone = cpu_bench(seed=8, **shape)
        file, _ = alone.prefill(tokens_of(544) + tokens_of(length, seed=50 + index), reserve=1)
        assert np.array_equal(together[index], alone.step(Call(file, [5]))[0])


# ---- the edge ----


def test_int4_needs_a_checkpoint_of_4_bits():
    config = tiny_config()
    with pytest.raises(Invalid, match="int4 runs 4-bit weights as a GGUF file has them"):
        CpuDecoder(config, random_weights(config), Arena(config, 1, "BF16"), 1, precision="int4")


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "F32"), ("float32", "BF16"), ("int8", "F32")])
def test_a_precision_and_an_arena_that_do_not_fit_are_refused(precision, dtype):
    config = tiny_config()
    with pytest.raises(Invalid, match=f"precision {precision} needs an arena of {KV_DTYPE[precision]}"):
        CpuDecoder(config, random_weights(config), Arena(config, 1, dtype), 1, precision=precision)


def test_an_unknown_precision_is_named():
    config = tiny_config()
    with pytest.raises(Invalid, match="precision 'fp8' is not one of float32, bf16, int8, int4"):
        CpuDecoder(config, random_weights(config), Arena(config, 1), 1, precision="fp8")


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_weights_that_do_not_fit_are_refused_with_the_figures(monkeypatch, precision):
    monkeypatch.setattr(packing, "available_memory_bytes", lambda: 1000)
    config = tiny_config()
    with pytest.raises(
        SymError, match=r"the weights take 0\.0 GB in this precision, 0\.0 GB of memory are available"
    ) as raised:
        CpuDecoder(config, random_weights(config), Arena(config, 1, "BF16"), 1, precision=precision)
    assert raised.value.errno == errno.ENOMEM


@pytest.mark.parametrize(("precision", "value"), [("int8", np.inf), ("int4", np.nan), ("int4", 1e4)])
def test_weights_that_codes_cannot_hold_are_refused(precision, value):
    config = tiny_config()
    weights = quantized(random_weights(config), "Q4_0")
    tensors = {name: weights.stored(name) for name in weights.names()}
    name = layer_name(0, "up")
    damaged = weights.read(name)
    damaged[3, 5] = value
    tensors[name] = StoredTensor.of_array(name, damaged)
    with pytest.raises(Invalid, match="not finite"):
        CpuDecoder(config, Weights(tensors), Arena(config, 1, "BF16"), 1, precision=precision)


def test_the_emulated_tiles_are_never_chosen_by_themselves():
    assert backend.choose_isa(None) != "amx-emulated"
