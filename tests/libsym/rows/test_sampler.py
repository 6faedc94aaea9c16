"""The one sampler: against its definition in numpy, on every set of instructions, and with forged blocks."""

import ctypes
import errno
import math
import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

import libsym as sym
from libsym._channel import ffi, lib
from libsym.errors import Invalid
from libsym.rows.dist import Dist, uniform
from libsym.rows.sampler import Draws, RowSampler, Sampler, sampling_block_bytes

INSTRUCTIONS = [bits for bits in (512, 256, 0) if lib.sym_rows_use(bits) == 0]
lib.sym_rows_use(INSTRUCTIONS[0])


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    """The passes over rows, built for each set of instructions that this machine has."""
    lib.sym_rows_use(request.param)
    yield request.param
    lib.sym_rows_use(INSTRUCTIONS[0])


def row_of(size: int, seed: int, scale: float, peaks: int = 0, step: float = 0.0) -> np.ndarray:
    """Logits: a bell curve, some peaks above it as a model has them, rounded to `step` so that there are equals."""
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(size) * scale
    row[rng.integers(0, size, peaks)] += np.linspace(5, 14, peaks)
    return (np.round(row / step) * step if step else row).astype(np.float32)


def view(row: np.ndarray) -> Any:
    return row.data.toreadonly()


def dist_of(row: np.ndarray) -> Dist:
    return Dist(ffi.from_buffer("float[]", row), 1, row.nbytes, len(row))


# ---- the definition ------------------------------------------------------------------------------------------------

SLACK = 1e-5  # of a mass: exponentials and sums of float32 beside those of float64


def fits_definition(
    row: np.ndarray, token: int, u: float, *, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> bool:
    """Whether `u` chooses this token, or would if it or a limit were moved by less than the slack."""
    inverse = np.float32(min(1 / temperature, 1e30))
    weights = np.exp(((row - row.max()) * inverse).astype(np.float64))
    weights[weights < 1.7e-38] = 0  # below -87
    ranked = (top_k is not None and top_k < len(row)) or top_p < 1
    order = np.lexsort((np.arange(len(row)), -row)) if ranked else np.arange(len(row))
    order = order[: top_k if ranked else None]
    kept = weights[order]
    sums = np.cumsum(kept)
    sizes = [len(order)] * 2
    if top_p < 1:
        sizes = [int(np.searchsorted(sums, top_p * sums[-1] * (1 + slack))) + 1 for slack in (-SLACK, SLACK)]
    place = int(np.flatnonzero(order == token)[0])
    if place >= sizes[1] or kept[place] < min_p * (1 - SLACK) or kept[place] == 0:
        return False
    kept = np.where(kept < min_p * (1 - SLACK), 0, kept)
    at_floor = kept[np.abs(kept - min_p) < SLACK * min_p].sum() if min_p else 0
    sums = np.cumsum(kept)
    slack = SLACK * sums[-1] + at_floor
    lowest, highest = (u * sums[min(size, len(sums)) - 1] for size in sizes)
    return bool(sums[place] >= lowest - slack and sums[place] - kept[place] <= highest + slack)


limits = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.5, 0.8, 1.0, 1.5, 5.0]),
        "top_k": st.sampled_from([None, 2, 50, 129, 600, 3000, 10**6]),
        "top_p": st.sampled_from([1.0, 0.001, 0.3, 0.9, 0.95, 0.9999]),
        "min_p": st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    }
)
rows = st.builds(
    row_of,
    size=st.sampled_from([1, 2, 17, 127, 129, 511, 513, 3001, 49_152]),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.01, 1.0, 2.5, 20.0]),
    peaks=st.sampled_from([0, 1, 60]),
    step=st.sampled_from([0.0, 0.25, 3.0]),
)
numbers = st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True))


@pytest.mark.slow
@tried(max_examples=200, deadline=None)
@given(row=rows, setting=limits, u=numbers, impossible=st.sampled_from([0, 0.5, 0.99]))
def test_every_draw_is_what_the_definition_says(row, setting, u, impossible):
    hidden = np.random.default_rng(1).random(len(row)) < impossible
    hidden[len(row) // 2] = False
    row = np.where(hidden, np.float32(-np.inf), row)
    token = dist_of(row).sample(u=u, **setting)
    assert fits_definition(row, token, u, **setting)


@tried(max_examples=100, deadline=None)
@given(row=rows, setting=limits, u=numbers)
def test_every_set_of_instructions_gives_the_same_bits(row: np.ndarray, setting: dict[str, Any], u: float) -> None:
    answers = []
    dist, k = dist_of(row), min(len(row), 200)
    allowed = np.random.default_rng(2).integers(0, 256, (len(row) + 31) // 32 * 4, dtype=np.uint8)
    allowed[0] |= 1
    try:
        for instructions in INSTRUCTIONS:
            lib.sym_rows_use(instructions)
            answers.append(
                (
                    dist.sample(u=u, **setting),
                    dist.sample(u=u, **setting, allowed=allowed.tobytes()),
                    dist.argmax(),
                    dist.topk(k),
                    dist.entropy(),
                    dist.logprob(0),
                    bytes(dist.probs()),
                )
            )
    finally:
        lib.sym_rows_use(INSTRUCTIONS[0])
    assert all(answer == answers[0] for answer in answers)


def test_a_row_that_no_guess_narrows_down_is_drawn_from_all_the_same() -> None:
    """Few values, each of a different weight, so that a sample of the row sees a handful of places."""
    row = row_of(49_152, seed=3, scale=1.0, step=1.0)
    row[::384] = 30.0 - np.arange(128, dtype=np.float32) / 16  # what a sample of every 384th entry sees
    for setting in ({"top_k": 700}, {"top_p": 0.999999}):
        full: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, **setting}
        for u in (0.0, 0.3, 0.999, 1 - 2**-53):
            assert fits_definition(row, dist_of(row).sample(u=u, **setting), u, **full)


def test_nothing_beyond_the_row_is_read(instructions: int) -> None:
    """The last slot of a region ends where the mapping does."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    for size in (1, 15, 16, 17, 511, 513, page // 4):
        row = np.frombuffer(memory, np.float32, size, page - 4 * size)
        row[:] = row_of(size, seed=size, scale=1.0)
        dist = dist_of(row)
        assert dist.topk(size)[0][0] == dist.argmax() == int(row.argmax())
        assert sum(dist.probs()) == pytest.approx(1, abs=1e-5)
        assert dist.entropy() >= 0
        for setting in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"allowed": range(size)}):
            assert 0 <= dist.sample(seed=1, **setting) < size


# ---- samplers ------------------------------------------------------------------------------------------------------


def adjusted(row: np.ndarray, sampler: Sampler, before: list[int], generated: list[int]) -> np.ndarray:
    result = row.copy()
    for token, bias in sampler.logit_bias.items():
        result[token] += np.float32(bias)
    for token in {*before, *generated}:
        penalty = np.float32(sampler.repetition_penalty)
        result[token] = result[token] * penalty if result[token] < 0 else result[token] / penalty
    for token in set(generated):
        result[token] -= np.float32(sampler.frequency_penalty) * np.float32(generated.count(token))
        result[token] -= np.float32(sampler.presence_penalty)
    return result


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.1}, {"temperature": 0.0}])
def test_draws_and_dist_sample_are_one_definition(settings: dict[str, Any]) -> None:
    draws = Sampler(seed=40, **settings).start()
    for index in range(50):
        dist = dist_of(row_of(1000, seed=index, scale=1.0))
        assert (
            draws.draw(dist)
            == dist.sample(seed=40, draw=index, **settings)
            == dist.sample(u=uniform(40, index), **settings)
            == Sampler(seed=40, **settings).start(first_draw=index).draw(dist)
        )


def test_without_a_seed_a_loop_has_its_own_and_tells_it() -> None:
    dist = Dist.of([0.0] * 1000)
    first, second = Sampler().start(), Sampler().start()
    drawn = [first.draw(dist) for _ in range(20)]
    assert drawn != [second.draw(dist) for _ in range(20)]
    again = Sampler(seed=first.seed).start()
    assert drawn == [again.draw(dist) for _ in range(20)]
    assert first.index == 20


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.01}])
def test_only_what_is_allowed_is_drawn_and_it_may_change_with_each_draw(settings: dict[str, Any]) -> None:
    dist = dist_of(row_of(3001, seed=1, scale=3.0))
    draws = Sampler(seed=0, **settings).start()
    rng = np.random.default_rng(0)
    for index in range(30):
        allowed = rng.choice(3001, 40, replace=False).tolist()
        bits = bytearray(3008 // 8)
        for token in allowed:
            bits[token // 8] |= 1 << token % 8
        token = draws.draw(dist, allowed=memoryview(bits))
        assert token in allowed
        assert token == dist.sample(seed=0, draw=index, allowed=allowed, **settings)


def test_a_bitmask_in_the_block_and_one_for_the_draw_both_hold() -> None:
    block = Sampler.greedy().block(allowed=struct.pack("<I", 0b0110))
    sampler = RowSampler(block, 4)
    row = view(np.array([9, 1, 2, 8], np.float32))
    assert sampler.draw(row, 0) == 2
    assert sampler.draw(row, 0, struct.pack("<I", 0b1011)) == 1
    with pytest.raises(Invalid, match="no token is possible"):
        sampler.draw(row, 0, struct.pack("<I", 0b1001))


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    assert Dist.of([1.0, 2.0]).argmax(allowed=struct.pack("<I", 0xFFFFFFFD)) == 0


def test_a_row_without_meaning_is_refused_also_where_nothing_is_allowed() -> None:
    for bad in (math.nan, math.inf):
        row = Dist.of([1.0, bad, 2.0])
        for sampler in (Sampler.greedy(), Sampler(), Sampler(top_p=0.5), Sampler(logit_bias={0: 1.0})):
            with pytest.raises(Invalid, match="NaN"):
                sampler.start().draw(row)
            with pytest.raises(Invalid, match="NaN"):
                sampler.start().draw(row, allowed=[0, 2])


def test_tokens_noted_by_hand_count_like_drawn_ones() -> None:
    row = Dist.of([1.0, 3.0, 2.0])
    draws = Sampler(temperature=0, presence_penalty=5.0).start()
    draws.note(1)
    assert draws.draw(row) == 2
    draws.note(0)
    assert draws.draw(row) == 1
    with pytest.raises(Invalid, match="token 3 is not in the vocabulary of 3"):
        draws.note(3)


def test_a_history_of_every_token_is_counted_right() -> None:
    row = row_of(5000, seed=8, scale=1.0)
    history = np.random.default_rng(8).permutation(5000)[:4999].tolist()
    missing = ({*range(5000)} - {*history}).pop()
    sampler = RowSampler(Sampler(temperature=0, presence_penalty=100.0).block(generated=history), 5000)
    assert sampler.draw(view(row), 0) == missing
    sampler.note(missing)
    assert sampler.draw(view(row), 0) == int(row.argmax())


def test_threads_that_share_draws_draw_one_after_the_other() -> None:
    """Each draw is of one number and counts once, also while the table of counted tokens grows."""
    dist = Dist.of([0.0] * 4096)
    draws = Sampler(temperature=0, presence_penalty=1.0).start()
    with ThreadPoolExecutor(8) as threads:
        drawn = list(threads.map(lambda _: draws.draw(dist), range(4096)))
    assert sorted(drawn) == list(range(4096))
    assert draws.index == 4096


MEANINGLESS: dict[str, list[Any]] = {
    "temperature": [-1.0],
    "top_k": [0, 1.5],
    "top_p": [0.0],
    "min_p": [2.0],
    "repetition_penalty": [0.0, math.nan],
    "presence_penalty": [math.inf],
    "frequency_penalty": [math.nan],
    "logit_bias": [{-1: 1.0}, {1: math.nan}, {1: math.inf}, {1.5: 1.0}, {"1": 1.0}],
    "seed": [1.5, "1"],
    "typical_p": [0.0, math.nan],
    "penalty_window": [-1, 1.5],
    "dry": [0.8],
    "mirostat": [2],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in MEANINGLESS for value in MEANINGLESS[name]])
def test_settings_without_meaning_are_named_when_a_sampler_is_made(name: str, value: Any) -> None:
    with pytest.raises(Invalid, match=name):
        Sampler(**{name: value})


def test_seeds_may_be_numbers_of_numpy() -> None:
    seeds: list[Any] = [np.int64(5), np.int64(-5), np.uint64(2**64 - 5)]
    for seed in seeds:
        assert Sampler(seed=seed).start().seed == int(seed) % 2**64
        assert uniform(seed) == uniform(int(seed))


def test_a_bias_of_a_token_beyond_the_vocabulary_is_named() -> None:
    for sampler in (Sampler(logit_bias={0: 1.0, 300: 1.0}), Sampler(repetition_penalty=2.0)):
        with pytest.raises(Invalid, match="token 300 of the sampler is out of range: the vocabulary has 3"):
            sampler.start(before=[1, 300]).draw(Dist.of([0.0, 1.0, 2.0]))


def test_bools_are_no_tokens_they_say_of_each_token_whether_it_is_allowed() -> None:
    assert Dist.of([0.0, 1.0, 2.0]).argmax(allowed=np.array([True, True, False])) == 1
    with pytest.raises(Invalid, match="2 bools"):
        Dist.of([0.0, 1.0, 2.0]).argmax(allowed=np.array([True, True]))
    with pytest.raises(Invalid, match="whole numbers"):
        Dist.of([0.0, 1.0, 2.0]).argmax(allowed=np.array([1.0, 2.0]))


def test_a_sampler_keeps_its_settings_whatever_becomes_of_the_programs_own() -> None:
    bias = {0: 5.0}
    sampler = Sampler(temperature=0, logit_bias=bias)
    bias[1] = 50.0
    assert sampler.start().draw(Dist.of([0.0, 1.0])) == 0
    with pytest.raises(AttributeError):
        sampler.temperature = 1.0  # type: ignore[misc]  # which must fail
    assert hash(sampler) == hash(Sampler(temperature=0, logit_bias=sampler.logit_bias))


# ---- typical_p, DRY, mirostat, and windows of penalties ------------------------------------------------------------


def said(history: list[int], window: int | None) -> list[int]:
    return history if window is None else history[len(history) - min(window, len(history)) :]


def without_repetitions(row: np.ndarray, dry: sym.Dry, history: list[int], breakers: set[int]) -> np.ndarray:
    """DRY, the slow way: compares the latest tokens with those before each place."""
    tokens, longest = said(history, dry.window), dict[int, int]()
    for at in range(len(tokens) - 1):
        n = 0
        while n <= at and tokens[at - n] == tokens[-1 - n] and tokens[-1 - n] not in breakers:
            n += 1
        longest[tokens[at + 1]] = max(longest.get(tokens[at + 1], 0), n)
    result = row.copy()
    for token, n in longest.items():
        if n >= dry.allowed_length:
            result[token] -= np.float32(min(dry.multiplier * dry.base ** (n - dry.allowed_length), 1e30))
    return result


def first_that_hold(part: float, p: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(p), part * p.sum())) + 1


def zipf_count(p: np.ndarray, vocab_size: int, mu: float) -> int:
    """Mirostat's k, of 100 likeliest tokens."""
    ranks, top = np.arange(1, min(100, len(p))), np.log(p[:100])
    steps, falls = np.log((ranks + 1) / ranks), top[:-1] - top[1:]
    s = (steps @ falls) / (steps @ steps)
    return int(((s - 1) * 2**mu / (1 - vocab_size ** (1 - s))) ** (1 / s))


def drawn_by_definition(row: np.ndarray, sampler: Sampler, mu: float, u: float) -> tuple[int, float]:
    """The token, and its surprise among what was left."""
    if sampler.temperature == 0:
        return int(row.argmax()), 0.0
    scaled = (row.astype(np.float64) - row.max()) / sampler.temperature
    is_ranked = sampler.top_k or sampler.top_p or sampler.typical_p or (sampler.mirostat or sym.Mirostat()).version == 1
    order = np.lexsort((np.arange(len(row)), -row))[: sampler.top_k] if is_ranked else np.arange(len(row))
    p = np.exp(scaled[order]) / np.exp(scaled[order]).sum()
    if sampler.typical_p is not None:
        far = np.abs(-np.log(p) - -np.sum(p * np.log(p)))
        nearest = np.lexsort((order, far))
        kept = np.sort(nearest[: first_that_hold(sampler.typical_p, p[nearest])])
        order, p = order[kept], p[kept]
    count = len(p) if sampler.top_p is None else first_that_hold(sampler.top_p, p)
    order, p = order[:count], p[:count] / p[:count].sum()
    kept = p >= (sampler.min_p or 0) * p.max()
    order, p = order[kept], p[kept] / p[kept].sum()
    if sampler.mirostat is not None and sampler.mirostat.version == 2:
        kept = p >= min(2**-mu, p.max())
        order, p = order[kept], p[kept]
    elif sampler.mirostat is not None:
        count = max(1, zipf_count(p, len(row), mu))
        order, p = order[:count], p[:count]
    place = int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))
    return int(order[place]), float(np.log2(p.sum() / p[place]))


SHAPED: dict[str, dict[str, Any]] = {
    "typical": {"typical_p": 0.9},
    "little is typical": {"typical_p": 0.2, "temperature": 1.5},
    "typical beside limits": {"typical_p": 0.7, "top_k": 60, "top_p": 0.8, "min_p": 0.02},
    "typical of many": {"typical_p": 0.95, "top_k": 700},
    "mirostat 1": {"mirostat": sym.Mirostat(1, tau=3.0)},
    "mirostat 1 beside limits": {"mirostat": sym.Mirostat(1, tau=2.0, eta=0.3), "top_k": 90, "typical_p": 0.9},
    "mirostat 2": {"mirostat": sym.Mirostat(2, tau=3.0)},
    "mirostat 2 beside limits": {"mirostat": sym.Mirostat(2, tau=1.5, eta=0.5), "top_p": 0.9, "min_p": 0.001},
    "mirostat 2 beside a floor": {"mirostat": sym.Mirostat(2, tau=2.0), "min_p": 0.002, "temperature": 1.3},
    "hardly any surprise": {"mirostat": sym.Mirostat(2, tau=0.01)},
    "biases": {
        "logit_bias": {7: 9.0, 8: -math.inf},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.25,
        "top_p": 0.9,
    },
    "greedy": {"logit_bias": {8: -math.inf, 3: 2.0}, "presence_penalty": 0.5, "temperature": 0.0},
    "likeliest": {"logit_bias": {8: -math.inf}, "repetition_penalty": 1.3, "top_k": 50, "min_p": 0.05},
    "window": {"penalty_window": 20, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "no window": {"penalty_window": 0, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "window of what is generated": {"penalty_window": 5, "presence_penalty": 3.0},
    "DRY": {"dry": sym.Dry(multiplier=2.0, allowed_length=1, breakers=())},
    "DRY in a window, with a breaker": {"dry": sym.Dry(1.0, 1.3, allowed_length=0, window=40, breakers=["7"])},
    "all": {
        "temperature": 0.9,
        "top_k": 500,
        "top_p": 0.97,
        "typical_p": 0.98,
        "penalty_window": 30,
        "repetition_penalty": 1.2,
        "dry": sym.Dry(),
        "mirostat": sym.Mirostat(tau=2.5),
    },
}
DIGITS = [b"%d" % token for token in range(2000)]
DIGITS[:4] = [b"\n", b"a: b", b'"', b"**"]


@pytest.mark.parametrize("settings", SHAPED.values(), ids=SHAPED.keys())
def test_shaped_draws_are_those_of_their_definition(instructions: int, settings: dict[str, Any]) -> None:
    sampler = Sampler(seed=3, **settings)
    rng = np.random.default_rng(4)
    before = rng.integers(0, 12, 60).tolist()  # tokens that stand out, so that there are repetitions
    draws, generated = sampler.start(before, vocabulary=DIGITS), list[int]()
    mu = 2 * sampler.mirostat.tau if sampler.mirostat is not None else 0.0
    breakers = set[int]()
    if sampler.dry is not None:
        breakers = {token for token, text in enumerate(DIGITS) if any(x.encode() in text for x in sampler.dry.breakers)}
    for index in range(120):
        row = row_of(2000, seed=index, scale=1.5)
        row[:12] += 6.0
        tokens, latest = said(before + generated, sampler.penalty_window), said(generated, sampler.penalty_window)
        expected = adjusted(row, sampler, tokens[: len(tokens) - len(latest)], latest)
        if sampler.dry is not None:
            expected = without_repetitions(expected, sampler.dry, before + generated, breakers)
        token, surprise = drawn_by_definition(expected, sampler, mu, uniform(3, index))
        generated.append(draws.draw(dist_of(row)))
        assert generated[-1] == token, index
        if sampler.mirostat is not None:
            mu -= sampler.mirostat.eta * (surprise - sampler.mirostat.tau)
    assert len(set(generated)) > 5
    assert 8 not in generated or not sampler.logit_bias


@tried(max_examples=200, deadline=None)
@given(
    history=st.lists(st.integers(0, 2), max_size=60),
    allowed_length=st.integers(0, 5),
    window=st.none() | st.integers(0, 70),
    breakers=st.sampled_from([(), ("c",), ("a", "bb")]),
)
def test_dry_finds_the_longest_repetition_before_each_token(history, allowed_length, window, breakers):
    """Every token's penalty: the least bias that makes up for it."""
    dry = sym.Dry(1.0, 2.0, allowed_length, window, breakers)
    found = {token for token, text in enumerate([b"a", b"bb", b"c"]) if any(x.encode() in text for x in breakers)}
    penalty = -without_repetitions(np.zeros(4, np.float32), dry, history, found)
    sampler = Sampler(temperature=0, dry=dry)
    for token in range(3):
        for height, drawn in ((penalty[token] * 1.01 + 0.1, token), (penalty[token] * 0.99 - 0.1, 3)):
            row = np.full(4, -2e30, np.float32)
            row[3], row[token] = 0.0, height
            assert sampler.start(history, vocabulary=[b"a", b"bb", b"c", b"d"]).draw(dist_of(row)) == drawn


def test_a_long_text_of_one_token_is_a_repetition_as_others_and_what_is_left_stays_possible() -> None:
    sampler = Sampler(temperature=0, dry=sym.Dry(breakers=()))
    draws = sampler.start([1] * 100_000)
    assert draws.draw(Dist.of([0.0, 9.0, 1.0])) == 2
    assert sampler.start([1] * 100_000).draw(Dist.of([0.0, 9.0, 1.0]), allowed=[1]) == 1


def test_equals_are_cut_in_the_order_of_their_numbers_by_every_sampler() -> None:
    flat = Dist.of([1.0] * 5000)
    for settings, most in (({"typical_p": 0.5}, 2500), ({"mirostat": sym.Mirostat(1, tau=1.0)}, 1)):
        drawn = {Sampler(seed=seed, **settings).start().draw(flat) for seed in range(200)}
        assert max(drawn) < most
        assert len(drawn) > min(most // 2, 100)
    drawn = {Sampler(seed=seed, mirostat=sym.Mirostat(2, tau=1.0)).start().draw(flat) for seed in range(200)}
    assert len(drawn) > 100  # each is the likeliest
    around = Dist.of([3.0, 1.0, 3.0, 1.0] + [2.0] * 2)
    assert {Sampler(seed=seed, typical_p=0.01).start().draw(around) for seed in range(50)} == {0}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostats_limit_is_that_of_one_loop_and_a_draw_that_is_made_again_is_the_same(version: int) -> None:
    sampler = Sampler(mirostat=sym.Mirostat(version, tau=2.0, eta=0.9), seed=6)
    rows = [row_of(2000, seed=seed, scale=2.5) for seed in range(50)]
    first, second = ([draws.draw(dist_of(row)) for row in rows] for draws in (sampler.start(), sampler.start()))
    alone = RowSampler(sampler.block(), 2000)
    twice = [(alone.draw(view(row), index), alone.draw(view(row), index)) for index, row in enumerate(rows)]
    assert first == second == [token for token, _ in twice] == [token for _, token in twice]
    anew = [Sampler(mirostat=sampler.mirostat, seed=6).start(first_draw=i).draw(dist_of(rows[i])) for i in range(50)]
    assert anew != first  # the limit is that of a first draw


def test_a_breaker_that_no_token_has_is_named() -> None:
    sampler = Sampler(dry=sym.Dry(breakers=["\n", "<user>"]))
    with pytest.raises(Invalid, match="the breaker '<user>' is in no token of the model"):
        sampler.start(vocabulary=[b"a\nb", b"<us", b"er>"]).draw(Dist.of([0.0, 1.0, 2.0]))
    with pytest.raises(Invalid, match="the bytes of the 3 tokens are needed"):
        sampler.start(vocabulary=[b"\n<user>"]).draw(Dist.of([0.0, 1.0, 2.0]))


PARTS: list[tuple[type[object], str, object, str]] = [
    (sym.Dry, "multiplier", -1.0, "Dry.multiplier=-1.0: must be 0 to 1e"),
    (sym.Dry, "multiplier", math.inf, "Dry.multiplier"),
    (sym.Dry, "base", 0.9, "Dry.base=0.9: must be 1 to"),
    (sym.Dry, "base", "2", "Dry.base='2': must be a number"),
    (sym.Dry, "allowed_length", -1, "Dry.allowed_length"),
    (sym.Dry, "window", 2.5, "Dry.window"),
    (sym.Dry, "window", 2**31, "Dry.window"),
    (sym.Dry, "breakers", "\n", "must be a list of texts"),
    (sym.Dry, "breakers", [""], "must be 1 to 64 bytes"),
    (sym.Dry, "breakers", ["a\0b"], "without NUL"),
    (sym.Dry, "breakers", ["x" * 65], "must be 1 to 64 bytes"),
    (sym.Dry, "breakers", ["x"] * 65, "Dry.breakers: 65 texts, and 64 are possible"),
    (sym.Dry, "breakers", [5], "must be text, not int"),
    (sym.Mirostat, "version", 3, "Mirostat.version=3: must be 1 or 2"),
    (sym.Mirostat, "tau", -1.0, "Mirostat.tau"),
    (sym.Mirostat, "eta", math.nan, "Mirostat.eta"),
]


@pytest.mark.parametrize(("part", "name", "value", "words"), PARTS)
def test_parts_without_meaning_are_named_when_they_are_made(part, name, value, words):
    with pytest.raises(Invalid, match=words) as told:
        part(**{name: value})
    assert "\n" not in str(told.value)


# ---- blocks from anybody -------------------------------------------------------------------------------------------

BLOCK = struct.Struct("=dddfffIQIIII")
GOOD = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)


def test_a_block_is_laid_out_as_the_abi_says_and_zeros_are_greedy() -> None:
    assert (BLOCK.size, ffi.sizeof("struct sym_reduced"), lib.sym_rows_use(1024)) == (64, 16, -errno.ENOTSUP)
    stream = 0xE220A8397B1DCDAF  # of seed 0: mix(G)
    assert Sampler(seed=0).block() == BLOCK.pack(*GOOD[:7], stream, 0, 0, 0, 2)
    assert RowSampler(bytes(64), 3).draw(view(np.array([1, 3, 2], np.float32)), 0) == 1


FORGED: dict[int, tuple[float, ...]] = {
    0: (-1.0, math.nan),
    1: (-0.5, 1.5, math.nan),
    2: (-0.1, 1.1, math.nan),
    3: (-1.0, math.inf, math.nan),
    4: (math.nan, math.inf),
    5: (-math.inf,),
    8: (1, 2**32 - 1),  # biases, tokens and bits that do not follow
    9: (1,),
    10: (2**32 - 1,),
    11: (1, 4, 8),  # more that does not follow
}
FORGED_TABLES: list[tuple[tuple[int, ...], bytes]] = [
    *(((1, 0, 0, 0), struct.pack("=if", *each)) for each in ((100, 1.0), (-1, 1.0), (1, math.nan), (1, math.inf))),
    ((0, 1, 0, 0), struct.pack("=i", 100)),
    ((0, 0, 1, 0), struct.pack("=i", -5)),
    ((0, 0, 0, 1), bytes(12)),
    ((0, 0, 0, 1), bytes(20)),
    ((0, 0, 0, 0), bytes(4)),
]


def test_a_forged_block_is_refused() -> None:
    for field, values in FORGED.items():
        for value in values:
            with pytest.raises(Invalid, match="malformed"):
                RowSampler(BLOCK.pack(*GOOD[:field], value, *GOOD[field + 1 :]), 100)
    for counts, tail in FORGED_TABLES:
        with pytest.raises(Invalid, match=r"malformed|out of range"):
            RowSampler(BLOCK.pack(*GOOD[:8], *counts) + tail, 100)


MORE = struct.Struct("=dddddIIIIII")
NOTHING_MORE = (0.0,) * 5 + (0,) * 6


def block_with_more(fields: tuple[float, ...], tail: bytes = b"") -> bytes:
    return BLOCK.pack(*GOOD[:11], 4) + MORE.pack(*fields) + tail


def test_more_of_a_block_is_laid_out_as_the_abi_says_and_zeros_are_off() -> None:
    assert MORE.size == 64
    full = Sampler(seed=0, typical_p=0.5, penalty_window=9, dry=sym.Dry(window=7), mirostat=sym.Mirostat(1)).block()
    assert full[BLOCK.size :] == MORE.pack(0.5, 0.8, 1.75, 5.0, 0.1, 1, 9, 7, 2, 8, 0) + b'\n\0:\0"\0*\0'
    off = Sampler(seed=0, typical_p=1.0, penalty_window=0, dry=sym.Dry(multiplier=0), repetition_penalty=2.0).block()
    assert off == Sampler(seed=0).block()
    row = view(row_of(100, seed=1, scale=2.0))
    assert RowSampler(block_with_more(NOTHING_MORE), 100).draw(row, 5) == RowSampler(BLOCK.pack(*GOOD), 100).draw(
        row, 5
    )


FORGED_MORE: list[tuple[int, float, bytes]] = [
    *((field, value, b"") for field in range(5) for value in (-1.0, math.nan, math.inf)),
    *((field, value, b"") for field, value in ((0, 1.5), (3, 1e7), (4, 1e7), (5, 3), (10, 1), (9, 1))),
    *((9, count, b"a") for count in (2**32 - 1, 1)),
    (9, 1, b"\0"),
    (9, 3, b"a\0b"),
    (9, 130, b"a\0" * 65),
    (9, 66, b"a" * 65 + b"\0"),
]


def test_a_forged_setting_of_more_is_refused() -> None:
    for field, value, tail in FORGED_MORE:
        forged = (*NOTHING_MORE[:field], value, *NOTHING_MORE[field + 1 :])
        with pytest.raises(Invalid, match=r"malformed|breakers"):
            RowSampler(block_with_more(forged, tail), 100)


@tried(max_examples=300, deadline=None)
@given(
    block=st.binary(max_size=200) | st.binary(max_size=120).map(lambda tail: BLOCK.pack(*GOOD[:8], 1, 2, 3, 1) + tail),
    vocab_size=st.sampled_from([0, 1, 100, 2**31, 2**32 - 1]),
)
def test_whatever_bytes_come_they_make_a_sampler_or_an_error(block: bytes, vocab_size: int) -> None:
    try:
        sampler = RowSampler(block, vocab_size)
    except (Invalid, MemoryError):
        return
    if vocab_size <= 100:
        row = view(np.array([0.5] * vocab_size, np.float32))
        try:
            assert 0 <= sampler.draw(row, 0) < vocab_size
        except Invalid:
            return


def test_a_block_may_lie_at_any_address_and_says_where_it_ends() -> None:
    sampler = Sampler(temperature=0, repetition_penalty=2.0, logit_bias={1: 4.0})
    block = sampler.block(before=[1], generated=[2], allowed=bytes([0xFF] * 4))
    shifted = memoryview(b"x" + block + b"{}")[1:]
    assert sampling_block_bytes(shifted, 3) == len(block)
    assert RowSampler(shifted[: len(block)], 3).draw(view(np.array([1, 0, 3], np.float32)), 0) == 1
    with pytest.raises(Invalid, match="cut short"):
        sampling_block_bytes(shifted[: len(block) - 1], 3)


def test_a_row_of_another_size_is_refused() -> None:
    sampler = RowSampler(Sampler.greedy().block(), 3)
    with pytest.raises(Invalid, match="a row of 2 logits"):
        sampler.draw(view(np.array([1, 2], np.float32)), 0)
    draws = Draws(Sampler.greedy())
    draws.draw(Dist.of([1.0, 2.0]))
    with pytest.raises(Invalid, match="a row of 3 logits"):
        draws.draw(Dist.of([1.0, 2.0, 3.0]))
