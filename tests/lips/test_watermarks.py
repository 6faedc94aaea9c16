"""Watermarks: whoever has the key finds them, by a p-value that is honest; one changes no probability."""

import math

import numpy as np
import pytest

import libsym as sym
from lips import gumbel, watermark

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time there was a"
SIZE = 500


def plain_texts(count, length, seed=0):
    """Token sequences that nobody has marked."""
    return np.random.default_rng(seed).integers(0, SIZE, (count, length)).tolist()


@pytest.mark.parametrize("method", [watermark, gumbel])
def test_without_a_watermark_p_is_as_likely_to_be_small_as_it_says(method):
    values = np.array([method.p_value(tokens, 7, SIZE) for tokens in plain_texts(400, 60)])
    assert ((values >= 0) & (values <= 1)).all()
    for level in (0.05, 0.25, 0.5, 0.75):
        spread = 4 * math.sqrt(level * (1 - level) / len(values))
        assert (values <= level).mean() == pytest.approx(level, abs=spread + 0.05), level


def test_the_favoured_half_is_found_in_the_models_text_by_its_key_alone(lips):
    tokens = watermark.generate(sym.kv_create(), sym.tokenize(PROMPT), key=7, delta=4.0, max_tokens=48, seed=1)
    size = sym.model_info().vocab_size
    assert watermark.p_value(tokens, 7, size) < 1e-5
    assert watermark.p_value(tokens, 8, size) > 1e-3
    plain = watermark.generate(sym.kv_create(), sym.tokenize(PROMPT), key=7, delta=0.0, max_tokens=48, seed=1)
    assert watermark.p_value(plain, 7, size) > 1e-3
    sampler = sym.Sampler(seed=1)
    assert plain == list(sym.generate(sym.kv_create(), sym.tokenize(PROMPT), sampler=sampler, max_tokens=48))


def test_the_watermark_of_numbers_is_found_by_its_key_alone(lips):
    tokens = gumbel.generate(sym.kv_create(), sym.tokenize(PROMPT), key=7, max_tokens=48)
    size = sym.model_info().vocab_size
    assert gumbel.p_value(tokens, 7, size) < 1e-4
    assert gumbel.p_value(tokens, 8, size) > 1e-3
    assert tokens == gumbel.generate(sym.kv_create(), sym.tokenize(PROMPT), key=7, max_tokens=48), "the key is the seed"
    assert tokens != gumbel.generate(sym.kv_create(), sym.tokenize(PROMPT), key=8, max_tokens=48)


def test_over_all_keys_the_numbers_draw_as_the_model_does():
    probs = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    counts = np.zeros(5)
    for key in range(4000):
        counts[gumbel.choose(probs, gumbel.numbers(key, (1, 2, 3), 5))] += 1
    assert counts[4] == 0
    chi_square = sum((counts[:4] - 4000 * probs[:4]) ** 2 / (4000 * probs[:4]))
    assert chi_square < 16.3, "three degrees of freedom, p = 0.001"


def test_the_sum_has_the_distribution_that_the_p_value_takes_it_for():
    """Against a gamma distribution that is drawn."""
    [tokens] = plain_texts(1, 40, seed=3)
    runs = 40 - gumbel.NUM_BEFORE
    drawn = np.random.default_rng(0).gamma(runs, 1.0, 200_000)
    total = sum(
        -math.log1p(-gumbel.numbers(7, tokens[at - 3 : at], SIZE)[tokens[at]]) for at in range(gumbel.NUM_BEFORE, 40)
    )
    assert gumbel.p_value(tokens, 7, SIZE) == pytest.approx((drawn >= total).mean(), abs=0.01)


@pytest.mark.parametrize("method", [watermark, gumbel])
def test_repetitions_and_short_texts_prove_nothing(method):
    [run] = plain_texts(1, 8)
    assert method.p_value(run * 50, 7, SIZE) > 1e-6, "a loop is one piece of evidence, not fifty"
    assert method.p_value([], 7, SIZE) == pytest.approx(1.0, abs=0.5)
    assert method.p_value([1], 7, SIZE) == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("name", ["watermark", "gumbel"])
def test_the_command_finds_what_it_wrote(lips, name):
    text = lips.run(name, PROMPT, "--key", "7", "--max-tokens", "60").strip()
    marked, other = (lips.run(name, "--detect", text, "--key", key) for key in ("7", "8"))
    assert float(marked.removeprefix("p = ")) < 1e-3 < float(other.removeprefix("p = "))
