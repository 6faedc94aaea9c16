"""Beam search finds what a search without forks finds, computes nothing twice, and leaves nothing behind."""

from dataclasses import replace

import pytest

import libsym as sym
from lips.beam import Beam, beam_search, growing

pytestmark = pytest.mark.slow


def question() -> list[int]:
    return sym.chat_tokens([{"role": "user", "content": "Is the sky blue? Yes or no?"}])


def search_without_forks(prompt: list[int], width: int, max_tokens: int) -> list[tuple[tuple[int, ...], float]]:
    """The same search, but each hypothesis is computed from its first token on, each time, and from whole rows."""
    end = sym.model_info().eos_ids
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(max_tokens):
        if beams[0][0] and beams[0][0][-1] in end:
            break
        found = list[tuple[tuple[int, ...], float]]()
        for tokens, logprob in beams:
            if tokens and tokens[-1] in end:
                found.append((tokens, logprob))
                continue
            with sym.kv_create() as kv, sym.pred(kv, [*prompt, *tokens]) as dist:
                found += [((*tokens, token), logprob + more) for token, more in dist.topk(width)]
        beams = sorted(found, key=lambda each: each[1], reverse=True)[:width]
    return beams


@pytest.mark.parametrize("max_tokens", [2, 12])
def test_it_finds_what_a_search_without_forks_finds(lips, max_tokens):
    """Two tokens are not enough for any answer, twelve are: the search ends before."""
    expected = search_without_forks(question(), 3, max_tokens)
    beams = beam_search(sym.kv_create(), question(), 3, max_tokens)
    assert [beam.tokens for beam in beams] == [tokens for tokens, _ in expected]
    assert [beam.logprob for beam in beams] == pytest.approx([logprob for _, logprob in expected], rel=1e-5)
    assert beams[0].is_over == (max_tokens == 12)
    assert all(len(set(beam.tokens) & sym.model_info().eos_ids) == beam.is_over for beam in beams)


def test_a_group_goes_on_while_another_of_its_hypotheses_is_likelier_than_the_one_that_is_over(lips):
    over, live = (Beam(sym.kv_create(), [1], (1,), logprob, is_over) for logprob, is_over in ((-3, True), (-1, False)))
    assert growing([over, live], 0.0) == [live], "diversity had put it behind"
    assert growing([replace(over, logprob=-0.5), live], 0.0) == []


def test_beams_share_what_they_have_in_common_and_losers_leave_nothing(lips, computed):
    kv, prompt = sym.kv_create(), sym.tokenize("The sun rises in the east. " * 10 + "The sun")
    before = sym.daemon_stat()
    beams, num_computed = computed(beam_search, kv, prompt, 4, 6)
    assert num_computed == len(prompt) + 5 * 4  # the prompt once, then a token for each beam but for the last ones
    assert kv.len() == 0
    assert sym.daemon_stat()["used_files"] == before["used_files"] + 4
    pages = [(sym.kv_stat(beam.kv).exclusive_pages, sym.kv_stat(beam.kv).pages) for beam in beams]
    assert all(alone is not None and alone <= 1 < num for alone, num in pages)
    for beam in beams:
        assert beam.kv.read()[0] == [*prompt, *beam.tokens[:-1]]
        beam.kv.close()
    after = sym.daemon_stat()
    assert (after["used_files"], after["used_bytes"]) == (before["used_files"], before["used_bytes"])


def test_scores_of_long_texts_are_divided_by_their_length_to_a_power(lips):
    prompt = question()
    plain = beam_search(sym.kv_create(), prompt, 6, 8)
    divided = beam_search(sym.kv_create(), prompt, 6, 8, normalize=1.0)
    means = [beam.logprob / len(beam.tokens) for beam in divided]
    assert means == sorted(means, reverse=True)
    assert means[0] > max(beam.logprob / len(beam.tokens) for beam in plain)
    assert len(divided[0].tokens) > len(plain[0].tokens), "the likeliest text is the shorter one"


def test_a_group_begins_with_what_groups_before_it_did_not_take(lips):
    prompt = sym.tokenize("Once upon a time there was a")
    top = [token for token, _ in sym.pred(sym.kv_create(), prompt, top_k=6).topk(6)]
    alike = beam_search(sym.kv_create(), prompt, 6, 1, groups=3)
    apart = beam_search(sym.kv_create(), prompt, 6, 1, groups=3, diversity=100.0)
    assert sorted(beam.tokens[0] for beam in alike) == sorted(top[:2] * 3)
    assert sorted(beam.tokens[0] for beam in apart) == sorted(top)
    [one] = [beam for beam in apart if beam.tokens[0] == top[5]]
    assert one.logprob == pytest.approx(sym.pred(sym.kv_create(), prompt).logprob(top[5]), abs=1e-4), "no penalty in it"
