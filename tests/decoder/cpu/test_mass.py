"""The mass of attention that a chunk may ask for: as the reference has it, and nothing else changes by asking."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.batch import Chunk, StepBatch
from tests.decoder.bench import Bench, Call, require, tokens_of
from tests.decoder.cpu.test_step import ISAS, SHAPES

WINDOWED = {"window": 40, "sliding_layers": (True, False), "attn_softcap": 5.0}
KINDS = dict(list(SHAPES.items())[:4]) | {"20 heads of one": SHAPES["gqa 20, head 48"]}
KINDS["64 heads of one"] = SHAPES["gqa 64, head 256"]


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


def masses(bench: Bench, prompt: list[int], pieces: list[int], *, rows: str = "last") -> np.ndarray:
    """Return the attention mass of a whole prompt, whose pieces are computed in separate steps."""
    file, mass = bench.file(len(prompt)), bench.no_mass(len(prompt))
    for piece in pieces:
        tokens = prompt[file.length : file.length + piece]
        bench.step(Call(file, tokens, rows, mass=mass))
    assert file.length == len(prompt)
    return mass


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS.keys())
def test_a_prompt_and_the_token_after_it_attend_as_the_references_do(cpu_bench, reference_bench, isa, shape):
    require(isa)
    cpu, reference = cpu_bench(isa=isa, **shape), reference_bench(seed=5, **shape)
    prompt = tokens_of(301, vocab=cpu.config.vocab_size)
    got, expected = masses(cpu, prompt, [300, 1]), masses(reference, prompt, [300, 1])
    assert_close(got, expected)
    # Each row gives a whole to the entries that it sees, by each of its heads.
    group = cpu.config.num_heads // cpu.config.num_kv_heads
    assert np.allclose(got.sum(axis=2), 301 * group, rtol=1e-5)


@pytest.mark.parametrize("isa", [*ISAS, "amx-emulated"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_precisions_attend_nearly_as_float32_does(cpu_bench, isa, precision):
    require(isa)
    prompt = tokens_of(300)
    got = masses(cpu_bench(isa=isa, precision=precision, **SHAPES["gqa 3, head 64"]), prompt, [300])
    expected = masses(cpu_bench(isa=isa, **SHAPES["gqa 3, head 64"]), prompt, [300])
    assert np.abs(got - expected).max() < 0.1 * expected.max()


def test_sliding_layers_and_caps_are_those_of_the_reference(cpu_bench, reference_bench):
    cpu, reference = cpu_bench(**WINDOWED), reference_bench(**WINDOWED)
    prompt = tokens_of(300)
    got = masses(cpu, prompt, [299, 1])
    assert_close(got, masses(reference, prompt, [299, 1]))
    file, _ = cpu.prefill(prompt, reserve=1)
    mass = cpu.no_mass(301)
    cpu.step(Call(file, [1], mass=mass))
    assert not mass[0, :, :261].any()  # 40 entries, its own among them
    assert mass[0, :, 261:].all()
    assert mass[1].all()


def test_what_a_mask_hides_has_no_mass(cpu_bench, reference_bench):
    outs = []
    for bench in (cpu_bench(), reference_bench()):
        file, _ = bench.prefill(tokens_of(270), reserve=40)
        mass = bench.no_mass(310)
        mask = np.random.default_rng(2).random((40, 310)) < 0.3
        mask[:, 64:128] = False
        mask[np.arange(40), 270 + np.arange(40)] = True
        mask &= np.tri(40, 310, 270, dtype=np.bool_)
        bench.step(Call(file, tokens_of(40, seed=9), mask=mask, mass=mass))
        assert not mass[:, :, 64:128].any()
        outs.append(mass)
    assert_close(*outs)


def test_a_call_that_wants_no_row_has_the_last_layers_mass_too(cpu_bench):
    prompt = tokens_of(100)
    without, with_row = (masses(cpu_bench(), prompt, [60, 40], rows=rows) for rows in ("none", "last"))
    assert without[-1].any()
    assert np.array_equal(without, with_row)


@pytest.mark.parametrize("isa", ISAS)
def test_its_bits_do_not_depend_on_chunks_threads_or_the_batch(cpu_bench, isa):
    require(isa)
    prompt = tokens_of(400)
    whole = masses(cpu_bench(isa=isa), prompt, [400])
    for threads, pieces in ((1, [400]), (3, [1, 1, 130, 7, 261]), (2, [255, 1, 144])):
        assert np.array_equal(masses(cpu_bench(isa=isa, threads=threads), prompt, pieces), whole)
    bench = cpu_bench(isa=isa, num_pages=256)
    base, _ = bench.prefill(prompt[:-1], reserve=1)
    fork = bench.file(400)
    fork.pages[:-1], fork.length = base.pages[:-1], base.length
    bench.arena.pages[fork.pages[-1]] = bench.arena.pages[base.pages[-1]]
    other, mass = bench.file(50), bench.no_mass(400)
    masses_too = bench.no_mass(50)
    bench.step(
        Call(base, prompt[-1:], "last", mass=mass), Call(fork, [5]), Call(other, prompt[:50], "none", mass=masses_too)
    )
    alone = cpu_bench(isa=isa)
    file, expected = alone.prefill(prompt[:-1], reserve=1)[0], alone.no_mass(400)
    alone.step(Call(file, prompt[-1:], mass=expected))
    assert np.array_equal(mass, expected)
    assert np.array_equal(masses_too, masses(cpu_bench(isa=isa), prompt[:50], [50]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
def test_logits_and_entries_keep_their_bits_whoever_asks(cpu_bench, isa, precision):
    require(isa)

    def run(*, asks: bool) -> tuple[list[np.ndarray], np.ndarray]:
        bench = cpu_bench(isa=isa, precision=precision, num_pages=256)
        files = [bench.file(700) for _ in range(5)]
        outs = []
        for step in range(3):
            calls = []
            for index, file in enumerate(files):
                tokens = tokens_of([1, 300, 5][(index + step) % 3], seed=10 * step + index)
                mass = bench.no_mass(file.length + len(tokens)) if asks and index != 1 else None
                calls.append(Call(file, tokens, ["last", "all", "none"][index % 3], mass=mass))
            outs += bench.step(*calls)
        return outs, np.concatenate([bench.arena.pages[file.pages[: file.length // 32]].ravel() for file in files])

    (plain, pages), (asked, pages_too) = run(asks=False), run(asks=True)
    assert all(np.array_equal(a, b) for a, b in zip(plain, asked, strict=True))
    assert np.array_equal(pages, pages_too)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_lies_in_slots_that_a_row_does_not_see_never_shows(cpu_bench, isa, poison):
    require(isa)
    clean, dirty = cpu_bench(isa=isa), cpu_bench(isa=isa)
    dirty.arena.pages[:] = poison
    prompt = tokens_of(270)
    for pieces in ([270], [50, 219, 1]):
        assert np.array_equal(masses(clean, prompt, pieces), masses(dirty, prompt, pieces))


@pytest.mark.parametrize(
    "mass",
    [
        np.zeros((2, 2, 2), np.float32),
        np.zeros((2, 1, 9), np.float32),
        np.zeros((2, 2, 9)),
        np.zeros((9, 2, 2), np.float32).T,
        np.broadcast_to(np.float32(0), (2, 2, 9)),
        np.zeros(3, np.float32),
    ],
)
def test_a_mass_that_does_not_hold_the_chunks_entries_is_refused(cpu_bench, mass):
    tokens, row = np.array([1, 2, 3], np.int32), memoryview(np.zeros(259, np.float32))
    chunk = Chunk(tokens, tokens, np.array([0], np.int32), 0, (row,), mass=mass)
    with pytest.raises(ValueError, match="a mass of"):
        cpu_bench().decoder.step(StepBatch((chunk,)))
