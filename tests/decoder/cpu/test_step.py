"""The step on every instruction set and in every precision: near the reference, and the same bits for the same call.

AMX is not on every machine: `amx-emulated` runs its kernels with the tile instructions done in plain C.
"""

import errno
from typing import Any

import numpy as np
import pytest

from decoder.batch import StepBatch
from decoder.cores import available_cores
from decoder.cpu import backend
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid
from tests.decoder.bench import Call, File, assert_close, chunk, copy_of, forks_of, require, tokens_of
from tests.decoder.cpu.quantized import quantized

SHAPES = {
    "gqa 2, head 16": {},
    "gqa 1, head 32": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
    "gqa 3, head 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 96, "ffn_size": 160},
    "gqa 3, head 80, untied": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80, "tie_embeddings": False},
    "gqa 4, head 80": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 80, "hidden_size": 80, "ffn_size": 144},
    "gqa 1, head 128": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "num_layers": 1},
    "gqa 20, head 48": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 48, "vocab_size": 301},
    "gqa 64, head 256": {"num_heads": 64, "num_kv_heads": 1, "head_dim": 256, "num_layers": 1, "vocab_size": 17},
}
WIDE = SHAPES["gqa 3, head 64"]
SLOW_ISAS = ("avx512", "avx2", "plain")
ISAS = ["amx", "amx-emulated", "avx512-bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ISAS)]
PRECISIONS = ["float32", "bf16", "int8", "int4"]
CLOSE = {"float32": 1e-4, "bf16": 0.03, "int8": 0.06, "int4": 0.06}
"""Largest error of a logit beside the largest logit; measured: 0.012, 0.025, 0.025."""


def weights_of(precision: str, shape: dict):
    """`int4` runs weights of the types that a 4-bit file mixes."""
    weights = random_weights(tiny_config(**shape), seed=7)
    return quantized(weights, "Q4_0", "Q4_1", "Q8_0", "Q4_0", "Q5_1") if precision == "int4" else weights


def make(bench, precision: str = "float32", shape: dict = SHAPES["gqa 2, head 16"], **options):
    return bench(precision=precision, weights=weights_of(precision, shape), **shape, **options)


def assert_same_bits(outs, others) -> None:
    for out, other in zip(outs, others, strict=True):
        assert np.array_equal(out, other)


# ---- right ----


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, pytest.param(530, marks=pytest.mark.slow)])
def test_a_prefill_and_the_tokens_after_it_give_the_references_logits(cpu_bench, reference_bench, shape, length):
    cpu, reference = cpu_bench(**shape), reference_bench(seed=5, **shape)
    prompt, rest = (tokens_of(n, vocab=cpu.config.vocab_size) for n in (length, 3))
    (file, got), (other, expected) = cpu.prefill(prompt, reserve=3), reference.prefill(prompt, reserve=3)
    assert_close(got, expected)
    for token in rest:
        assert_close(cpu.step(Call(file, [token]))[0], reference.step(Call(other, [token]))[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name", ["gqa 2, head 16", "gqa 3, head 64", "gqa 3, head 80, untied", "gqa 4, head 80", "gqa 20, head 48"]
)
def test_every_precision_on_every_instruction_set_is_near_the_reference(
    cpu_bench, reference_bench, isa, precision, name
):
    require(isa)
    shape, prompt = SHAPES[name], tokens_of(300 if isa in SLOW_ISAS else 150)
    cpu = make(cpu_bench, precision, shape, isa=isa)
    assert cpu.decoder.isa == isa
    expected = reference_bench(weights=weights_of(precision, shape), **shape).prefill(prompt)[1]
    for piece in (150, 1) if isa == "avx512-bf16" else (150,):
        assert_close(cpu.prefill(prompt, piece)[1], expected, tolerance=CLOSE[precision])


def test_explicit_positions_rotate_and_nothing_more(cpu_bench, reference_bench):
    positions = [7, 7, 3, 4000, 0, 12, 13, 14]
    outs = [
        bench.step(Call(bench.file(8), tokens_of(8), "all", positions))[0] for bench in (cpu_bench(), reference_bench())
    ]
    assert_close(*outs)
    bench = cpu_bench()
    assert not np.array_equal(bench.step(Call(bench.file(8), tokens_of(8)))[0], outs[0])


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
    assert_close(*outs, tolerance=CLOSE[precision])


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 64, 300])
def test_sliding_layers_see_their_window_alone(cpu_bench, reference_bench, window):
    shape = {"num_layers": 3, "window": window, "sliding_layers": (True, False, True), "local_rope_theta": 500.0}
    prompt = tokens_of(600)
    whole = cpu_bench(**shape).prefill(prompt)[1]
    assert_close(whole, reference_bench(**shape).prefill(prompt)[1])
    for piece in (7, 100):
        assert np.array_equal(whole, cpu_bench(seed=piece, **shape).prefill(prompt, piece)[1])
    bench = cpu_bench(num_pages=256, **shape)
    together = bench.step(*(Call(fork, [5]) for fork in forks_of(bench, [3, 40], 544)))
    assert_same_bits(together, [step_alone(cpu_bench, 544, index, n, [5], **shape) for index, n in enumerate((3, 40))])


# ---- the same call gives the same bits ----


def test_instruction_sets_that_fuse_multiply_and_add_give_the_same_bits(cpu_bench):
    require("avx512")
    wide, narrow = (cpu_bench(isa=isa, **WIDE).prefill(tokens_of(300))[1] for isa in ("avx512", "avx2"))
    assert np.array_equal(wide, narrow)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("precision", "name"),
    [
        *((each, "gqa 3, head 64") for each in PRECISIONS),
        *(("float32", each) for each in ("gqa 2, head 16", "gqa 3, head 80, untied")),
    ],
)
def test_bits_do_not_depend_on_how_a_prefill_was_chunked(cpu_bench, isa, precision, name):
    require(isa)
    length, pieces = (80, [1, 33]) if isa == "amx-emulated" else (300, [1, 7, 33, 257])
    prompt = tokens_of(length)
    _, whole = make(cpu_bench, precision, SHAPES[name], isa=isa).prefill(prompt)
    for piece in pieces:
        _, cut = make(cpu_bench, precision, SHAPES[name], isa=isa, seed=piece).prefill(prompt, piece)
        assert np.array_equal(whole, cut), piece


def mixed_calls(bench, count):
    """`count` files of different lengths, then a call on each: decodes, short and long prefills, all kinds of rows.

    The last one's decode goes over several splits, which threads share and whoever is last merges.
    """
    calls = []
    for i in range(count):
        file, _ = bench.prefill(tokens_of(1 + 37 * i % 90, seed=i), reserve=40)
        calls.append(Call(file, tokens_of([1, 5, 40][i % 3], seed=100 + i), ["last", "all", "none"][i // 3 % 3]))
    return [*calls, Call(bench.prefill(tokens_of(900), 300, reserve=1)[0], [1])]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_threads_or_on_the_batch(cpu_bench, precision, threads):
    together, count = make(cpu_bench, precision, threads=threads, num_pages=256), 33 if precision == "float32" else 12
    assert together.decoder.num_threads == threads
    alone = make(cpu_bench, precision, num_pages=256, seed=9)
    outs = together.step(*mixed_calls(together, count))
    assert_same_bits(outs, [alone.step(call)[0] for call in mixed_calls(alone, count)])


@pytest.mark.slow
def test_a_decode_over_several_splits_is_right_in_every_layer(cpu_bench):
    tokens = tokens_of(9, seed=8)
    whole = cpu_bench(num_layers=5, **WIDE).prefill(tokens_of(760) + tokens)[1][760:]
    for piece in (1, 9):  # both are spread over their splits; the whole prefill is not
        bench = cpu_bench(num_layers=5, **WIDE)
        file, _ = bench.prefill(tokens_of(760), reserve=9)
        outs = [bench.step(Call(file, tokens[i : i + piece]))[0] for i in range(0, 9, piece)]
        assert np.array_equal(np.concatenate(outs), whole)


def test_calls_that_want_no_rows_still_store_their_entries(cpu_bench):
    loud, quiet = cpu_bench(), cpu_bench()
    loud.step(Call(loud.file(45), tokens_of(45), "all"))
    quiet.step(Call(quiet.file(45), tokens_of(45), "none"))
    assert loud.arena.pages.any()
    assert np.array_equal(loud.arena.pages, quiet.arena.pages)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_a_fork_whose_tail_was_copied_goes_on_with_the_same_bits(cpu_bench, length):
    bench = cpu_bench()
    base, _ = bench.prefill(tokens_of(length), reserve=20)
    full, rest = divmod(length, 32)
    fork = File(np.concatenate([base.pages[:full], bench.file(32 * len(base.pages[full:])).pages]), length)
    # Both go on at once: the copy is made before the base's own append lands in the page.
    copies = [(int(base.pages[full]), int(fork.pages[full]), rest)] if rest else []
    outs = bench.step(Call(base, [5, 6, 7]), Call(fork, [9, 8, 7]), copies=copies)
    for tokens, out in zip(([5, 6, 7], [9, 8, 7]), outs, strict=True):
        fresh = cpu_bench(seed=2)
        assert np.array_equal(fresh.step(Call(fresh.prefill(tokens_of(length), reserve=3)[0], tokens))[0], out)


def test_a_step_of_copies_alone_copies(cpu_bench):
    bench = cpu_bench()
    bench.arena.pages[3] = 2.5
    bench.step(copies=[(3, 4, 32), (3, 5, 7), (3, 6, 17)])
    whole, copy, *heads = (bench.arena.view(page) for page in (3, 4, 5, 6))
    assert copy == whole
    for head, count in zip(heads, (7, 17), strict=True):
        assert bench.arena.masked(head, count) == bench.arena.masked(whole, count)
        assert head != whole
    assert bench.arena.masked(heads[0], 16) == heads[0], "no more than half a page"


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("precision", "poison"),
    [
        *(("float32", value) for value in (np.nan, np.inf, -1e38)),
        *(("bf16", bits) for bits in (0x7FC0, 0xFFC0, 0x7F80, 0xFF7F)),  # NaN, -NaN, infinity, the least number
    ],
)
def test_what_lies_in_slots_that_a_row_does_not_see_never_shows(cpu_bench, isa, precision, poison):
    require(isa)
    clean, dirty = (cpu_bench(isa=isa, precision=precision) for _ in range(2))
    dirty.arena.pages[:] = poison
    for length, piece in ((70, 1), (271, 50), (271, 271)) if isa != "amx-emulated" else ((271, 90),):
        (file, a), (file_too, b) = (bench.prefill(tokens_of(length), piece, reserve=1) for bench in (clean, dirty))
        assert np.array_equal(a, b)
        assert np.array_equal(clean.step(Call(file, [1]))[0], dirty.step(Call(file_too, [1]))[0])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [33, 270])
def test_an_exported_and_imported_prefix_goes_on_with_the_same_bits(cpu_bench, precision, length):
    """Export is the head of every page, import the bytes of it in other pages, tail zeroed."""
    bench = make(cpu_bench, precision)
    file, _ = bench.prefill(tokens_of(length), reserve=2)
    copy = copy_of(bench, file)
    a, b = bench.step(Call(file, [1, 2])), bench.step(Call(copy, [1, 2]))
    assert np.array_equal(a[0], b[0])


# ---- pages that several files share ----


def step_alone(cpu_bench, shared: int, index: int, length: int, tokens: list[int], **options) -> np.ndarray:
    """The logits that a fork of `forks_of` gives, computed anew in pages of its own."""
    bench = cpu_bench(seed=3, **options)
    file, _ = bench.prefill(tokens_of(shared) + tokens_of(length, seed=50 + index), reserve=8)
    (out,) = bench.step(Call(file, tokens))
    assert bench.decoder.shared_rows == 0
    return out


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
    files = forks_of(bench, lengths, shared)
    together = bench.step(*(Call(file, t) for file, t in zip(files, tokens, strict=True)))
    assert bench.decoder.shared_rows == sum(map(len, tokens))
    for index, (length, t, got) in enumerate(zip(lengths, tokens, together, strict=True)):
        files[index].length = shared + length
        assert np.array_equal(got, bench.step(Call(files[index], t))[0]), index
        assert bench.decoder.shared_rows == 0
    own = {"isa": isa, "precision": precision, "weights": weights_of(precision, shape), **shape}
    for index in (0, count - 1):
        alone = step_alone(cpu_bench, shared, index, lengths[index], tokens[index], **own)
        assert np.array_equal(together[index], alone), index


def test_a_tree_shares_each_of_its_branches_pages(cpu_bench):
    """Four files: all share split 0, two and two share split 1; the last pages are each file's own."""
    bench, alone = cpu_bench(num_pages=256, precision="bf16"), cpu_bench(num_pages=256, precision="bf16", seed=5)
    trunk, _ = bench.prefill(tokens_of(256))
    calls = []
    for branch in range(2):
        limb = bench.grown(trunk, tokens_of(256, seed=branch))
        leaves = (bench.grown(limb, tokens_of(7 + leaf, seed=10 + leaf)) for leaf in range(2))
        calls += [(branch, leaf, Call(file, [branch, leaf])) for leaf, file in enumerate(leaves)]
    outs = bench.step(*(call for _, _, call in calls))
    assert bench.decoder.shared_rows == 8
    for (branch, leaf, _), got in zip(calls, outs, strict=True):
        text = tokens_of(256) + tokens_of(256, seed=branch) + tokens_of(7 + leaf, seed=10 + leaf)
        file, _ = alone.prefill(text, 100, reserve=2)
        assert np.array_equal(got, alone.step(Call(file, [branch, leaf]))[0])


def test_rows_with_a_mask_have_the_same_bits_alone_and_in_a_batch(cpu_bench):
    bench, alone = cpu_bench(num_pages=256, precision="bf16"), cpu_bench(num_pages=256, precision="bf16", seed=2)
    files = forks_of(bench, [3, 9, 14], 512)
    mask = np.ones((2, 512 + 3 + 2), bool)
    mask[:, 5:400] = False
    calls = [Call(files[0], [1, 2], mask=mask), Call(files[1], [3]), Call(files[2], [4])]
    together = bench.step(*calls)
    for index, (length, call, got) in enumerate(zip([3, 9, 14], calls, together, strict=True)):
        file, _ = alone.prefill(tokens_of(512) + tokens_of(length, seed=50 + index), reserve=2)
        assert np.array_equal(got, alone.step(Call(file, call.tokens, mask=call.mask))[0])


# ---- the edge ----


def row(size: int = 259, dtype: type = np.float32) -> memoryview:
    zeros: Any = np.zeros(size, dtype)
    return memoryview(zeros)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (chunk(tokens=[1, 259]), "token 259 is outside 0 .. 258"),
        (chunk(tokens=[-1, 2]), "token -1 is outside"),
        (chunk(positions=[0, 4096]), "position 4096 is outside 0 .. 4095"),
        (chunk(positions=[0]), "2 tokens and 1 positions"),
        (chunk(tokens=[], positions=[]), "0 tokens and 0 positions"),
        (chunk(pages=[64, 1]), "page 64 is outside 0 .. 63"),
        (chunk(pages=[-1, 1]), "page -1 is outside"),
        (chunk(start=63), "entries 63 to 65 do not fit a table of 2 pages"),
        (chunk(start=-1), "entries -1 to 1 do not fit"),
        (chunk(tokens=[1] * 3, positions=[1] * 3, rows=(row(), row())), "3 tokens has 2 rows"),
        (chunk(rows=(row(258),)), "1032 bytes of format 'f'"),
        (chunk(rows=(row(dtype=np.int32),)), "of format 'i'"),
        (chunk(rows=(memoryview(bytes(4 * 259)).cast("f"),)), "read-only"),
        (chunk(mask=np.ones((2, 3), bool)), r"a mask of shape \(2, 3\) for 2 rows over 2 entries"),
        (chunk(mask=np.zeros((2, 2), bool)), "every row must see itself"),
    ],
)
def test_a_batch_that_cannot_be_computed_is_refused_and_nothing_is_written(cpu_bench, bad, message):
    bench = cpu_bench()
    with pytest.raises((ValueError, BufferError), match=message):
        bench.decoder.step(StepBatch((chunk(pages=[5, 6]), bad)))
    assert not bench.arena.pages.any()


def test_a_copy_of_a_page_that_is_not_there_is_refused(cpu_bench):
    with pytest.raises(ValueError, match="page to copy 64"):
        cpu_bench().step(copies=[(0, 64, 32)])


def test_pages_past_the_entries_of_a_chunk_are_not_looked_at(cpu_bench):
    bench = cpu_bench()
    bench.decoder.step(StepBatch((chunk(pages=[5, 1 << 30]),)))
    assert set(np.flatnonzero(bench.arena.pages.any(axis=(1, 2, 3, 4)))) == {5}


@pytest.mark.parametrize(
    ("shape", "precision", "dtype", "isa", "message"),
    [
        ({"head_dim": 24}, "float32", "F32", None, "head_dim 24"),
        ({"head_dim": 272}, "float32", "F32", None, "head_dim 272"),
        ({"num_heads": 3, "num_kv_heads": 2}, "float32", "F32", None, "3 heads cannot share 2"),
        ({"hidden_size": 72}, "float32", "F32", None, "hidden_size 72"),
        ({"ffn_size": 100}, "float32", "F32", None, "ffn_size 100"),
        ({}, "float32", "F32", "sparc", "'sparc'"),
        ({}, "bf16", "F32", None, "precision bf16 needs an arena of BF16"),
        ({}, "float32", "BF16", None, "precision float32 needs an arena of F32"),
        ({}, "int8", "F32", None, "precision int8 needs an arena of BF16"),
        ({}, "fp8", "F32", None, "precision 'fp8' is not one of float32, bf16, int8, int4"),
    ],
)
def test_what_the_kernels_do_not_have_is_named(shape, precision, dtype, isa, message):
    config = tiny_config(**shape)
    with pytest.raises(Invalid, match=message) as raised:
        CpuDecoder(config, random_weights(config), Arena(config, 1, dtype), 1, isa, precision=precision)
    assert raised.value.errno == errno.EINVAL


def test_the_emulated_tiles_are_never_chosen_by_themselves():
    assert backend.choose_isa(None) != "amx-emulated"


def test_the_threads_default_to_the_cores_that_this_process_may_use():
    config = tiny_config()
    decoder = CpuDecoder(config, random_weights(config), Arena(config, 1))
    assert decoder.num_threads == available_cores() >= 1
    decoder.close()
    decoder.close()  # twice is fine
