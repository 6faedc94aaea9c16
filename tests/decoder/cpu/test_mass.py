"""The mass of attention that a chunk may ask for: as the reference has it, and nothing else changes by asking."""

import numpy as np
import pytest

from decoder.batch import StepBatch
from tests.decoder.bench import Bench, Call, File, assert_close, chunk, require, tokens_of
from tests.decoder.cpu.test_step import SHAPES, WIDE

WINDOWED = {"window": 40, "sliding_layers": (True, False), "attn_softcap": 5.0}
ISAS = ["avx512", "avx2", "plain"]


def masses(bench: Bench, prompt: list[int], pieces: list[int], *, rows: str = "last") -> np.ndarray:
    file, mass = bench.file(len(prompt)), bench.no_mass(len(prompt))
    for piece in pieces:
        bench.step(Call(file, prompt[file.length : file.length + piece], rows, mass=mass))
    assert file.length == len(prompt)
    return mass


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in {"gqa 1, head 128", "gqa 4, head 80"}])
def test_a_prompt_and_the_token_after_it_attend_as_the_references_do(cpu_bench, reference_bench, isa, name):
    require(isa)
    cpu, reference = cpu_bench(isa=isa, **SHAPES[name]), reference_bench(seed=5, **SHAPES[name])
    prompt = tokens_of(301, vocab=cpu.config.vocab_size)
    got = masses(cpu, prompt, [300, 1])
    assert_close(got, masses(reference, prompt, [300, 1]))
    # Each row gives a whole to the entries that it sees, by each of its heads.
    group = cpu.config.num_heads // cpu.config.num_kv_heads
    assert np.allclose(got.sum(axis=2), 301 * group, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("isa", [*ISAS, "amx-emulated"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_precisions_attend_nearly_as_float32_does(cpu_bench, isa, precision):
    require(isa)
    benches = (cpu_bench(isa=isa, precision=each, **WIDE) for each in (precision, "float32"))
    assert_close(*(masses(bench, tokens_of(300), [300]) for bench in benches), tolerance=0.1)


def test_sliding_layers_and_caps_are_those_of_the_reference(cpu_bench, reference_bench):
    cpu, prompt = cpu_bench(**WINDOWED), tokens_of(300)
    assert_close(masses(cpu, prompt, [299, 1]), masses(reference_bench(**WINDOWED), prompt, [299, 1]))
    file, _ = cpu.prefill(prompt, reserve=1)
    mass = cpu.no_mass(301)
    cpu.step(Call(file, [1], mass=mass))
    assert not mass[0, :, :261].any()  # 40 entries, its own among them
    assert mass[0, :, 261:].all()
    assert mass[1].all()


def test_what_a_mask_hides_has_no_mass(cpu_bench, reference_bench):
    mask = np.random.default_rng(2).random((40, 310)) < 0.3
    mask[:, 64:128] = False
    mask[np.arange(40), 270 + np.arange(40)] = True
    mask &= np.tri(40, 310, 270, dtype=np.bool_)
    outs = []
    for bench in (cpu_bench(), reference_bench()):
        file, _ = bench.prefill(tokens_of(270), reserve=40)
        outs.append(bench.no_mass(310))
        bench.step(Call(file, tokens_of(40, seed=9), mask=mask, mass=outs[-1]))
        assert not outs[-1][:, :, 64:128].any()
    assert_close(*outs)


def test_a_call_that_wants_no_row_has_the_last_layers_mass_too(cpu_bench):
    without, with_row = (masses(cpu_bench(), tokens_of(100), [60, 40], rows=rows) for rows in ("none", "last"))
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
    fork = File(np.append(base.pages[:-1], bench.file(1).pages), base.length)
    bench.arena.pages[fork.pages[-1]] = bench.arena.pages[base.pages[-1]]
    mass, other_mass = bench.no_mass(400), bench.no_mass(50)
    other = Call(bench.file(50), prompt[:50], "none", mass=other_mass)
    bench.step(Call(base, prompt[-1:], "last", mass=mass), Call(fork, [5]), other)
    alone = cpu_bench(isa=isa)
    file, expected = alone.prefill(prompt[:-1], reserve=1)[0], alone.no_mass(400)
    alone.step(Call(file, prompt[-1:], mass=expected))
    assert np.array_equal(mass, expected)
    assert np.array_equal(other_mass, masses(cpu_bench(isa=isa), prompt[:50], [50]))


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
    for pieces in ([270], [50, 219, 1]):
        assert np.array_equal(masses(clean, tokens_of(270), pieces), masses(dirty, tokens_of(270), pieces))


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
    bad = chunk(tokens=[1, 2, 3], positions=[1, 2, 3], pages=[0], mass=mass)
    with pytest.raises(ValueError, match="a mass of"):
        cpu_bench().decoder.step(StepBatch((bad,)))
