"""`generate` is the loop over `pred`, token for token, with all options, in threads and in event loops."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

import libsym as sym

pytestmark = pytest.mark.usefixtures("shared")

VOCAB_SIZE = 259
EOS = 257
PROMPT = list(b"the cat sat on the mat; the cat sat on the ")
WARM = sym.Sampler(temperature=20.0)

SAMPLERS = {
    "greedy": sym.Sampler.greedy(),
    "temperature": sym.Sampler(temperature=0.7),
    "greedy with penalties": sym.Sampler(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5),
    "all": sym.Sampler(
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={101: 2.0},
    ),
    "DRY": sym.Sampler(temperature=0.5, dry=sym.Dry(multiplier=3.0, base=1.2, allowed_length=1)),
    "mirostat 1": sym.Sampler(mirostat=sym.Mirostat(1, tau=2.0, eta=0.4)),
    "mirostat 2": sym.Sampler(mirostat=sym.Mirostat(2, tau=2.0, eta=0.4)),
    "shaped": sym.Sampler(
        typical_p=0.95,
        penalty_window=20,
        repetition_penalty=1.2,
        dry=sym.Dry(window=50, breakers=[" "]),
        mirostat=sym.Mirostat(tau=3.0, eta=0.5),
    ),
}


@pytest.fixture
def run(backend):
    return lambda main: anyio.run(main, backend=backend)


def generate(**how):
    return sym.generate(sym.kv_create(), PROMPT, **how)


def loop(kv, tokens, sampler, seed, max_tokens, stop=(EOS,)):
    """Return the tokens that `generate` has to equal, from a loop over `pred`."""
    draws, pending = replace(sampler, seed=seed).start(before=tokens), list(tokens)
    made: list[int] = []
    while len(made) < max_tokens:
        token = draws.draw(sym.pred(kv, pending))
        if token in stop:
            break
        made.append(token)
        pending = [token]
    return made


def check_file(kv, generation, tokens=PROMPT):
    """The file holds what was given and generated but for what is pending."""
    held, positions = sym.kv_read(kv)
    assert held + generation.pending == [*tokens, *generation.tokens]
    assert positions == list(range(len(held)))


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, sym.Ngram(max_tokens=3, min_match=1)], ids=["plain", "ngram"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_it_gives_what_the_loop_over_pred_gives(sampler, draft):
    """Drafts leave no trace in the file: what is computed on top of it is bit for bit the same."""
    by_hand, kv = sym.kv_create(), sym.kv_create()
    expected = loop(by_hand, PROMPT, sampler, 7, 60)
    generation = sym.generate(kv, PROMPT, sampler=sampler, seed=7, max_tokens=60, draft=draft)
    assert list(generation) == expected
    assert generation.seed == 7
    assert sym.kv_read(kv) == sym.kv_read(by_hand)
    check_file(kv, generation)
    assert bytes(sym.pred(kv, [7]).logits) == bytes(sym.pred(by_hand, [7]).logits)


def test_what_goes_on_with_the_number_of_its_draw_is_one_sequence():
    how: dict[str, Any] = {"sampler": replace(WARM, seed=5), "stop_at_end": False}
    whole, kv = list(generate(max_tokens=30, **how)), sym.kv_create()
    first = list(sym.generate(kv, PROMPT, max_tokens=10, **how))
    [row] = sym.pred(kv, first[-1:], rows="all", sampler=how["sampler"], first_draw=10)
    rest = sym.generate(kv, [row.token], max_tokens=19, first_draw=11, **how)
    assert [*first, row.token, *rest] == whole
    with pytest.raises(sym.Invalid, match="give a sampler"):
        sym.pred(kv, [65], first_draw=3)


def test_a_row_that_is_drawn_from_sees_the_repetitions_of_what_was_given():
    prone = sym.Sampler(temperature=0, logit_bias={ord("m"): 90.0})  # as behind the first "the "
    sampler = replace(prone, dry=sym.Dry(multiplier=1000.0))
    [first] = generate(sampler=sampler, max_tokens=1)
    drawn = [sym.pred(sym.kv_create(), PROMPT, sampler=each).token for each in (prone, sampler)]
    assert drawn == [ord("m"), first]
    assert first != ord("m")
    unheard = replace(sampler, dry=sym.Dry(breakers=["a", "no such token"]))
    for call in (sym.pred, lambda *words, **how: list(sym.generate(*words, **how))):
        with pytest.raises(sym.Invalid, match="the breaker 'no such token' is in no token of the model"):
            call(sym.kv_create(), PROMPT, sampler=unheard)


def test_without_a_seed_one_is_chosen_that_gives_the_same_again():
    first = generate(sampler=WARM, max_tokens=30)
    tokens = list(first)
    assert list(generate(sampler=WARM, seed=first.seed, max_tokens=30)) == tokens
    assert list(generate(sampler=replace(WARM, seed=first.seed), max_tokens=30)) == tokens
    assert len({first.seed, *(generate(sampler=WARM, max_tokens=1).seed for _ in range(4))}) == 5


def test_positions_are_those_that_are_given_and_numbers_of_numpy_are_numbers():
    one: Any = np.int64(1)
    kv, how = sym.kv_create(), {"stop": one * EOS, "draft": sym.Ngram(one * 4, one), "seed": one, "priority": one}
    drafted = sym.generate(kv, np.array(PROMPT), max_tokens=one * 20, positions=one, **how)
    assert list(drafted) == list(generate(max_tokens=20, positions=1))
    assert sym.kv_read(kv)[1] == list(range(1, len(PROMPT) + 20))


# ---- several from one text


def test_several_go_on_from_one_text_that_is_computed_once_with_seeds_that_are_no_sum(run):
    sampler = sym.Sampler(temperature=9, repetition_penalty=1.2, seed=11)
    kv, before = sym.kv_create(), sym.getrusage().tokens
    answers = sym.generate_n(kv, PROMPT, 4, sampler=sampler, max_tokens=8)
    found = [list(answer) for answer in answers]
    assert sym.getrusage().tokens - before <= len(PROMPT) + 4 * 8
    assert len({tuple(each) for each in found}) == 4, "each has a seed of its own"
    assert kv.len() == len(PROMPT) - 1
    for answer, tokens in zip(answers, found, strict=True):
        assert list(generate(sampler=sampler, seed=answer.seed, max_tokens=8)) == tokens, "as if it were alone"
        check_file(answer.kv, answer)
    assert answers[0].seed == 11
    others = sym.generate_n(sym.kv_create(), PROMPT, 2, sampler=sampler, seed=12, max_tokens=1)
    assert {answer.seed for answer in answers}.isdisjoint(answer.seed for answer in others)

    async def in_a_loop():
        answers = await sym.aio.generate_n(await sym.aio.kv_create(), PROMPT, 2, sampler=sampler, max_tokens=8)
        return [[token async for token in answer] for answer in answers]

    assert run(in_a_loop) == found[:2]


# ---- how it ends


def test_a_stop_token_is_neither_given_out_nor_in_the_file():
    kv, sampler = sym.kv_create(), SAMPLERS["temperature"]
    free = loop(sym.kv_create(), PROMPT, sampler, 3, 40, stop=())
    stop = free[20]
    generation = sym.generate(kv, PROMPT, sampler=sampler, seed=3, max_tokens=40, stop=[stop], stop_at_end=False)
    assert list(generation) == free[: free.index(stop)]
    assert (generation.finish, generation.stopped_by, generation.pending) == ("stop_token", stop, [])
    check_file(kv, generation)


def test_the_models_end_token_stops_it_unless_told_otherwise():
    always_end = sym.Sampler(temperature=0, logit_bias={EOS: 1e6})
    generation = generate(sampler=always_end, max_tokens=3)
    assert (list(generation), generation.finish, generation.stopped_by) == ([], "stop_token", EOS)
    generation = generate(sampler=always_end, max_tokens=3, stop_at_end=False)
    assert (list(generation), generation.finish, generation.stopped_by) == ([EOS] * 3, "length", None)
    assert generation.pending == [EOS]


def test_a_stop_text_ends_it_and_is_not_in_the_text(run):
    kv, grammar = sym.kv_create(), sym.Grammar.regex("na[ïi]ve w[o0]rld[.] END of it")
    how: dict[str, Any] = {"grammar": grammar, "stop": ["xyz", "END"]}
    generation = sym.generate(kv, PROMPT, **how)
    text = generation.full_text()
    assert text in {f"na{i}ve w{o}rld. " for i in "ïi" for o in "o0"}
    assert (generation.finish, generation.stopped_by, generation.is_complete) == ("stop_text", "END", False)
    assert bytes(generation.tokens).endswith(b". END")
    check_file(kv, generation)

    async def in_a_loop():
        twin = await sym.aio.generate(await sym.aio.kv_create(), PROMPT, **how)
        return "".join([piece async for piece in twin.text()]), twin.finish, twin.stopped_by

    assert run(in_a_loop) == (text, "stop_text", "END")


def test_text_comes_in_pieces_of_whole_characters_and_what_might_begin_a_stop_text_in_the_end():
    generation = generate(grammar=sym.Grammar.regex("na[ïi]ve … [€$]uro EN[D]?[.]"), stop="ENDE")
    pieces = list(generation.text())
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).encode() == bytes(generation.tokens)
    assert "".join(generation.text()) == "".join(pieces)  # again from the beginning
    assert (generation.finish, generation.is_complete) == ("grammar", True)


# ---- grammars


def tokenizer():
    class Bytes:
        is_tokenizer_wrapper = True
        eos_token_id, bos_token_id = EOS, 256
        tokens = sym.vocabulary()
        special_token_ids = (256, 257, 258)

        def __call__(self, text):
            return list(text.encode() if isinstance(text, str) else text)

    wrapper: Any = Bytes()  # has what a TokenizerWrapper has
    return LLTokenizer(wrapper, n_vocab=VOCAB_SIZE, eos_token=EOS)


def grammar_loop(kv, tokens, sampler, seed, matcher, max_tokens):
    """The loop over `pred` with llguidance as a program would use it."""
    draws, pending = replace(sampler, seed=seed).start(before=tokens), list(tokens)
    made: list[int] = []
    words = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    while True:
        fill_next_token_bitmask(matcher, words)
        token = draws.draw(sym.pred(kv, pending), allowed=words.tobytes())
        if token == EOS:
            return made
        assert matcher.consume_token(token)
        forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        assert matcher.consume_tokens(forced)
        for each in forced[: max_tokens - len(made) - 1]:
            draws.note(each)
        pending = [token, *forced]
        made += pending
        if matcher.is_stopped() or len(made) >= max_tokens:
            return made[:max_tokens]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[sym.Grammar, Any]] = {
    "json": (sym.Grammar.json(SCHEMA), LLMatcher.grammar_from_json_schema),
    "regex": (sym.Grammar.regex("(yes|no|maybe), [a-f]{3,8}( and so on)?"), LLMatcher.grammar_from_regex),
    "lark": (
        sym.Grammar.lark('start: sum\nsum: NUMBER ("+" NUMBER)+ "=" NUMBER\nNUMBER: /[0-9]{1,3}/\n'),
        LLMatcher.grammar_from_lark,
    ),
}


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("sampler", ["temperature", "shaped"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_with_a_grammar_it_gives_what_the_loop_with_llguidance_gives(name, sampler, draft):
    grammar, compile_grammar = GRAMMARS[name]
    matcher = LLMatcher(tokenizer(), compile_grammar(grammar.source))
    by_hand, kv = sym.kv_create(), sym.kv_create()
    how: dict[str, Any] = {"seed": 11, "max_tokens": 80}
    expected = grammar_loop(by_hand, PROMPT, SAMPLERS[sampler], matcher=matcher, **how)
    generation = sym.generate(kv, PROMPT, sampler=SAMPLERS[sampler], grammar=grammar, draft=draft, **how)
    assert list(generation) == expected
    assert sym.kv_read(kv) == sym.kv_read(by_hand)
    check_file(kv, generation)


# ---- how likely its tokens were


@pytest.mark.parametrize(("top", "draft"), [(0, "ngram"), (1, None), (7, "ngram")])
def test_each_token_has_the_numbers_of_the_row_that_it_was_drawn_from(top, draft):
    how = {"sampler": sym.Sampler(temperature=6, frequency_penalty=0.5, seed=3), "max_tokens": 24, "draft": draft}
    generation = generate(logprobs=top, **how)
    tokens = list(generation)
    assert tokens == list(generate(**how)) == [dist.token for dist in generation.dists]
    rows = sym.pred(sym.kv_create(), PROMPT + tokens[:-1], rows="all")
    for found, dist in zip(generation.dists, list(rows)[len(PROMPT) - 1 :], strict=True):
        assert 0 >= found.logprob(found.token) == pytest.approx(dist.logprob(found.token), abs=1e-4)
        assert found.entropy() == pytest.approx(dist.entropy(), abs=1e-4)
        if top:
            assert found.topk(top).tokens == dist.topk(top).tokens
            assert found.topk(top).logprobs == pytest.approx(dist.topk(top).logprobs, abs=1e-4)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_tokens_that_a_grammar_forces_have_none(draft):
    generation = generate(grammar=sym.Grammar.regex("(yes|no), it (is|was) so"), logprobs=2, draft=draft)
    text = generation.full_text()
    assert len(generation.dists) == len(generation.tokens) == len(text)
    drawn = [dist is not None for dist in generation.dists]
    assert drawn[0], "yes or no"
    assert not any(drawn[1 : text.index("it ") + 3])
    assert all(dist.token == token for dist, token in zip(generation.dists, generation.tokens, strict=True) if dist)


def test_a_stop_token_has_no_place_among_them_and_a_stop_text_has():
    tokens = list(generate(max_tokens=4))
    stopped = generate(stop=tokens[-1], logprobs=0)
    assert len(list(stopped)) == len(stopped.dists) == tokens.index(tokens[-1])
    by_text = generate(stop=bytes(tokens[:2]).decode(), max_tokens=9, logprobs=0)
    assert len(list(by_text)) == len(by_text.dists) == 2


@pytest.mark.slow
def test_a_program_that_does_not_read_has_all_of_them_in_the_end_and_delays_nobody():
    """The ring is full long before the end, so the daemon keeps tokens, and draws by itself."""
    how = {"sampler": sym.Sampler(seed=5), "max_tokens": 1500, "stop_at_end": False}
    generation = generate(logprobs=100, **how)
    expected = list(generate(**how))
    assert list(generation) == expected == [dist.token for dist in generation.dists]
    assert all(len(dist.topk(100)) == 100 and math.isfinite(dist.logprob(dist.token)) for dist in generation.dists)


def test_an_interrupt_leaves_as_many_distributions_as_tokens(monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("libsym.calls.generate.drawn_dists", interrupted)
    generation = generate(max_tokens=5, logprobs=2)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert ": 0 tokens," in repr(generation)
    assert generation.dists == []


# ---- beside others


@pytest.mark.parametrize("how", ["threads", "trio"])
def test_many_threads_and_tasks_generate_at_once(how):
    def given(number):
        return {"sampler": SAMPLERS["temperature"], "seed": number % 8, "max_tokens": 40, "logprobs": 0}

    def in_a_thread(number):
        kv = sym.kv_create()
        generation = sym.generate(kv, PROMPT, **given(number))
        made[number] = list(generation)
        check_file(kv, generation)

    async def in_a_task(number):
        async with await sym.aio.kv_create() as kv:
            generation = await sym.aio.generate(kv, PROMPT, **given(number))
            made[number] = [token async for token in generation]
            assert made[number] == generation.tokens == [dist and dist.token for dist in generation.dists]
            assert (await sym.aio.kv_read(kv))[0] + generation.pending == PROMPT + made[number]

    async def main():
        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(in_a_task, number)

    expected = [loop(sym.kv_create(), PROMPT, SAMPLERS["temperature"], seed, 40) for seed in range(8)]
    made: dict[int, list[int]] = {}
    if how == "threads":
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(in_a_thread, range(32)))
    else:
        anyio.run(main, backend=how)
    assert made == {number: expected[number % 8] for number in range(32)}


# ---- arguments

YAML: Any = ("yaml", "a: b")
WRONG: list[dict[str, Any]] = [
    *({"max_tokens": wrong} for wrong in (0, -1, 1.5)),
    *({"stop": wrong} for wrong in ([""], [1.5], 1.5, b"END", [VOCAB_SIZE], [-1], ["x"] * 65, "half \ud800")),
    *({"logprobs": wrong} for wrong in (-1, 257, 1.5, True, "5")),
    {"grammar": "{}"},
    {"grammar": sym.Grammar(*YAML)},
    {"draft": "clever"},
    {"priority": 101},
    {"positions": [1, 2]},
    {"seed": 1.5},
    {"first_draw": -1},
    {"sampler": sym.Sampler(logit_bias={VOCAB_SIZE: 1.0})},
]
WORDS = {"logprobs": "logprobs=", "first_draw": "first_draw=-1"}


def test_what_is_out_of_range_is_invalid_and_appends_nothing(run):
    kv = sym.kv_create()
    for wrong in WRONG:
        with pytest.raises(sym.Invalid, match=WORDS.get(next(iter(wrong)), ".")):
            list(sym.generate(kv, PROMPT, **wrong))
        assert len(kv) == 0, wrong
    with pytest.raises(sym.Invalid, match=str(2**63)):
        generate(max_tokens=2**63)
    with pytest.raises(sym.Invalid, match="give generate"):
        _ = generate(max_tokens=1).dists
    several: list[tuple[list[int], int, int | None, str]] = [
        *((PROMPT, count, None, "n=") for count in (0, -1, 257)),
        *(([], 2, None, "no tokens"), ([1], 2, -1, "logprobs")),
    ]
    for tokens, count, logprobs, words in several:
        with pytest.raises(sym.Invalid, match=words):
            sym.generate_n(sym.kv_create(), tokens, count, logprobs=logprobs)

    async def in_a_loop():
        with pytest.raises(sym.Invalid, match="unclosed"):
            await sym.aio.generate(await sym.aio.kv_create(), PROMPT, grammar=sym.Grammar.regex("("))

    run(in_a_loop)
