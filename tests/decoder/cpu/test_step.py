from __future__ import annotations

import errno

import numpy as np
import pytest

from decoder.batch import Chunk, StepBatch
from decoder.cores import available_cores
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid
from tests.decoder.bench import Call, require, tokens_of

SHAPES = {
    "gqa 2, head 16": {},
    "gqa 1, head 32": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
    "gqa 3, head 64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 96, "ffn_size": 144},
    "gqa 3, head 80, untied": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80, "tie_embeddings": False},
    "gqa 1, head 128": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "num_layers": 1},
    "gqa 20, head 48": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 48, "vocab_size": 301},
    "gqa 64, head 256": {"num_heads": 64, "num_kv_heads": 1, "head_dim": 256, "num_layers": 1, "vocab_size": 17},
}
ISAS = ["avx512", "avx2", "plain"]


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, pytest.param(700, marks=pytest.mark.slow)])
def test_a_prefill_and_the_tokens_after_it_give_the_references_logits(cpu_bench, reference_bench, shape, length):
    cpu, reference = cpu_bench(**shape), reference_bench(seed=5, **shape)
    prompt, rest = (tokens_of(n, vocab=cpu.config.vocab_size) for n in (length, 3))
    (file, got), (other, expected) = cpu.prefill(prompt, reserve=3), reference.prefill(prompt, reserve=3)
    assert_close(got, expected)
    for token in rest:
        assert_close(cpu.step(Call(file, [token]))[0], reference.step(Call(other, [token]))[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", list(SHAPES.values())[:4], ids=list(SHAPES)[:4])
def test_every_instruction_set_gives_the_references_logits(cpu_bench, reference_bench, isa, shape):
    require(isa)
    cpu, reference = cpu_bench(isa=isa, **shape), reference_bench(**shape)
    assert cpu.decoder.isa == isa
    prompt = tokens_of(300)
    assert_close(cpu.prefill(prompt, 77)[1], reference.prefill(prompt)[1])


def test_instruction_sets_that_fuse_multiply_and_add_give_the_same_bits(cpu_bench):
    require("avx512")
    prompt = tokens_of(300)
    wide, narrow = (cpu_bench(isa=isa, **SHAPES["gqa 3, head 64"]).prefill(prompt)[1] for isa in ("avx512", "avx2"))
    assert np.array_equal(wide, narrow)


def mixed_calls(bench, count):
    """`count` files of different lengths, then a call on each: decodes, short and long prefills, all kinds of rows."""
    calls = []
    for i in range(count):
        file, _ = bench.prefill(tokens_of(1 + 37 * i % 90, seed=i), reserve=40)
        calls.append(Call(file, tokens_of([1, 5, 40][i % 3], seed=100 + i), ["last", "all", "none"][i // 3 % 3]))
    return calls


@pytest.mark.parametrize("count", [1, 2, 33])
def test_a_batch_of_many_files_gives_the_references_logits(cpu_bench, reference_bench, count):
    cpu, reference = cpu_bench(num_pages=256), reference_bench(num_pages=256)
    for got, expected in zip(
        cpu.step(*mixed_calls(cpu, count)),
        reference.step(*mixed_calls(reference, count)),
        strict=True,
    ):
        assert got.shape == expected.shape
        if got.size:
            assert_close(got, expected)


def test_calls_that_want_no_rows_still_store_their_entries(cpu_bench):
    prompt = tokens_of(45)
    loud, quiet = cpu_bench(), cpu_bench()
    loud.step(Call(loud.file(45), prompt, "all"))
    quiet.step(Call(quiet.file(45), prompt, "none"))
    assert loud.arena.pages.any()
    assert np.array_equal(loud.arena.pages, quiet.arena.pages)


def test_explicit_positions_rotate_and_nothing_more(cpu_bench, reference_bench):
    positions = [7, 7, 3, 4000, 0, 12, 13, 14]
    outs = [
        bench.step(Call(bench.file(8), tokens_of(8), "all", positions))[0] for bench in (cpu_bench(), reference_bench())
    ]
    assert_close(*outs)
    bench = cpu_bench()
    assert not np.array_equal(bench.step(Call(bench.file(8), tokens_of(8)))[0], outs[0])


# ---- the same call gives the same bits ----


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "shape", [SHAPES["gqa 2, head 16"], SHAPES["gqa 3, head 64"], SHAPES["gqa 3, head 80, untied"]]
)
def test_bits_do_not_depend_on_how_a_prefill_was_chunked(cpu_bench, isa, shape):
    require(isa)
    prompt = tokens_of(600)
    _, whole = cpu_bench(isa=isa, **shape).prefill(prompt)
    for piece in (1, 7, 32, 33, 257):
        _, pieces = cpu_bench(isa=isa, seed=piece, **shape).prefill(prompt, piece)
        assert np.array_equal(whole, pieces), piece


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_number_of_threads(cpu_bench, threads):
    two, other = cpu_bench(num_pages=256), cpu_bench(num_pages=256, threads=threads)
    assert other.decoder.num_threads == threads
    for a, b in zip(two.step(*mixed_calls(two, 20)), other.step(*mixed_calls(other, 20)), strict=True):
        assert np.array_equal(a, b)
    (file, a), (file_too, b) = two.prefill(tokens_of(900), reserve=1), other.prefill(tokens_of(900), 300, reserve=1)
    assert np.array_equal(a, b)
    # A decode over several splits, which threads share and whoever is last merges.
    assert np.array_equal(two.step(Call(file, [1]))[0], other.step(Call(file_too, [1]))[0])


def test_bits_do_not_depend_on_what_else_is_in_the_batch(cpu_bench):
    together, alone = cpu_bench(num_pages=256), cpu_bench(num_pages=256, seed=9)
    batch = together.step(*mixed_calls(together, 33))
    for got, call in zip(batch, mixed_calls(alone, 33), strict=True):
        assert np.array_equal(got, alone.step(call)[0])


def test_long_decodes_and_prefills_in_one_batch_give_the_bits_that_each_gives_alone(cpu_bench):
    def calls(bench):
        long, _ = bench.prefill(tokens_of(800), 256, reserve=4)
        edge, _ = bench.prefill(tokens_of(254), reserve=4)
        fresh = bench.file(300)
        return [
            Call(fresh, tokens_of(300), "last"),
            Call(long, tokens_of(4)),
            Call(edge, tokens_of(4)),  # its rows lie on both sides of a split's boundary
        ]

    together, alone = cpu_bench(), cpu_bench(seed=4)
    for got, call in zip(together.step(*calls(together)), calls(alone), strict=True):
        assert np.array_equal(got, alone.step(call)[0])


def test_a_decode_over_several_splits_is_right_in_every_layer(cpu_bench):
    outs = []
    for piece in (1, 9):  # both are spread over their splits; the whole prefill below is not
        bench = cpu_bench(num_layers=5, **SHAPES["gqa 3, head 64"])
        file, _ = bench.prefill(tokens_of(760), reserve=9)
        tokens = tokens_of(9, seed=8)
        outs.append(np.concatenate([bench.step(Call(file, tokens[i : i + piece]))[0] for i in range(0, 9, piece)]))
    whole = cpu_bench(num_layers=5, **SHAPES["gqa 3, head 64"]).prefill(tokens_of(760) + tokens)[1][760:]
    assert np.array_equal(outs[0], whole)
    assert np.array_equal(outs[1], whole)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300])
def test_a_fork_whose_tail_was_copied_goes_on_with_the_same_bits(cpu_bench, length):
    bench = cpu_bench()
    base, _ = bench.prefill(tokens_of(length), reserve=20)
    fork = bench.file(0)
    fork.pages, fork.length = base.pages.copy(), length
    tail, copies = length // 32, []
    if length % 32:
        spare = int(bench.file(1).pages[0])
        copies = [(int(fork.pages[tail]), spare, length % 32)]
        fork.pages[tail] = spare
        fork.pages[tail + 1 :] = bench.file(32 * len(fork.pages[tail + 1 :])).pages
    else:
        fork.pages[tail:] = bench.file(32 * len(fork.pages[tail:])).pages
    # Both go on at once: the copy is made before the base's own append lands in the page.
    base_out, fork_out = bench.step(Call(base, [5, 6, 7]), Call(fork, [9, 8, 7]), copies=copies)
    for tokens, expected in (([5, 6, 7], base_out), ([9, 8, 7], fork_out)):
        fresh = cpu_bench(seed=2)
        file, _ = fresh.prefill(tokens_of(length), reserve=3)
        assert np.array_equal(fresh.step(Call(file, tokens))[0], expected)


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
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e38])
def test_what_lies_in_slots_that_a_row_does_not_see_never_shows(cpu_bench, isa, poison):
    require(isa)
    clean, dirty = cpu_bench(isa=isa), cpu_bench(isa=isa)
    dirty.arena.pages[:] = poison
    prompt = tokens_of(270)
    for piece in (1, 50, 270):
        (file, a), (file_too, b) = (bench.prefill(prompt, piece, reserve=1) for bench in (clean, dirty))
        assert np.array_equal(a, b)
        assert np.array_equal(clean.step(Call(file, [1]))[0], dirty.step(Call(file_too, [1]))[0])


def test_appending_after_a_truncation_gives_the_bits_of_never_having_gone_further(cpu_bench):
    bench, fresh = cpu_bench(), cpu_bench()
    file, _ = bench.prefill(tokens_of(100))
    file.length = 70
    straight, _ = fresh.prefill(tokens_of(100)[:70], reserve=20)
    assert np.array_equal(bench.step(Call(file, [1, 2, 3]))[0], fresh.step(Call(straight, [1, 2, 3]))[0])


# ---- the edge ----


def chunk(**changes) -> Chunk:
    rows = (memoryview(np.zeros(259, np.float32)),)
    ints = {name: np.array(changes.pop(name, [1, 2]), dtype=np.int32) for name in ("tokens", "positions", "pages")}
    return Chunk(**ints, start=changes.pop("start", 0), rows=changes.pop("rows", rows), **changes)


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
        (
            chunk(tokens=[1] * 3, positions=[1] * 3, rows=(memoryview(np.zeros(259, np.float32)),) * 2),
            "3 tokens has 2 rows",
        ),
        (chunk(rows=(memoryview(np.zeros(258, np.float32)),)), "1032 bytes of format 'f'"),
        (chunk(rows=(memoryview(np.zeros(259, np.int32)),)), "of format 'i'"),
    ],
)
def test_a_batch_that_would_index_out_of_range_is_refused_and_nothing_is_written(cpu_bench, bad, message):
    bench = cpu_bench()
    with pytest.raises(ValueError, match=message):
        bench.decoder.step(StepBatch((chunk(pages=[5, 6]), bad)))
    assert not bench.arena.pages.any()


def test_a_copy_of_a_page_that_is_not_there_is_refused(cpu_bench):
    with pytest.raises(ValueError, match="page to copy 64"):
        cpu_bench().step(copies=[(0, 64, 32)])


def test_a_row_that_cannot_be_written_is_refused(cpu_bench):
    row = memoryview(bytes(4 * 259)).cast("f")
    with pytest.raises((BufferError, ValueError)):
        cpu_bench().decoder.step(StepBatch((chunk(rows=(row,)),)))


def test_pages_past_the_entries_of_a_chunk_are_not_looked_at(cpu_bench):
    bench = cpu_bench()
    bench.decoder.step(StepBatch((chunk(pages=[5, 1 << 30]),)))
    assert set(np.flatnonzero(bench.arena.pages.any(axis=(1, 2, 3, 4)))) == {5}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 24}, "head_dim 24"),
        ({"head_dim": 272}, "head_dim 272"),
        ({"num_heads": 3, "num_kv_heads": 2}, "3 heads cannot share 2"),
        ({"hidden_size": 72}, "hidden_size 72"),
        ({"ffn_size": 100}, "ffn_size 100"),
    ],
)
def test_a_shape_that_the_kernels_do_not_have_is_named(shape, message):
    config = tiny_config(**shape)
    with pytest.raises(Invalid, match=message) as raised:
        CpuDecoder(config, random_weights(config), Arena(config, 1))
    assert raised.value.errno == errno.EINVAL


def test_an_instruction_set_that_is_not_there_is_named(cpu_bench):
    with pytest.raises(Invalid, match="'sparc'"):
        cpu_bench(isa="sparc")


def test_the_threads_default_to_the_cores_that_this_process_may_use():
    config = tiny_config()
    decoder = CpuDecoder(config, random_weights(config), Arena(config, 1))
    assert decoder.num_threads == available_cores() >= 1
    decoder.close()
    decoder.close()  # twice is fine
