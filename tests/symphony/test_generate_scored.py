"""How likely the tokens of a generation were, and several that go on from one text."""

import math

import anyio
import pytest

import libsym as sym

PROMPT = list(b"the cat sat on the mat; the cat sat on the ")


@pytest.fixture(autouse=True)
def on_daemon(connected):
    return connected


def assert_same(found, dist, top):
    """Assert that the numbers beside a token are those of the full row at the same place."""
    assert found.logprob(found.token) == pytest.approx(dist.logprob(found.token), abs=1e-4)
    assert found.logprob(found.token) <= 0
    if top:
        assert [token for token, _ in found.topk(top)] == [token for token, _ in dist.topk(top)]
        expected = [logprob for _, logprob in dist.topk(top)]
        assert [logprob for _, logprob in found.topk(top)] == pytest.approx(expected, abs=1e-4)
    assert found.entropy() == pytest.approx(dist.entropy(), abs=1e-4)


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("top", [0, 1, 7])
def test_each_token_has_the_numbers_of_the_row_that_it_was_drawn_from(top, draft):
    sampler = sym.Sampler(temperature=6, frequency_penalty=0.5, seed=3)
    kv = sym.kv_create()
    generation = sym.generate(kv, PROMPT, sampler=sampler, max_tokens=24, logprobs=top, draft=draft)
    tokens = list(generation)
    assert tokens == list(sym.generate(sym.kv_create(), PROMPT, sampler=sampler, max_tokens=24, draft=draft))
    assert [dist.token for dist in generation.dists] == tokens
    rows = sym.pred(sym.kv_create(), PROMPT + tokens[:-1], rows="all")
    for found, dist in zip(generation.dists, list(rows)[len(PROMPT) - 1 :], strict=True):
        assert_same(found, dist, top)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_tokens_that_a_grammar_forces_have_none(draft):
    grammar = sym.Grammar.regex("(yes|no), it (is|was) so")
    generation = sym.generate(sym.kv_create(), PROMPT, grammar=grammar, logprobs=2, draft=draft)
    text = generation.full_text()
    assert len(generation.dists) == len(generation.tokens) == len(text)
    drawn = [dist is not None for dist in generation.dists]
    assert drawn[0], "yes or no"
    assert not any(drawn[1 : text.index("it ") + 3])
    assert all(dist.token == token for dist, token in zip(generation.dists, generation.tokens, strict=True) if dist)


def test_a_stop_token_has_no_place_among_them_and_a_stop_text_has():
    first = sym.generate(sym.kv_create(), PROMPT, max_tokens=4, logprobs=0)
    tokens = list(first)
    stopped = sym.generate(sym.kv_create(), PROMPT, stop=tokens[-1], logprobs=0)
    assert len(list(stopped)) == len(stopped.dists) == tokens.index(tokens[-1])
    by_text = sym.generate(sym.kv_create(), PROMPT, stop=bytes(tokens[:2]).decode(), max_tokens=9, logprobs=0)
    assert len(list(by_text)) == len(by_text.dists) == 2


@pytest.mark.slow
def test_a_program_that_does_not_read_has_all_of_them_in_the_end(connected):
    """The ring is full long before the end, so the daemon keeps tokens, and draws by itself."""
    sampler = sym.Sampler(seed=5)
    generation = sym.generate(
        sym.kv_create(), PROMPT, sampler=sampler, max_tokens=1500, logprobs=100, stop_at_end=False
    )
    other = sym.generate(sym.kv_create(), PROMPT, sampler=sampler, max_tokens=1500, stop_at_end=False)
    expected = list(other)
    assert list(generation) == expected
    assert [dist.token for dist in generation.dists] == expected
    assert all(len(dist.topk(100)) == 100 and math.isfinite(dist.logprob(dist.token)) for dist in generation.dists)


def test_they_come_in_an_event_loop_too():
    async def main():
        generation = await sym.aio.generate(await sym.aio.kv_create(), PROMPT, max_tokens=5, logprobs=2)
        tokens = [token async for token in generation]
        return tokens, [dist.token for dist in generation.dists]

    tokens, found = anyio.run(main)
    assert tokens == found


def test_what_is_no_number_of_them_is_refused_and_so_is_asking_without():
    for wrong in (-1, 257, 1.5, True, "5"):
        with pytest.raises(sym.Invalid, match="logprobs="):
            sym.generate(sym.kv_create(), PROMPT, logprobs=wrong)
    generation = sym.generate(sym.kv_create(), PROMPT, max_tokens=1)
    assert len(list(generation)) == 1
    with pytest.raises(sym.Invalid, match="give generate"):
        generation.dists  # noqa: B018 - it raises


def test_an_interrupt_leaves_as_many_distributions_as_tokens(monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("libsym.calls.generate.drawn_dists", interrupted)
    generation = sym.generate(sym.kv_create(), PROMPT, max_tokens=5, logprobs=2)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert ": 0 tokens," in repr(generation)
    assert generation.dists == []


def test_several_go_on_from_one_text_that_is_computed_once():
    before = sym.getrusage().tokens
    kv = sym.kv_create()
    sampler = sym.Sampler(temperature=9, repetition_penalty=1.2, seed=11)
    answers = sym.generate_n(kv, PROMPT, 4, sampler=sampler, max_tokens=8)
    found = [list(answer) for answer in answers]
    assert sym.getrusage().tokens - before <= len(PROMPT) + 4 * 8
    assert len({tuple(each) for each in found}) > 1, "each has a seed of its own"
    assert kv.len() == len(PROMPT) - 1
    for answer, tokens in zip(answers, found, strict=True):
        alone = sym.generate(sym.kv_create(), PROMPT, sampler=sampler, seed=answer.seed, max_tokens=8)
        assert list(alone) == tokens, "as if it were alone"
        assert sym.kv_read(answer.kv)[0] + answer.pending == PROMPT + tokens
    fewer = sym.generate_n(sym.kv_create(), PROMPT, 2, sampler=sampler, max_tokens=8)
    assert [list(answer) for answer in fewer] == found[:2]


def test_several_in_an_event_loop_are_those_of_the_thread():
    sampler = sym.Sampler(temperature=9, seed=11)

    async def main():
        answers = await sym.aio.generate_n(await sym.aio.kv_create(), PROMPT, 6, sampler=sampler, max_tokens=10)
        return [[token async for token in answer] for answer in answers]

    expected = [list(each) for each in sym.generate_n(sym.kv_create(), PROMPT, 6, sampler=sampler, max_tokens=10)]
    assert anyio.run(main) == expected


def test_several_of_nothing_are_refused():
    kv = sym.kv_create()
    for wrong in (0, -1, 257):
        with pytest.raises(sym.Invalid, match="n="):
            sym.generate_n(kv, PROMPT, wrong)
    with pytest.raises(sym.Invalid, match="no tokens"):
        sym.generate_n(kv, [], 2)
    with pytest.raises(sym.Invalid, match="logprobs"):
        sym.generate_n(kv, [1], 2, logprobs=-1)
