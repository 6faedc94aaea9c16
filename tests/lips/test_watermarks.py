"""Watermarks are found with the key alone; a p-value says how surely."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import libsym as sym
from lips import gumbel, watermark

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time"
KEY, NUM_TEXTS, MAX_TOKENS = 7, 2, 72


def watermarked(prompt, number):
    with sym.kv_create() as kv:
        return watermark.generate(kv, prompt, KEY, 3.0, MAX_TOKENS, seed=number)


def gumbelled(prompt, number):
    """Draw a text with a key of its own: the key alone decides the draws."""
    with sym.kv_create() as kv:
        return gumbel.generate(kv, prompt, KEY + number, MAX_TOKENS)


def unmarked(prompt, number):
    with sym.kv_create() as kv:
        sampler = sym.Sampler(temperature=1, seed=number)
        return list(sym.generate(kv, prompt, sampler=sampler, max_tokens=MAX_TOKENS))


def texts(draw):
    """Texts that are drawn so, by number, side by side. A text that ended early is too short to tell."""
    prompt = sym.tokenize(PROMPT)
    with ThreadPoolExecutor(2 * NUM_TEXTS) as threads:
        drawn = threads.map(draw, [prompt] * 2 * NUM_TEXTS, range(2 * NUM_TEXTS))
        return [(number, text) for number, text in enumerate(drawn) if len(text) == MAX_TOKENS][:NUM_TEXTS]


@pytest.mark.parametrize(("module", "draw", "key_step"), [(watermark, watermarked, 0), (gumbel, gumbelled, 1)])
def test_only_the_key_finds_it_and_no_text_without_it_is_accused(lips, module, draw, key_step):
    size = sym.model_info().vocab_size
    marked, plain = texts(draw), texts(unmarked)
    assert len(marked) == len(plain) == NUM_TEXTS
    before = sym.getrusage().tokens
    keyed = [(text, KEY + key_step * number) for number, text in marked]
    found = [module.p_value(text, key, size) for text, key in keyed]
    innocent = [module.p_value(text, KEY + key_step * number, size) for number, text in plain]
    others = [module.p_value(text, key + 1000, size) for text, key in keyed]
    assert sym.getrusage().tokens == before, "it takes the text and the key, and no model"
    assert max(found) < 1e-4
    assert min(innocent + others) > 50 * max(found), "an AUC of 1"


@pytest.mark.parametrize("module", [watermark, gumbel])
def test_without_a_watermark_p_is_as_often_small_as_it_says(module):
    """Uniform, by the statistic of Kolmogorov and Smirnov. Kirchenbauer's counts to 60, in steps of up to 0.1."""
    tokens = np.random.default_rng(0).integers(0, 500, (400, 60)).tolist()
    p_values = np.sort([module.p_value(text, KEY, 500) for text in tokens])
    steps = np.arange(401) / 400
    distance = max(np.max(steps[1:] - p_values), np.max(p_values - steps[:-1]))
    assert distance < (0.07 if module is gumbel else 0.12)
    assert np.mean(p_values < 0.01) < 0.025


@pytest.mark.parametrize("name", ["watermark", "gumbel"])
def test_what_the_program_prints_is_known_to_the_program_with_the_key(lips, name):
    text = lips.run(name, PROMPT, "--key", "7", "--max-tokens", str(MAX_TOKENS))
    said = (lips.run(name, "--key", key, "--detect", text) for key in ("7", "9"))
    with_key, without = (float(line.removeprefix("p = ")) for line in said)
    assert with_key < 1e-4
    assert without > 0.01


def test_half_of_the_vocabulary_is_favoured_and_which_half_depends_on_the_key_and_the_token_before():
    halves = [watermark.green(key, before, 10_000) for key, before in ((1, 5), (1, 5), (2, 5), (1, 6))]
    assert all(abs(half.mean() - 0.5) < 0.02 for half in halves)
    assert np.array_equal(halves[0], halves[1])
    assert all(abs((halves[0] == other).mean() - 0.5) < 0.02 for other in halves[2:])


def test_without_a_favour_it_draws_as_the_daemon_does_and_gumbels_key_is_its_seed(lips):
    prompt = sym.tokenize(PROMPT)
    plain = watermark.generate(sym.kv_create(), prompt, KEY, 0.0, 8, seed=1)
    assert plain == list(sym.generate(sym.kv_create(), prompt, sampler=sym.Sampler(seed=1), max_tokens=8))
    same, again, other = (gumbel.generate(sym.kv_create(), prompt, key, 8) for key in (1, 1, 2))
    assert same == again != other


def test_gumbels_p_value_is_that_of_a_gamma_distribution():
    """Against one that is drawn."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 500, 40).tolist()
    runs = [tokens[at - gumbel.NUM_BEFORE : at + 1] for at in range(gumbel.NUM_BEFORE, len(tokens))]
    total = sum(-math.log1p(-gumbel.numbers(KEY, before, 500)[token]) for *before, token in runs)
    drawn = rng.gamma(len(runs), 1.0, 200_000)
    assert gumbel.p_value(tokens, KEY, 500) == pytest.approx((drawn >= total).mean(), abs=0.01)


def test_over_the_keys_gumbels_choice_is_a_fair_draw():
    """Chi-squared with 4 degrees of freedom is beyond 18.5 in one of 1000 such samples."""
    probs, num_keys = np.array([0.5, 0.3, 0.15, 0.04, 0.01, 0.0]), 20_000
    chosen = [gumbel.choose(probs, gumbel.numbers(key, (3, 1, 2), len(probs))) for key in range(num_keys)]
    counts = np.bincount(chosen, minlength=len(probs))
    assert counts[5] == 0, "what is impossible is never drawn"
    expected = num_keys * probs[:5]
    assert np.sum((counts[:5] - expected) ** 2 / expected) < 18.5


@pytest.mark.parametrize("module", [watermark, gumbel])
def test_a_text_too_short_to_tell_is_not_accused_and_a_repetition_counts_once(module):
    assert module.p_value([], KEY, 100) >= 0.5
    assert module.p_value([5], KEY, 100) >= 0.5
    text = [4, 8, 15, 16, 23, 42]
    assert module.p_value(text * 9, KEY, 100) == module.p_value(text * 2, KEY, 100)
