"""Texts under a rule come as often as the model would say them under it: chi-square against all of them."""

import math
import random
import re
from collections import Counter
from typing import Any

import pytest

import libsym as sym
from lips import smc

pytestmark = pytest.mark.slow
PROMPT = "The best thing about the"
FIRST = (" internet", " human")
THEN = {" internet": (" was", " to"), " human": (" brain", " body")}
"""After " internet" the rule leaves what the model finds less likely there: a mask alone goes there all the same."""
NUM_DRAWN = 50
"""Under the mask alone the sum would be some 32."""


def exact(prompt):
    """The probability of each text that keeps the rule, given the rule."""
    found = {}
    for first in FIRST:
        for then in THEN[first]:
            tokens = tuple(sym.tokenize(first) + sym.tokenize(then))
            assert len(tokens) == 2
            found[tokens] = math.exp(math.fsum(sym.score(sym.kv_create(), [*prompt, *tokens])[len(prompt) - 1 :]))
    return {tokens: each / sum(found.values()) for tokens, each in found.items()}


def chi_square(counts, expected):
    return sum((counts[text] - share * NUM_DRAWN) ** 2 / (share * NUM_DRAWN) for text, share in expected.items())


def test_texts_come_in_proportion_to_their_probability_under_the_rule(lips):
    prompt, size = sym.tokenize(PROMPT), sym.model_info().vocab_size
    states = {token: 1 + place for place, text in enumerate(FIRST) for token in sym.tokenize(text)}
    sets = [sym.TokenSet(states, size)]
    sets += [sym.TokenSet([token for text in THEN[first] for token in sym.tokenize(text)], size) for first in FIRST]
    rng, weighed, expected = random.Random(7), Counter[tuple[int, ...]](), exact(prompt)

    def after(_state, token):
        return states.get(token, 0)

    for _ in range(NUM_DRAWN):
        with sym.kv_create() as kv:
            found = smc.steer(kv, prompt, sets.__getitem__, after, 8, 2, rng)
        most = max(each.weight for each in found)
        [drawn] = rng.choices(found, [math.exp(each.weight - most) for each in found])
        weighed[drawn.tokens] += 1
        for each in found:
            each.kv.close()
    assert chi_square(weighed, expected) < 11.3, (weighed, expected)  # 1 % of three degrees of freedom


def test_the_mean_weight_is_the_probability_that_the_rule_is_kept():
    forks: list[Any] = [Fork() for _ in range(4)]
    weights = (0.0, -9.0, -9.0, -9.0)
    particles = [smc.Particle(fork, [1], 0, (), weight) for fork, weight in zip(forks, weights, strict=True)]
    mean = math.fsum(math.exp(each.weight) for each in particles) / 4
    found = smc.resampled(particles, random.Random(0))
    assert [math.exp(each.weight) for each in found] == pytest.approx([mean] * 4)
    assert smc.resampled(found, random.Random(0)) is found, "equal weights are left alone"
    assert all(fork.is_closed for fork in forks)


class Fork:
    """A file that can be forked and closed."""

    is_closed = False

    def fork(self):
        return Fork()

    def close(self):
        self.is_closed = True


def test_no_word_of_the_command_is_longer_than_allowed(lips):
    text = lips.run("smc", "It is", "--longest", "4", "--particles", "4", "--max-tokens", "16", "--seed", "3")
    assert text.startswith("It is")
    assert max(map(len, re.findall(r"[^\W\d_]+", text))) <= 4
