"""The arithmetic over distributions, against numpy in double precision."""

import math
import subprocess
import sys
from array import array
from typing import Any

import numpy as np
import pytest

from libsym._channel import ffi
from libsym.errors import Invalid
from libsym.rows.dist import Dist, uniform

SIZES = [1, 2, 3, 5, 64, 511, 512, 513, 1025, 49_152]


def random_logits(size: int, seed: int = 0, scale: float = 4.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def dist_of(logits: np.ndarray) -> Dist:
    return Dist.of(logits.astype(np.float32).tolist())


def reference_probs(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) - float(logits.max()))
    return exponentials / exponentials.sum()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.0, 0.1, 4.0, 60.0])
def test_everything_agrees_with_numpy(size: int, scale: float) -> None:
    logits = random_logits(size, seed=size, scale=scale)
    dist, probs = dist_of(logits), reference_probs(logits)
    assert dist.argmax() == int(logits.argmax())
    np.testing.assert_allclose(np.asarray(dist.probs()), probs, rtol=2e-5, atol=1e-37)
    positive = probs[probs > 0]
    assert dist.entropy() == pytest.approx(-(positive * np.log(positive)).sum(), rel=1e-6, abs=1e-6)
    for token in {0, size // 2, size - 1}:
        expected = float(logits[token]) - float(logits.max()) + math.log(probs.max())
        assert dist.logprob(token) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 2, 50, 1024, 1025, 49_152])
def test_topk_is_sorted_and_breaks_ties_by_number(size: int, k: int) -> None:
    k = min(k, size)
    logits = np.round(random_logits(size, seed=k), 1)  # many equals, also 0.0 and -0.0
    dist = dist_of(logits)
    order = np.lexsort((np.arange(size), -logits))[:k]
    found = dist.topk(k)
    assert [token for token, _ in found] == order.tolist()
    sample = range(0, k, k // 50 + 1)
    assert [found[i][1] for i in sample] == pytest.approx([dist.logprob(int(order[i])) for i in sample])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 3, 8])
def test_rows_without_meaning_are_refused(bad: float, place: int) -> None:
    dist = Dist.of([bad if index == place else 1.0 for index in range(9)])
    for ask in (dist.argmax, dist.sample, dist.entropy, dist.probs, lambda: dist.topk(1), lambda: dist.logprob(1)):
        with pytest.raises(Invalid, match="NaN"):
            ask()


KEPT = """
import gc, math
import libsym as sym
from libsym.rows.native import bits_of
nan = sym.Dist.of([math.nan, 1.0])
for ask in (
    lambda: nan.sample(allowed=memoryview(bits_of(bytes([1, 0])))),
    lambda: sym.Dist.mixed([(nan, 1.0), (nan, 1.0)]),
    lambda: sym.Sampler(temperature=1.0).start().draw(nan, allowed=memoryview(bits_of(bytes([1, 0])))),
):
    def failed():
        try:
            ask()
        except sym.Invalid as error:
            kept = [error]
            kept.append(kept)  # only the collector frees what is in this circle
    failed()
    gc.collect()
print("alive")
"""


def test_an_error_that_is_kept_harms_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_impossible_tokens_have_no_share_and_all_impossible_is_an_error() -> None:
    logits = [-math.inf] * 600
    with pytest.raises(Invalid, match="every logit is -inf"):
        Dist.of(logits).sample()
    logits[590] = logits[3] = -1.0
    dist = Dist.of(logits)
    assert [dist.sample(u=u) for u in (0.0, 0.25, 0.4999, 0.5001, 0.75, 1 - 2**-53)] == [3, 3, 3, 590, 590, 590]
    assert dist.entropy() == pytest.approx(math.log(2))
    assert dist.topk(3)[2] == (0, -math.inf)
    assert dist.probs()[0] == 0.0


def test_the_same_seed_gives_the_same_token_and_seeds_are_unrelated() -> None:
    dist = dist_of(random_logits(1000, scale=0.5))
    first = [dist.sample(seed=seed) for seed in range(200)]
    assert first == [dist.sample(seed=seed) for seed in range(200)]
    assert len(set(first)) > 100
    for draw in (0, 1, 2, 1000, 2**63 - 1):
        assert [uniform(seed, draw) for seed in range(200)] == [expected(seed, draw) for seed in range(200)]
    assert uniform(-1) == uniform(2**64 - 1) == expected(2**64 - 1, 0)


def expected(seed: int, draw: int) -> float:
    """Return the uniform number that all builds and languages must draw."""
    return (mixed(mixed(seed + STRIDE) + (draw + 1) * STRIDE) >> 11) / 2**53


STRIDE = 0x9E3779B97F4A7C15


def mixed(z: int) -> int:
    mask = 2**64 - 1
    z &= mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_no_seed_draws_anew() -> None:
    dist = Dist.of([0.0] * 1000)
    assert len({dist.sample() for _ in range(50)}) > 25


def test_temperature_zero_is_the_argmax_and_a_tiny_one_nearly() -> None:
    dist = dist_of(random_logits(1000))
    assert {dist.sample(temperature=t, u=0.999) for t in (0.0, 1e-40, 1e-3)} == {dist.argmax()}
    assert Dist.of([0.0, 9.0]).sample(temperature=math.inf, u=0.4) == 0


REFUSED: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-1.0, math.nan)),
    {"top_k": 0},
    *({"top_p": value} for value in (0.0, 1.5)),
    {"min_p": -0.1},
    *({"u": 1.0}, {"u": 0.5, "seed": 1}),
    *({"draw": -1, "seed": 1}, {"draw": 1, "u": 0.5}),
]


@pytest.mark.parametrize("settings", REFUSED)
def test_settings_out_of_range_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=rf"\b{next(iter(settings))}\b"):
        Dist.of([1.0, 2.0]).sample(**settings)


def test_tokens_counts_and_masks_that_do_not_fit_the_vocabulary_are_named() -> None:
    dist = Dist.of([1.0] * 40)
    for ask in (lambda: dist.logprob(40), lambda: dist.logprob(-1), lambda: dist.topk(0), lambda: dist.topk(41)):
        with pytest.raises(Invalid, match="vocabulary"):
            ask()
    for bad in ([40], [-1], bytes(4), bytes(9), memoryview(bytes(12))):
        with pytest.raises(Invalid, match="allowed"):
            dist.argmax(allowed=bad)
    with pytest.raises(Invalid, match="no token is possible"):
        dist.argmax(allowed=[])


def test_several_rows_are_a_sequence_and_the_last_one_speaks() -> None:
    rows = ffi.new("float[]", [0, 9, 0, 0, 5, 0, 0, 0, 0, 0, 7, 0])
    dist = Dist(rows, 3, 16, 3)  # rows of 3 logits, 4 apart
    assert len(dist) == 3
    assert [row.argmax() for row in dist] == [1, 0, 2]
    assert dist.argmax() == 2
    assert dist[-3].argmax() == 1
    with pytest.raises(IndexError):
        dist[3]


def test_logits_are_read_only_and_a_closed_dist_says_so() -> None:
    with Dist.of([1.0, 2.0]) as dist:
        logits = dist.logits
        with pytest.raises(TypeError):
            logits[0] = 3.0
    assert logits.tolist() == [1.0, 2.0]
    for ask in (dist.argmax, lambda: dist.logits, lambda: dist[0]):
        with pytest.raises(Invalid, match="closed"):
            ask()


def test_allowed_makes_all_others_impossible() -> None:
    logits = random_logits(1000, seed=6)
    allowed = [3, 500, 501, 998]
    bits = bytearray(1024 // 8)
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    narrowed = np.full(1000, -np.inf, np.float32)
    narrowed[allowed] = logits[allowed]
    dist, expected = dist_of(logits), dist_of(narrowed)
    for given in (allowed, iter(allowed), bytes(bits), bits, memoryview(bits), memoryview(bits).cast("I")):
        assert dist.sample(u=0.7, allowed=given) == expected.sample(u=0.7)
    assert dist.argmax(allowed=bits) == expected.argmax()
    assert dist.topk(5, allowed=bits) == expected.topk(5)
    assert dist.entropy(allowed=bits) == expected.entropy()
    assert bytes(dist.probs(allowed=bits)) == bytes(expected.probs())
    assert [dist.logprob(token, allowed=bits) for token in (3, 998)] == [expected.logprob(token) for token in (3, 998)]
    assert dist.logprob(4, allowed=bits) == -math.inf
    assert logits.tolist() == dist.logits.tolist()


def test_a_row_of_ones_own_may_be_whatever_holds_numbers() -> None:
    logits = random_logits(1000, seed=7)
    own = [logits.tolist(), array("f", logits.tolist()), logits.data, logits, np.repeat(logits, 2)[::2]]
    own += [logits.astype(np.float64), iter(logits.tolist()), dist_of(logits).logits]
    assert all(Dist.of(row).logits.tolist() == logits.tolist() for row in own)
    assert Dist.of(np.arange(5)[::-1]).logits.tolist() == [4.0, 3.0, 2.0, 1.0, 0.0]
    row = logits.copy()
    dist = Dist.of(row)
    row[:] = 0
    assert dist.logits.tolist() == logits.tolist(), "it is a copy"
    for bad in (np.array(["a", "b"]), np.zeros((2, 3)), np.zeros(0), np.float32(1), ["a"], "12", {1.0}, None):
        with pytest.raises(Invalid, match=r"Dist.of\(\) takes one row of logits"):
            Dist.of(bad)
