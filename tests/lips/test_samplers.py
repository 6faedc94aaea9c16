"""Samplers, each against its definition, computed in another way."""

import math

import numpy as np
import pytest

import libsym as sym
from lips import samplers

RNG = np.random.default_rng(0)
ROWS = {
    "a model's": lambda: RNG.dirichlet(np.full(50, 0.1)),
    "flat": lambda: np.full(50, 0.02),
    "one dominates": lambda: np.array([0.97] + [0.03 / 49] * 49),
}


@pytest.fixture(params=ROWS)
def p(request):
    row = np.maximum(ROWS[request.param](), 1e-300)
    return row / row.sum()


def entropy(p):
    return sum(-each * math.log(each) for each in p if each > 0)


def kept(weights):
    return {token for token, weight in enumerate(weights) if weight > 0}


def test_min_p_keeps_what_is_a_part_as_likely_as_the_likeliest(p):
    assert kept(samplers.min_p(p, [], RNG, 0.2)) == {i for i in range(50) if p[i] >= 0.2 * max(p)}


def test_min_p_is_libsyms_own():
    dist = sym.Dist.of(RNG.normal(0, 3, 50))
    ours = kept(samplers.min_p(np.asarray(dist.probs(), np.float64), [], RNG, 0.1))
    assert {dist.sample(min_p=0.1, u=u) for u in np.linspace(0, 0.999, 3000)} <= ours


def test_top_a_keeps_what_is_above_the_square_of_the_likeliest(p):
    assert kept(samplers.top_a(p, [], RNG, 0.3)) == {i for i in range(50) if p[i] >= 0.3 * max(p) ** 2}


def test_eta_cuts_where_the_model_is_undecided_less_than_where_it_is_sure(p):
    least = min(0.01, math.sqrt(0.01) * math.exp(-entropy(p)))
    assert kept(samplers.eta(p, [], RNG, 0.01)) == {i for i in range(50) if p[i] >= least or p[i] == max(p)}


def test_typical_keeps_those_whose_surprise_is_nearest_to_the_expected_one(p):
    left = kept(samplers.typical(p, [], RNG, 0.8))
    far = [abs(-math.log(p[i]) - entropy(p)) for i in range(50)]
    assert sum(p[i] for i in left) >= 0.8 - 1e-12
    assert max(far[i] for i in left) <= min((far[i] for i in range(50) if i not in left), default=math.inf) + 1e-12
    farthest = max(left, key=lambda i: far[i])
    assert sum(p[i] for i in left - {farthest}) < 0.8 + 1e-12, "and no more than it takes"


def test_xtc_drops_the_top_but_for_its_last_as_often_as_it_should():
    p = np.array([0.4, 0.3, 0.2, 0.1])
    rng = np.random.default_rng(1)
    outcomes = [tuple(samplers.xtc(p, [], rng, 0.15, 0.5) > 0) for _ in range(2000)]
    assert set(outcomes) == {(True,) * 4, (False, False, True, True)}
    assert outcomes.count((False, False, True, True)) == pytest.approx(1000, abs=100)
    assert (samplers.xtc(p, [], rng, 0.35, 1.0) == p).all(), "one token above the threshold is no choice"


def test_adaptive_is_colder_where_the_model_is_sure():
    def temperature(p):
        weights = samplers.adaptive(p, [], RNG)
        return math.log(p[0] / p[1]) / math.log(weights[0] / weights[1])

    sure, undecided = np.array([0.95, 0.04, 0.01]), np.array([0.4, 0.35, 0.25])
    assert temperature(sure) < temperature(undecided) < 0.8
    assert temperature(undecided) == pytest.approx(0.8 * 0.8 ** (0.5 / entropy(undecided)), rel=1e-6)


def test_dry_makes_a_longer_repetition_less_likely_and_lets_the_rest_be():
    p = np.full(10, 0.1)
    weights = samplers.dry(p, [1, 2, 3, 4, 9, 1, 2, 3], RNG)
    assert weights[4] == pytest.approx(0.1 * math.exp(-0.8 * 1.75 ** (3 - 2)))
    assert (np.delete(weights, 4) == 0.1).all()
    longer = samplers.dry(p, [5, 1, 2, 3, 4, 9, 5, 1, 2, 3], RNG)
    assert longer[4] < weights[4]
    assert (samplers.dry(p, [3, 4, 3], RNG) == 0.1).all(), "a repetition of one token is allowed"


def test_mirostat_keeps_the_surprise_near_tau():
    rng = np.random.default_rng(2)
    for tau in (2.0, 3.5):
        sampler, tokens, surprises = samplers.mirostat(tau), [0], []
        for _ in range(1500):
            p = np.maximum(rng.dirichlet(np.full(400, 0.15)), 1e-300)
            weights = sampler(p, tokens, rng)
            tokens.append(int(rng.choice(400, p=weights / weights.sum())))
            surprises.append(-math.log2(weights[tokens[-1]] / weights.sum()))
        assert np.mean(surprises[300:]) == pytest.approx(tau, abs=0.25)


@pytest.mark.slow
def test_all_of_them_write(lips):
    prompt = sym.tokenize("Once upon a time")
    for name in [*samplers.SAMPLERS, "mirostat"]:
        texts = []
        for seed in (1, 1):
            sampler = samplers.SAMPLERS.get(name) or samplers.mirostat()
            texts.append(samplers.generate(sym.kv_create(), prompt, sampler, seed, 4).full_text())
        assert texts[0] == texts[1] != "", name
    assert lips.run("samplers", "Once upon a time", "--sampler", "typical", "--max-tokens", "4").strip()
    refused = lips.finish("samplers", "Once", "--sampler", "none")
    assert refused.returncode == 2
    assert "invalid choice: 'none'" in refused.stderr
