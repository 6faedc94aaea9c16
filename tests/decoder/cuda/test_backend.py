"""The whole step: as the CPU backend computes it, and the same bits whatever is beside it."""

from typing import Any

import numpy as np
import pytest

from decoder.batch import StepBatch
from decoder.cuda import passes
from decoder.cuda.backend import CudaDecoder
from decoder.cuda.graphs import DecodeSize
from decoder.cuda.memory_plan import MAX_ROWS
from decoder.model_config import RopeScaling
from decoder.tiny import tiny_config
from libsym.errors import Invalid, NoSpace
from tests.decoder.bench import Call, assert_close, chunk, tokens_of
from tests.scheduler.through_c import ThroughC

ONE_LAYER = {"num_layers": 1}
GEMMA = {"embed_scale": 8.0, "activation": "gelu_tanh"}
GEMMA_2 = GEMMA | {
    "attn_scale": 0.2,
    "attn_softcap": 5.0,
    "final_softcap": 3.0,
    "post_norms": True,
    "window": 12,
    "sliding_layers": (True, False),
}
GEMMA_3 = GEMMA | {
    "qk_norm": True,
    "post_norms": True,
    "window": 8,
    "sliding_layers": (True, False),
    "local_rope_theta": 100.0,
    "rope_theta": 1e6,
}
LLAMA_3 = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 48, "rope_scaling": RopeScaling("llama3", 8.0, 16, 1.0, 4.0)}
YARN = RopeScaling("yarn", 4.0, 32, attention_factor=1.14)
FREE = {"invariant": False}
NEAR: dict[str, tuple[dict, dict, float]] = {  # configuration, what else the backend is told, tolerance
    "llama 3, untied": ({"tie_embeddings": False, **LLAMA_3}, {}, 1e-4),
    "qwen 2": ({"qkv_bias": True, "rope_theta": 1e6}, {}, 1e-4),
    "qwen 3": ({"qk_norm": True, "head_dim": 32, "rope_scaling": YARN}, {}, 1e-4),
    "gemma 1": ({"num_kv_heads": 1, **GEMMA}, {}, 1e-4),
    "gemma 2": (GEMMA_2, {}, 1e-4),
    "gemma 3": (GEMMA_3, {}, 1e-4),
    "sums in any order": (ONE_LAYER, FREE, 1e-4),
    "bf16": (ONE_LAYER, {"precision": "bf16"}, 0.02),
    "bf16, fp8 KV": (ONE_LAYER, {"precision": "bf16", "kv_dtype": "fp8"}, 0.2),
}


def held(bench, file) -> bytes:
    full, rest = divmod(file.length, 32)
    pages = [bytes(bench.arena.view(int(page))) for page in file.pages[:full]]
    return b"".join(pages) + (bench.arena.masked(bench.arena.view(int(file.pages[full])), rest) if rest else b"")


@pytest.mark.slow
@pytest.mark.parametrize("case", NEAR)
def test_every_family_and_type_gives_the_cpus_logits_and_greedy_tokens(cuda_bench, cpu_bench, mended, case):
    shape, options, tolerance = NEAR[case]
    outs = []
    for bench in (cuda_bench(**options, **shape), cpu_bench(**shape)):
        file, logits = bench.prefill(tokens_of(18), 14, reserve=4)
        outs.append(np.concatenate([logits, bench.step(Call(file, [7]))[0]]))
    assert_close(*outs, tolerance=tolerance)
    if tolerance < 0.01:
        assert np.array_equal(outs[0].argmax(1), outs[1].argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, GEMMA_2], ids=["llama", "windows and caps"])
def test_a_batch_of_everything_gives_the_cpus_logits_and_mass_whoever_asks(cuda_bench, cpu_bench, mended, shape):
    mask = np.tri(6, 6 + 40, 40, dtype=np.bool_)
    mask[:, 3:37] = False
    outs: list[list] = []
    masses: list[np.ndarray] = []
    for bench in (cuda_bench(**shape), cpu_bench(**shape)):
        files = [bench.prefill(tokens_of(length, length), reserve=8)[0] for length in (40, 5, 34)]
        files += [bench.file(3), bench.file(9)]
        lengths = [file.length for file in files]
        for asks in (False, True):
            for file, length in zip(files, lengths, strict=True):
                file.length = length
            masses = [*masses, *map(bench.no_mass, (46, 3, 35))] if asks else masses
            asked = masses[-3:] if asks else [None] * 3
            calls = [
                Call(files[0], tokens_of(6), mask=mask, mass=asked[0]),
                Call(files[3], [1, 2, 3], "none", mass=asked[1]),
                Call(files[1], [9], positions=[77]),
                Call(files[2], [9], mass=asked[2]),  # a decode
                Call(files[4], tokens_of(5), "last"),
            ]
            outs.append(bench.step(*calls))
    for plain, asked, *_, near in zip(*outs, strict=True):
        assert np.array_equal(plain, asked)
        assert plain.shape == near.shape
        if plain.size:
            assert_close(plain, near)
    for got, expected in zip(masses[:3], masses[3:], strict=True):
        assert_close(got, expected)


@pytest.mark.slow
def test_a_batch_of_more_rows_than_a_pass_takes_is_computed_in_several(cuda_bench, cpu_bench, mended, monkeypatch):
    """The bits stay, and passes and chunks of a call add up their mass."""
    benches, outs, masses = [cuda_bench(**ONE_LAYER), cuda_bench(**ONE_LAYER), cpu_bench(**ONE_LAYER)], [], []
    for bench, most in zip(benches, (MAX_ROWS, 16, 16), strict=True):
        monkeypatch.setattr(passes, "MAX_ROWS", most)
        file, mass = bench.file(45), bench.no_mass(45)
        outs += bench.step(Call(file, tokens_of(40), mass=mass))
        for piece in (tokens_of(4), [7]):
            bench.step(Call(file, piece, "none", mass=mass))
        masses.append(mass)
    assert np.array_equal(outs[0], outs[1])
    assert_close(masses[1], masses[2])


# ---- the same call gives the same bits ----


def made_up(bench, length: int, room: int):
    """A file of entries that nobody computed: prefills take long in the interpreter."""
    file = bench.file(length + room)
    file.length = length
    for index, page in enumerate(file.pages.tolist()):
        kv = np.random.default_rng(index).standard_normal(bench.arena.page_bytes // 4, dtype=np.float32)
        bench.arena.writable(page)[:] = kv.tobytes()
    return file


@pytest.mark.slow
def test_bits_depend_on_nothing_but_the_file(cuda_bench, mended):
    bench = cuda_bench(**ONE_LAYER)
    file = made_up(bench, 250, 16)
    bench.step(Call(file, tokens_of(11)))  # into the second split of attention
    kv, length = held(bench, file), file.length
    (alone,) = bench.step(Call(file, [5]))

    chunked = cuda_bench(seed=2, **ONE_LAYER)
    other = made_up(chunked, 250, 16)
    for first, end in ((0, 1), (1, 7), (7, 11)):
        chunked.step(Call(other, tokens_of(11)[first:end]))
    assert held(chunked, other) == kv
    neighbours = [chunked.prefill(tokens_of(n, n), reserve=8)[0] for n in (3, 10)]
    beside = chunked.step(Call(neighbours[0], [1]), Call(other, [5]), Call(neighbours[1], [2, 3]))
    assert np.array_equal(beside[1], alone), "in a batch with a prefill"

    other.length = length
    beside = chunked.step(Call(neighbours[1], [4]), Call(other, [5]), Call(neighbours[0], [4]))
    assert np.array_equal(beside[1], alone), "among decodes, padded"

    other.length = length
    (both,) = chunked.step(Call(other, [5, 6]))
    assert np.array_equal(both[:1], alone), "as a row of a prefill"


@pytest.mark.slow
def test_a_fork_shares_its_prefix_and_gives_the_same_bits(cuda_bench, mended):
    bench = cuda_bench(**ONE_LAYER)
    length, tail = 262, 8
    base = made_up(bench, length, 1)
    fork = bench.file(0)
    spare = int(bench.file(1).pages[0])
    fork.pages, fork.length = base.pages.copy(), length
    fork.pages[tail:] = spare
    copies = [(int(base.pages[tail]), spare, 32)]
    # The fork's tail is copied before the base's own append lands in the page.
    got = bench.step(Call(base, [5]), Call(fork, [6]), copies=copies)
    assert DecodeSize(2, 64, is_shared=True) in bench.decoder._graphs._has_run
    for token, expected in zip((5, 6), got, strict=True):
        base.length = length
        assert np.array_equal(bench.step(Call(base, [token]))[0], expected)


@pytest.mark.slow
def test_a_loop_in_c_gets_the_steps_own_bits(cuda_bench, request):
    outs, pages = [], []
    for is_through_c in (False, True):
        bench = cuda_bench(**ONE_LAYER)
        files = [made_up(bench, 40, 8), made_up(bench, 33, 8), bench.file(8), bench.file(8)]
        copies = [(int(files[0].pages[0]), int(bench.file(1).pages[0]), 32)]
        if is_through_c:
            bench.decoder = ThroughC(bench.decoder.step, bench.config)
            request.addfinalizer(bench.decoder.close)
        calls = [
            Call(files[0], [8, 9], mask=np.tri(2, 42, 40, dtype=np.bool_), mass=bench.no_mass(42)),
            Call(files[1], [9], positions=[77]),
            Call(files[2], tokens_of(3), "last"),
            Call(files[3], [1, 2, 3], "none"),
        ]
        outs.append(bench.step(*calls, copies=copies) + bench.step(*(Call(file, [5]) for file in files)))
        pages.append(bytes(bench.arena.view(0, 64)))
    for direct, called in zip(*outs, strict=True):
        assert np.isfinite(direct).all()
        assert np.array_equal(direct, called)
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_swapping_out_and_in_changes_no_bit(cuda_bench, mended):
    roomy, tight = cuda_bench(**ONE_LAYER), cuda_bench(num_frames=2, seed=4, **ONE_LAYER)
    outs = []
    for bench in (roomy, tight):
        files = [bench.prefill(tokens_of(5, seed), reserve=4)[0] for seed in range(4)]
        outs.append([bench.step(Call(file, [9]))[0] for file in files])
        # More pages than frames, so it is computed in passes.
        outs[-1] += bench.step(*(Call(file, [8]) for file in files))
    assert np.array_equal(outs[0], outs[1])
    assert tight.arena.traffic.num_out > 4
    assert tight.arena.traffic.num_in > 4
    assert roomy.arena.traffic.num_in == 0


@pytest.mark.slow
def test_laying_out_ahead_changes_no_bit(cuda_bench, mended, monkeypatch):
    ahead, anew = (cuda_bench(num_frames=15, num_pages=32, **ONE_LAYER) for _ in range(2))
    monkeypatch.setattr(anew.decoder._layout, "expect", lambda *_: None)
    outs = []
    for bench in (ahead, anew):
        base, fork, *others = (made_up(bench, length, 40) for length in (260, 262, 27, 30))
        fork.pages[:8] = base.pages[:8]
        pair, all_four = [base, fork], [base, fork, *others]
        out = []
        # They cross pages, join, leave, change places; the last ones are evicted and come back.
        for files in ([pair] * 2, [all_four] * 4, [others] * 2, [all_four[::-1]] * 2, [pair]):
            for step, some in enumerate(files):
                out += bench.step(*(Call(file, [step]) for file in some))
        kv = [held(bench, file) for file in all_four]
        outs.append((np.concatenate(out), kv, bench.arena.traffic.num_out))
    assert np.array_equal(outs[0][0], outs[1][0])
    assert outs[0][1] == outs[1][1]
    assert outs[0][2] > 0
    assert ahead.decoder._layout.num_late < anew.decoder._layout.num_late / 2


@pytest.mark.parametrize("num_frames", [4, 64])
def test_copies_alone_and_chains_of_copies_copy_in_order(cuda_bench, num_frames):
    bench = cuda_bench(num_frames=num_frames, **ONE_LAYER)
    for page in range(2):
        bench.arena.writable(page)[:] = bytes([page + 1]) * bench.arena.page_bytes
    bench.step(copies=[(0, 5, 32), (5, 6, 32), (1, 0, 32)])
    assert [bench.arena.view(page)[0] for page in (0, 1, 5, 6)] == [2, 2, 1, 1]


# ---- the edge ----


def test_a_batch_that_would_index_out_of_range_is_refused_and_nothing_is_written(cuda_bench):
    bench = cuda_bench(**ONE_LAYER)
    for bad in (chunk(tokens=[1, 259]), chunk(positions=[0, 4096]), chunk(pages=[64, 1]), chunk(start=63)):
        with pytest.raises(ValueError, match=r"outside|do not fit"):
            bench.decoder.step(StepBatch((chunk(pages=[5, 6]), bad)))
    assert bench.arena.num_resident == 0


def test_a_file_larger_than_the_device_is_refused_with_what_to_do(cuda_bench):
    bench = cuda_bench(num_frames=2, **ONE_LAYER)
    with pytest.raises(NoSpace, match=r"3 pages does not fit the 2 .*--gpu-memory"):
        bench.step(Call(bench.file(65), tokens_of(65), "none"))


def test_a_shape_that_the_kernels_do_not_have_is_named():
    nothing: Any = None  # the shape is looked at first
    for shape, message in (({"head_dim": 24}, "head_dim 24"), ({"hidden_size": 32768}, "hidden_size 32768")):
        with pytest.raises(Invalid, match=message):
            CudaDecoder(tiny_config(**shape), nothing, nothing)
