"""Each sampler against its definition, computed here in another way, on rows of every shape."""

import math

import numpy as np
import pytest

import libsym as sym
from lips import samplers

RNG = np.random.default_rng(0)
ROWS = {
    "random": RNG.normal(0, 2, 40),
    "steep": RNG.normal(0, 6, 300),
    "flat": np.zeros(20),
    "one dominates": np.array([30.0, 0, 0, 0, -2]),
    "two share": np.array([5.0, 5.0, -3, -4]),
    "a single token": np.zeros(1),
}


@pytest.fixture(params=ROWS)
def p(request):
    weights = np.exp(ROWS[request.param])
    return weights / weights.sum()


def kept(name, p, **how):
    """The tokens that a sampler leaves; it changes no weight of them."""
    weights = getattr(samplers, name)(p.copy(), np.random.default_rng(0), **how)
    assert set(weights[weights != p]) <= {0}
    return set(np.flatnonzero(weights).tolist())


def surprises(p):
    return [-math.log(each) for each in p]


def entropy(p):
    return math.fsum(each * surprise for each, surprise in zip(p, surprises(p), strict=True))


@pytest.mark.parametrize("least", [0.02, 0.1, 0.9])
def test_min_p_keeps_what_is_so_likely_beside_the_first_as_libsym_does(p, least):
    ours = kept("min_p", p, least=least)
    assert ours == {token for token, each in enumerate(p) if each / max(p) >= least}
    dist = sym.Dist.of(np.log(p))
    assert ours == {dist.sample(min_p=least, u=u) for u in np.arange(0, 1, min(p[list(ours)]) / 2)}


def test_top_a_keeps_what_is_so_likely_beside_the_square_of_the_first(p):
    for a in (0.05, 0.2, 1.0):
        assert kept("top_a", p, a=a) == {token for token, each in enumerate(p) if each / max(p) >= a * max(p)}


def test_eta_cuts_lower_where_the_model_is_undecided_and_leaves_the_first(p):
    for epsilon in (3e-4, 3e-3, 0.1, 1.0):
        eta = min(epsilon, math.sqrt(epsilon) / math.exp(entropy(p)))
        expected = {token for token, each in enumerate(p) if each >= eta}
        assert kept("eta", p, epsilon=epsilon) == expected | {t for t, each in enumerate(p) if each == max(p)}


def test_xtc_drops_the_likeliest_that_pass_but_the_least_of_them_as_often_as_is_said(p):
    for threshold in (0.02, 0.1, 0.4):
        passing = [token for token, each in enumerate(p) if each >= threshold]
        left = {tuple(np.flatnonzero(samplers.xtc(p, np.random.default_rng(seed), threshold))) for seed in range(40)}
        least = min(passing, key=lambda token: p[token], default=None)
        dropped = {token for token in passing if p[token] > p[least]}
        assert left == {tuple(range(len(p))), tuple(token for token in range(len(p)) if token not in dropped)}
    always, never = (samplers.xtc(p, np.random.default_rng(0), 0.02, chance) for chance in (1.0, 0.0))
    assert np.array_equal(never, p)
    assert (always == 0).any() == (sum(p >= 0.02) > 1 and np.ptp(p[p >= 0.02]) > 0)


def test_xtc_is_a_matter_of_chance():
    p, rng = np.array([0.6, 0.3, 0.1]), np.random.default_rng(5)
    dropped = sum(samplers.xtc(p, rng, 0.2, 0.3)[0] == 0 for _ in range(4000))
    assert abs(dropped / 4000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)


def test_the_adaptive_temperature_is_that_of_its_definition(p):
    weights = samplers.adaptive(p, RNG, base=0.9, theta=0.7)
    if entropy(p) < 1e-3:
        assert np.argmax(weights) == np.argmax(p)
        assert np.sort(weights)[:-1].sum() < 1e-9, "sure of itself: as cold as can be"
        return
    temperature = 0.9 * 0.8 ** (0.7 / entropy(p))
    expected = np.exp(np.log(p) / temperature)
    np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum(), rtol=1e-9)


def test_whatever_the_row_is_there_is_something_left_to_draw(p):
    padded = np.append(p, [1e-300] * 3)  # what float32 made 0 of
    for sampler in samplers.SAMPLERS.values():
        if isinstance(sampler, sym.Sampler):
            continue
        weights = sampler(padded, np.random.default_rng(0))
        assert weights.shape == padded.shape
        assert np.isfinite(weights).all()
        assert weights.min() >= 0 < weights.sum()


@pytest.mark.slow
def test_a_real_model_that_repeats_itself_is_stopped_by_dry_alone(lips):
    prompt = sym.tokenize("red, green, blue, red, green, blue, red, green, blue, red, green,")
    [blue] = sym.tokenize(" blue")
    for name, sampler in samplers.SAMPLERS.items():
        with sym.kv_create() as kv:
            [drawn] = samplers.generate(kv, prompt, sampler, 0, 1)
        assert (drawn != blue) == (name == "dry"), name


@pytest.mark.slow
def test_it_is_run_by_the_samplers_name_and_the_seed_says_what_is_drawn(lips):
    prompt = "Once upon a time"
    for name in ("eta", "mirostat"):
        with sym.kv_create() as kv:
            ours = samplers.generate(kv, sym.tokenize(prompt), samplers.SAMPLERS[name], 3, 8).full_text()
        assert lips.run("samplers", prompt, "--sampler", name, "--seed", "3", "--max-tokens", "8") == ours + "\n"
