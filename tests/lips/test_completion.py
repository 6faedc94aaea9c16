"""The plain loop: its tokens are those that the daemon's own loop draws."""

import pytest

import libsym as sym
from lips.completion import complete

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time"


@pytest.mark.parametrize("sampler", [sym.Sampler(temperature=0), sym.Sampler(temperature=0.9, seed=7)])
def test_its_text_is_that_of_the_same_loop_in_the_daemon(lips, sampler):
    with sym.kv_create() as kv:
        wanted = sym.generate(kv, sym.tokenize(PROMPT), sampler=sampler, max_tokens=12).full_text()
    assert "".join(complete(PROMPT, sampler, 12)) == wanted


def test_the_command_draws_as_its_options_say(lips):
    said = lips.run("completion", "--max-tokens", "5", "--temperature", "1", "--seed", "7", PROMPT)
    assert said == "".join(complete(PROMPT, sym.Sampler(temperature=1, seed=7), 5)) + "\n"


def test_a_full_context_ends_it_as_it_ends_the_loop_in_the_daemon(tiny):
    greedy, most = sym.Sampler.greedy(), sym.model_info().max_positions
    for room in (0, 3):
        prompt = "a" * (most - room)
        wanted = sym.generate(sym.kv_create(), sym.tokenize(prompt), sampler=greedy, max_tokens=12).full_text()
        assert "".join(complete(prompt, greedy, 12)) == wanted
        assert len(wanted) == room + 1, "the token behind the last entry is known, and needs no room"
    with pytest.raises(sym.Invalid, match="beyond the model's context"):
        list(complete("a" * (most + 1), greedy, 12))
