"""`generate` is the loop over `pred`, token for token, with all options; and the ends of a generation."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

import libsym as sym

VOCAB_SIZE = 259
EOS = 257
PROMPT = list(b"the cat sat on the mat; the cat sat on the ")

SAMPLERS = {
    "greedy": sym.Sampler.greedy(),
    "temperature": sym.Sampler(temperature=0.7),
    "top_k": sym.Sampler(temperature=1.3, top_k=20),
    "top_p": sym.Sampler(top_p=0.8),
    "min_p": sym.Sampler(min_p=0.05),
    "repetition penalty": sym.Sampler(repetition_penalty=1.3),
    "presence and frequency penalties": sym.Sampler(presence_penalty=0.6, frequency_penalty=0.4),
    "greedy with penalties": sym.Sampler(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5),
    "bias": sym.Sampler(logit_bias={97: 5.0, 98: -3.0, 105: float("-inf")}),
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
    "typical": sym.Sampler(typical_p=0.7),
    "window": sym.Sampler(penalty_window=8, repetition_penalty=1.4, presence_penalty=0.5),
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


@pytest.fixture(autouse=True)
def connected(daemon):
    sym.connect(daemon.socket)
    yield
    sym.connect(daemon.socket)
    assert sym.daemon_check()["num_locked_files"] == 0
    sym.close()


def loop(kv, tokens, sampler, seed, max_tokens, stop=(EOS,)):
    """Return the tokens that `generate` has to equal, from a loop over `pred`."""
    draws, pending, made = replace(sampler, seed=seed).start(before=tokens), list(tokens), []
    while len(made) < max_tokens:
        token = draws.draw(sym.pred(kv, pending))
        if token in stop:
            break
        made.append(token)
        pending = [token]
    return made


def check_file(kv, tokens, generation):
    """The file holds what was given and generated but for what is pending."""
    all_tokens = [*tokens, *generation.tokens]
    num_pending = len(generation.pending)
    assert generation.pending == all_tokens[len(all_tokens) - num_pending :]
    assert sym.kv_read(kv) == (all_tokens[: len(all_tokens) - num_pending], list(range(len(all_tokens) - num_pending)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft", [None, "ngram", sym.Ngram(max_tokens=3, min_match=1)], ids=["plain", "ngram", "short"]
)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_it_gives_what_the_loop_over_pred_gives(sampler, draft):
    by_hand, kv = sym.kv_create(), sym.kv_create()
    expected = loop(by_hand, PROMPT, sampler, 7, 60)
    generation = sym.generate(kv, PROMPT, sampler=sampler, seed=7, max_tokens=60, draft=draft)
    assert list(generation) == expected
    assert generation.seed == 7
    assert sym.kv_read(kv) == sym.kv_read(by_hand)
    check_file(kv, PROMPT, generation)


def test_the_rows_after_it_are_those_of_the_loop():
    """Drafts leave no trace in the file: what is computed on top of it is bit for bit the same."""
    by_hand, kv = sym.kv_create(), sym.kv_create()
    loop(by_hand, PROMPT, SAMPLERS["greedy"], 0, 40)
    generation = sym.generate(kv, PROMPT, max_tokens=40, draft="ngram")
    list(generation)
    assert bytes(sym.pred(kv, generation.pending).logits) == bytes(sym.pred(by_hand, generation.pending).logits)


def test_it_goes_on_where_it_ended():
    kv, whole = sym.kv_create(), sym.kv_create()
    first = sym.generate(kv, PROMPT, max_tokens=10)
    list(first)
    second = sym.generate(kv, first.pending, max_tokens=10)
    assert [*first.tokens, *second] == loop(whole, PROMPT, SAMPLERS["greedy"], 0, 20)
    assert sym.kv_read(kv) == sym.kv_read(whole)


def test_what_goes_on_with_the_number_of_its_draw_is_one_sequence():
    tokens, warm = sym.tokenize("Once"), sym.Sampler(temperature=20.0, seed=5)
    whole = list(sym.generate(sym.kv_create(), tokens, sampler=warm, max_tokens=30, stop_at_end=False))
    kv = sym.kv_create()
    first = list(sym.generate(kv, tokens, sampler=warm, max_tokens=10, stop_at_end=False))
    [row] = sym.pred(kv, first[-1:], rows="all", sampler=warm, first_draw=10)
    rest = sym.generate(kv, [row.token], sampler=warm, max_tokens=19, stop_at_end=False, first_draw=11)
    assert [*first, row.token, *rest] == whole
    with pytest.raises(sym.errors.Invalid, match="first_draw=-1"):
        sym.generate(kv, [65], first_draw=-1)
    with pytest.raises(sym.errors.Invalid, match="give a sampler"):
        sym.pred(kv, [65], first_draw=3)


def test_a_row_that_is_drawn_from_sees_the_repetitions_of_what_was_given():
    kv, prone = sym.kv_create(), sym.Sampler(temperature=0, logit_bias={ord("m"): 90.0})  # as behind the first "the "
    sampler = replace(prone, dry=sym.Dry(multiplier=1000.0))
    [first] = sym.generate(kv, PROMPT, sampler=sampler, max_tokens=1)
    drawn = [sym.pred(sym.kv_create(), PROMPT, sampler=each).token for each in (prone, sampler)]
    assert drawn == [ord("m"), first]
    assert first != ord("m")
    unheard = replace(sampler, dry=sym.Dry(breakers=["a", "no such token"]))
    for call in (lambda: sym.pred(kv, PROMPT, sampler=unheard), lambda: list(sym.generate(kv, [65], sampler=unheard))):
        with pytest.raises(sym.Invalid, match="the breaker 'no such token' is in no token of the model"):
            call()


def test_answers_of_several_draw_with_seeds_of_their_own_that_are_no_sum():
    def answers(seed):
        started = sym.generate_n(sym.kv_create(), tokens, 4, sampler=warm, seed=seed, max_tokens=20)
        return [(answer.seed, list(answer)) for answer in started]

    tokens, warm = sym.tokenize("Once"), sym.Sampler(temperature=20.0)
    found = answers(5)
    assert found[0][0] == 5
    assert len({tuple(drawn) for _, drawn in found}) == 4
    assert {seed for seed, _ in found[1:]}.isdisjoint(seed for seed, _ in answers(6))
    for seed, drawn in found:
        assert list(sym.generate(sym.kv_create(), tokens, sampler=warm, seed=seed, max_tokens=20)) == drawn


def test_without_a_seed_one_is_chosen_that_gives_the_same_again():
    sampler = sym.Sampler(temperature=1.5)
    first = sym.generate(sym.kv_create(), PROMPT, sampler=sampler, max_tokens=30)
    tokens = list(first)
    assert list(sym.generate(sym.kv_create(), PROMPT, sampler=sampler, seed=first.seed, max_tokens=30)) == tokens
    others = [sym.generate(sym.kv_create(), PROMPT, sampler=sampler, max_tokens=30).seed for _ in range(4)]
    assert len({first.seed, *others}) == 5
    seeded = replace(sampler, seed=first.seed)
    assert list(sym.generate(sym.kv_create(), PROMPT, sampler=seeded, max_tokens=30)) == tokens


def test_positions_are_those_that_are_given():
    kv = sym.kv_create()
    generation = sym.generate(kv, [1, 2, 3], positions=10, max_tokens=3)
    list(generation)
    assert sym.kv_read(kv)[1] == [10, 11, 12, 13, 14]


# ---- how it ends


def test_it_ends_after_max_tokens():
    generation = sym.generate(sym.kv_create(), PROMPT, max_tokens=5)
    assert len(list(generation)) == 5
    assert (generation.finish, generation.stopped_by, len(generation.pending)) == ("length", None, 1)


def test_without_max_tokens_it_fills_the_context():
    kv, limit = sym.kv_create(), sym.model_info().max_positions
    generation = sym.generate(kv, [65], positions=limit - 20, stop_at_end=False)
    assert len(list(generation)) == 20  # the last one needs no position: it is not computed
    assert generation.finish == "length"
    assert len(kv) == 20


def test_a_stop_token_is_neither_given_out_nor_in_the_file():
    kv, by_hand = sym.kv_create(), sym.kv_create()
    sampler = SAMPLERS["temperature"]
    free = loop(by_hand, PROMPT, sampler, 3, 40, stop=())
    stop = free[20]
    generation = sym.generate(kv, PROMPT, sampler=sampler, seed=3, max_tokens=40, stop=[stop], stop_at_end=False)
    assert list(generation) == free[: free.index(stop)]
    assert (generation.finish, generation.stopped_by, generation.pending) == ("stop_token", stop, [])
    check_file(kv, PROMPT, generation)


def test_the_models_end_token_stops_it_unless_told_otherwise():
    always_end = sym.Sampler(temperature=0, logit_bias={EOS: 1e6})
    generation = sym.generate(sym.kv_create(), PROMPT, sampler=always_end, max_tokens=3)
    assert (list(generation), generation.finish, generation.stopped_by) == ([], "stop_token", EOS)
    generation = sym.generate(sym.kv_create(), PROMPT, sampler=always_end, max_tokens=3, stop_at_end=False)
    assert (list(generation), generation.finish) == ([EOS] * 3, "length")


def test_a_stop_text_ends_it_and_is_not_in_the_text():
    kv = sym.kv_create()
    grammar = sym.Grammar.regex("Hello, w[o0]rld[.] END of it")
    generation = sym.generate(kv, PROMPT, grammar=grammar, stop=["xyz", "END"])
    assert "".join(generation.text()) in {"Hello, world. ", "Hello, w0rld. "}
    assert (generation.finish, generation.stopped_by) == ("stop_text", "END")
    assert bytes(generation.tokens).endswith(b". END")
    check_file(kv, PROMPT, generation)


def test_text_comes_in_pieces_of_whole_characters():
    generation = sym.generate(sym.kv_create(), PROMPT, grammar=sym.Grammar.regex("na[ïi]ve … [€$]uro [ab]"))
    pieces = list(generation.text())
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).encode() == bytes(generation.tokens)
    assert "".join(generation.text()) == "".join(pieces)  # again from the beginning


def test_what_might_begin_a_stop_text_is_held_back_and_comes_in_the_end():
    generation = sym.generate(sym.kv_create(), PROMPT, grammar=sym.Grammar.regex("say EN[D]?[.]"), stop="ENDE")
    assert "".join(generation.text()) in {"say EN.", "say END."}
    assert generation.finish == "grammar"


def test_cancelled_in_the_middle_it_leaves_a_file_that_goes_on():
    kv = sym.kv_create()
    generation = sym.generate(kv, PROMPT, stop_at_end=False)
    for _ in range(5):
        next(generation)
    generation.cancel()
    rest = list(generation)
    assert generation.finish == "cancelled"
    assert len(generation.tokens) == 5 + len(rest) < sym.model_info().max_positions - len(PROMPT)
    check_file(kv, PROMPT, generation)
    following = sym.generate(kv, generation.pending, max_tokens=10)
    expected = loop(sym.kv_create(), PROMPT, SAMPLERS["greedy"], 0, len(generation.tokens) + 10, stop=())
    assert [*generation.tokens, *following] == expected


def test_a_with_block_and_an_object_that_is_dropped_cancel_it():
    kv = sym.kv_create()
    with sym.generate(kv, PROMPT, stop_at_end=False) as generation:
        next(generation)
    sym.kv_write(kv, [1])  # does not wait for a context full of tokens
    assert len(kv) < sym.model_info().max_positions
    other = sym.kv_create()
    dropped = sym.generate(other, PROMPT, stop_at_end=False)
    next(dropped)
    del dropped
    sym.kv_write(other, [1])
    assert len(other) < sym.model_info().max_positions


# ---- grammars


def tokenizer():
    class Bytes:
        is_tokenizer_wrapper = True
        eos_token_id, bos_token_id = EOS, 256
        tokens = sym.vocabulary()
        special_token_ids = (256, 257, 258)

        def __call__(self, text):
            return list(text.encode() if isinstance(text, str) else text)

    return LLTokenizer(Bytes(), n_vocab=VOCAB_SIZE, eos_token=EOS)


def grammar_loop(kv, tokens, sampler, seed, matcher, max_tokens):
    """The loop over `pred` with llguidance as a program would use it."""
    draws, pending, made = replace(sampler, seed=seed).start(before=tokens), list(tokens), []
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


GRAMMARS = {
    "json": (
        sym.Grammar.json(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "large"]}},
                "required": ["name", "size"],
                "additionalProperties": False,
            }
        ),
        LLMatcher.grammar_from_json_schema,
    ),
    "regex": (sym.Grammar.regex("(yes|no|maybe), [a-f]{3,8}( and so on)?"), LLMatcher.grammar_from_regex),
    "lark": (
        sym.Grammar.lark('start: sum\nsum: NUMBER ("+" NUMBER)+ "=" NUMBER\nNUMBER: /[0-9]{1,3}/\n'),
        LLMatcher.grammar_from_lark,
    ),
}


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("sampler", ["greedy", "temperature", "all", "shaped"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_with_a_grammar_it_gives_what_the_loop_with_llguidance_gives(name, sampler, draft):
    grammar, compile_grammar = GRAMMARS[name]
    matcher = LLMatcher(tokenizer(), compile_grammar(grammar.source))
    by_hand, kv = sym.kv_create(), sym.kv_create()
    expected = grammar_loop(by_hand, PROMPT, SAMPLERS[sampler], 11, matcher, 80)
    generation = sym.generate(
        kv, PROMPT, sampler=SAMPLERS[sampler], seed=11, grammar=grammar, max_tokens=80, draft=draft
    )
    assert list(generation) == expected
    assert sym.kv_read(kv) == sym.kv_read(by_hand)
    check_file(kv, PROMPT, generation)


def test_a_generation_that_ends_in_the_middle_of_a_schema_is_not_complete():
    grammar = sym.Grammar.json({"const": {"a": "END", "b": 2}}, compact=True)
    ends = []
    for options in ({"max_tokens": 5}, {"stop": "END"}, {}):
        generation = sym.generate(sym.kv_create(), PROMPT, grammar=grammar, **options)
        list(generation)
        ends.append((generation.finish, generation.is_complete))
    assert ends == [("length", False), ("stop_text", False), ("grammar", True)]


def test_any_compact_json_may_be_asked_for_without_a_schema():
    warm = sym.Sampler(temperature=3.0, seed=1, logit_bias={ord("}"): 9.0, ord('"'): 9.0})
    text = "".join(sym.generate(sym.kv_create(), [65], grammar=sym.Grammar.json(compact=True), sampler=warm).text())
    assert isinstance(json.loads(text), dict | list | str | int | float | bool | None), text
    assert json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False).count(" ") == text.count(" ")


def test_what_a_grammar_forces_takes_no_steps():
    before = sym.daemon_stat()["num_steps"]
    generation = sym.generate(
        sym.kv_create(), PROMPT, grammar=sym.Grammar.regex("a long text that leaves no choice at all[.!]")
    )
    assert len(list(generation)) == 41
    assert generation.finish == "grammar"
    # The prompt; what was drawn first; what is forced; and what was drawn last, before it was known to be the end.
    assert sym.daemon_stat()["num_steps"] - before <= 4


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (sym.Grammar.regex("("), "unclosed"),
        (sym.Grammar.json({"type": "frob"}), "frob"),
        (sym.Grammar.lark("start: nothing"), "nothing"),
        (sym.Grammar("yaml", "a: b"), "yaml"),
    ],
)
def test_a_grammar_that_is_none_is_invalid_and_nothing_is_appended(grammar, words):
    kv = sym.kv_create()
    with pytest.raises(sym.Invalid, match=words):
        list(sym.generate(kv, PROMPT, grammar=grammar))
    assert len(kv) == 0


def test_a_grammar_that_costs_too_much_ends_its_own_generation():
    source = "start: a\na: a a | a a a | LETTER | LETTER a\nLETTER: /x/\n"
    kv, other = sym.kv_create(), sym.kv_create()
    generation = sym.generate(kv, PROMPT, grammar=sym.Grammar.lark(source), sampler=sym.Sampler(logit_bias={EOS: -1e9}))
    beside = sym.generate(other, PROMPT, max_tokens=300, stop_at_end=False)
    with pytest.raises(sym.Invalid, match="grammar"):
        list(generation)
    assert set(generation.tokens) == {ord("x")}
    assert len(list(beside)) == 300
    check_file(kv, PROMPT, generation)


# ---- beside others


def test_calls_on_the_file_wait_for_its_end():
    kv = sym.kv_create()
    generation = sym.generate(kv, PROMPT, max_tokens=50, stop_at_end=False)
    assert sym.kv_write(kv, [1, 2]) == len(PROMPT) + 49 + 2
    assert len(list(generation)) == 50
    assert generation.finish == "length"


def test_a_fork_of_a_file_that_generates_is_a_consistent_beginning_of_it():
    kv = sym.kv_create()
    generation = sym.generate(kv, PROMPT, max_tokens=400, stop_at_end=False)
    forks = []
    for _ in range(10):
        next(generation)
        forks.append(sym.kv_fork(kv))
    tokens = [*PROMPT, *generation.tokens, *generation]
    for fork in forks:
        inside, _ = sym.kv_read(fork)
        assert inside == tokens[: len(inside)]
        again = sym.kv_create()
        sym.kv_write(again, inside)
        assert bytes(sym.pred(fork, [7]).logits) == bytes(sym.pred(again, [7]).logits)


@pytest.mark.slow
def test_a_pool_that_runs_dry_in_the_middle_is_an_error_after_the_tokens(start_daemon):
    small = start_daemon("--model", "tiny", "--kv-memory", "256K")
    sym.connect(small.socket)
    kv = sym.kv_create()
    generation = sym.generate(kv, [65], stop_at_end=False)
    with pytest.raises(sym.NoSpace):
        list(generation)
    assert len(generation.tokens) > 32
    check_file(kv, [65], generation)
    sym.kv_truncate(kv, 10)
    assert sym.pred(kv, [1]).argmax() >= 0


@pytest.mark.slow
def test_a_daemon_that_dies_in_the_middle_is_an_error_and_no_wait(start_daemon):
    mortal = start_daemon("--model", "tiny", "--kv-memory", "64M")
    sym.connect(mortal.socket)
    kv = sym.kv_create()
    generation = sym.generate(kv, [65], stop_at_end=False)
    next(generation)
    mortal.process.kill()
    with pytest.raises(sym.NotConnected):
        list(generation)


def test_many_threads_generate_at_once():
    expected = {seed: loop(sym.kv_create(), PROMPT, SAMPLERS["temperature"], seed, 40) for seed in range(8)}

    def generated(number):
        kv = sym.kv_create()
        generation = sym.generate(kv, PROMPT, sampler=SAMPLERS["temperature"], seed=number % 8, max_tokens=40)
        tokens = list(generation)
        check_file(kv, PROMPT, generation)
        return tokens

    with ThreadPoolExecutor(32) as threads:
        made = list(threads.map(generated, range(32)))
    assert made == [expected[number % 8] for number in range(32)]


def test_generations_that_were_begun_together_run_together():
    before = sym.daemon_stat()["num_steps"]
    generations = [sym.generate(sym.kv_create(), PROMPT, max_tokens=400, stop_at_end=False) for _ in range(16)]
    assert len({tuple(generation) for generation in generations}) == 1
    assert sym.daemon_stat()["num_steps"] - before < 16 * 400 / 2


def test_a_reader_that_stops_loses_nothing_and_delays_nobody():
    kv = sym.kv_create()
    sleepy = sym.generate(kv, PROMPT, max_tokens=3000, stop_at_end=False)
    next(sleepy)
    for _ in range(20):
        sym.pred(sym.kv_create(), [1])
    assert len(list(sleepy)) == 2999
    check_file(kv, PROMPT, sleepy)


# ---- arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"stop": [""]},
        {"stop": [1.5]},
        {"stop": 1.5},
        {"stop": b"END"},
        {"stop": [VOCAB_SIZE]},
        {"stop": [-1]},
        {"stop": ["x"] * 65},
        {"stop": "half \ud800"},
        {"grammar": "{}"},
        {"draft": "clever"},
        {"priority": 101},
        {"positions": [1, 2]},
        {"seed": 1.5},
        {"sampler": sym.Sampler(logit_bias={VOCAB_SIZE: 1.0})},
    ],
)
def test_what_is_out_of_range_is_invalid_and_appends_nothing(wrong):
    kv = sym.kv_create()
    with pytest.raises(sym.Invalid):
        list(sym.generate(kv, PROMPT, **wrong))
    assert len(kv) == 0


def test_what_is_no_number_of_64_bits_is_named():
    with pytest.raises(sym.Invalid, match=str(2**63)):
        sym.generate(sym.kv_create(), PROMPT, max_tokens=2**63)


def test_numbers_of_numpy_are_numbers():
    one = np.int64(1)
    drafted = sym.generate(
        sym.kv_create(),
        np.array(PROMPT),
        max_tokens=one * 20,
        stop=one * EOS,
        draft=sym.Ngram(one * 4, one),
        seed=one,
        priority=one,
        positions=one,
    )
    assert list(drafted) == list(sym.generate(sym.kv_create(), PROMPT, max_tokens=20, positions=1))


def test_a_file_that_is_open_for_reading_generates_nothing():
    sym.kv_create("read.kv").close()
    with pytest.raises(sym.NoAccess):
        list(sym.generate(sym.kv_open("read.kv"), PROMPT))
    sym.kv_remove("read.kv")


def test_one_generation_waits_with_one_thread_at_a_time():
    """Another thread's calls go on while one waits for tokens."""
    generation = sym.generate(sym.kv_create(), PROMPT, max_tokens=500, stop_at_end=False)
    done = []
    other = threading.Thread(target=lambda: done.append(sym.pred(sym.kv_create(), [1]).argmax()))
    next(generation)
    other.start()
    other.join(20)
    assert done
    assert len(list(generation)) == 499
