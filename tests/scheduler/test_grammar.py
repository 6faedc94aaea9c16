"""Grammars over the vocabularies of the tiny model and of small real tokenizers."""

import json
import random
import threading
from dataclasses import astuple

import numpy as np
import pytest

import libsym as sym
from decoder.checkpoints.gguf import read_gguf
from decoder.model import packaged_gguf
from decoder.text.stored_tokenizers import byte_tokenizer, gguf_tokenizer
from libsym.errors import Invalid
from scheduler.batch import grammar as grammar_module
from scheduler.batch.grammar import NUM_KEPT, Grammars, Owner

VOCAB_SIZE = 300  # the byte tokenizer has 259: the model may have more than the tokenizer
EOS = 257
ANN, BOB = Owner(1000, 0), Owner(1001, 0)


class Text:
    """The text side of a tokenizer, as the daemon makes it."""

    def __init__(self, tokenizer):
        self.vocab_size = tokenizer.vocab_size
        self.token_texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.eos_ids = tokenizer.eos_ids
        self.special_ids = tokenizer.special_ids
        self.own_encoder = tokenizer.own_encoder


@pytest.fixture
def grammars():
    return Grammars(Text(byte_tokenizer(VOCAB_SIZE)))


def allowed(grammar):
    bits = np.unpackbits(np.frombuffer(grammar.allowed(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(grammar, text):
    """Take a text byte by byte, each as the masks allow it; what is forced in it is skipped."""
    at = 0
    while at < len(text):
        assert text[at] in allowed(grammar), text[:at]
        grammar.advance(text[at])
        forced = bytes(grammar.forced())
        assert text.startswith(forced, at + 1)
        at += 1 + len(forced)


def test_only_what_may_follow_is_allowed(grammars):
    grammar = grammars.compile(ANN, "regex", "[ab]{2}[0-9]")
    assert allowed(grammar) == set(b"ab")
    grammar.advance(ord("a"))
    grammar.advance(ord("b"))
    assert allowed(grammar) == set(b"0123456789")
    assert not grammar.is_over


def test_where_it_may_end_the_end_token_is_allowed(grammars):
    grammar = grammars.compile(ANN, "regex", "a{1,3}")
    grammar.advance(ord("a"))
    assert allowed(grammar) == {ord("a"), EOS}


def test_it_is_over_when_nothing_may_follow(grammars):
    grammar = grammars.compile(ANN, "regex", "a{1,2}")
    grammar.advance(ord("a"))
    assert not grammar.is_over
    grammar.advance(ord("a"))
    assert grammar.is_over
    assert grammar.forced() == []


def test_what_has_to_follow_is_forced_and_counts_as_taken(grammars):
    grammar = grammars.compile(ANN, "regex", "(yes|no), thank you(!|\\.)")
    grammar.advance(ord("n"))
    assert bytes(grammar.forced()) == b"o, thank you"
    assert allowed(grammar) == set(b"!.")


@pytest.fixture(scope="module")
def smollm():
    """The vocabulary of a real model, and its tokenizer."""
    file = read_gguf(packaged_gguf())
    tokenizer = gguf_tokenizer(file, len(file.texts("tokenizer.ggml.tokens")))
    return Grammars(Text(tokenizer)), tokenizer


def test_what_is_forced_is_tokenized_as_the_model_would(smollm):
    grammars, tokenizer = smollm
    grammar = grammars.compile(ANN, "regex", "(yes|no), thank you very much; naïve café(!|\\.)")
    assert tokenizer.encode("yes")[0] in allowed(grammar)
    grammar.advance(tokenizer.encode("yes")[0])
    assert grammar.forced() == tokenizer.encode(", thank you very much; naïve café")


def test_special_tokens_of_a_real_model_are_no_text(smollm):
    grammars, tokenizer = smollm
    grammar = grammars.compile(ANN, "regex", "(?s:.)*")
    assert allowed(grammar) & tokenizer.special_ids == tokenizer.eos_ids


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_into_what_is_forced():
    text = Text(byte_tokenizer(VOCAB_SIZE))
    text.own_encoder = lambda: lambda given: list(b" " + given.encode())
    grammar = Grammars(text).compile(ANN, "regex", "[ab] and so on[.!]")
    grammar.advance(ord("a"))
    assert bytes(grammar.forced()) == b" and so on"


def test_a_text_that_the_tokenizer_cannot_spell_alone_is_forced_by_its_longest_tokens():
    text = Text(byte_tokenizer(VOCAB_SIZE))

    def refuse(given):
        raise Invalid(f"{given} can't be spelled")

    text.own_encoder = lambda: refuse
    grammar = Grammars(text).compile(ANN, "regex", "[ab] and so on[.!]")
    grammar.advance(ord("a"))
    assert bytes(grammar.forced()) == b" and so on"


def test_nobody_waits_for_the_first_grammar_who_only_asks_what_is_kept():
    """The daemon's thread asks, and a large vocabulary takes a second."""
    text = Text(byte_tokenizer(VOCAB_SIZE))
    make, answered = text.own_encoder, threading.Event()

    def ask():
        assert grammars.kept(ANN, "regex", "a") is None
        answered.set()

    def own_encoder():
        threading.Thread(target=ask).start()
        assert answered.wait(10)
        return make()

    text.own_encoder = own_encoder
    grammars = Grammars(text)
    grammars.compile(ANN, "regex", "a")


def test_special_tokens_and_padding_are_no_text(grammars):
    assert allowed(grammars.compile(ANN, "regex", "(.|\\n)+")) <= set(range(256))


def test_the_mask_has_a_word_for_each_32_tokens(grammars):
    words = grammars.compile(ANN, "regex", "a").allowed()
    assert (words.itemsize, len(words)) == (4, -(-VOCAB_SIZE // 32))


def test_compact_json_has_no_white_space_and_other_json_may(grammars):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    for text in (b'{"a":[1,{"b":null}],"more":2}', b'{"a":[]}'):
        walk(grammars.compile(ANN, "compact_json", schema), text)
    walk(grammars.compile(ANN, "json", schema), b'{ "a" :\n [1, 2] , "more": 2}')
    for text in (b"{ ", b'{"a" ', b'{"a": ', b'{"a":[1, '):
        with pytest.raises(AssertionError):
            walk(grammars.compile(ANN, "compact_json", schema), text)


def test_compact_json_of_any_schema_is_any_json(grammars):
    walk(grammars.compile(ANN, "compact_json", "true"), b'{"a":[1,{"b":null}]}')


def test_json_of_a_schema_is_what_comes_of_it(grammars):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "tags": {"type": "array", "maxItems": 2}},
        "required": ["name"],
        "additionalProperties": False,
    }
    choose = random.Random(1)
    for _ in range(5):
        grammar, tokens = grammars.compile(ANN, "json", json.dumps(schema)), []
        while not grammar.is_over and len(tokens) < 2000:
            choices = sorted(allowed(grammar) - set(b" \t\r\n"))
            token = EOS if EOS in choices else choose.choice(choices)
            if token == EOS:
                break
            grammar.advance(token)
            tokens += [token, *grammar.forced()]
        if len(tokens) < 2000:
            made = json.loads(bytes(tokens))
            assert len(made["name"]) <= 5


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "text", "has_more"),
    [
        (A, b'{"a":1', False),
        ({**A, "additionalProperties": True}, b'{"a":1', True),
        ({"type": "object"}, b'{"a":1', True),
        (True, b'{"a":1', True),
        ({"type": "array", "items": A}, b'[{"a":1', False),
        ({"anyOf": [A, B]}, b'{"b":"x"', False),
        ({"allOf": [A, B]}, b'{"a":1,"b":"x"', False),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, b'{"a":1,"b":"x"', True),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, b'{"a":1,"b":"x"', False),
        ({**A, "properties": {"a": {"const": {"properties": {"c": 1}}}}}, b'{"a":{"properties":{"c":1}}', False),
    ],
)
def test_an_object_whose_schema_names_properties_has_no_others(grammars, schema, text, has_more):
    grammar = grammars.compile(ANN, *astuple(sym.Grammar.json(schema, compact=True)))
    for byte in text:
        assert byte in allowed(grammar)
        grammar.advance(byte)
    assert (ord(",") in allowed(grammar)) == has_more


@pytest.mark.parametrize("schema", [{"multipleOf": 3}, {"type": "number", "multipleOf": 0.5, "minimum": 0}])
def test_a_number_under_multiple_of_comes_to_its_end(grammars, schema):
    grammar = grammars.compile(ANN, *astuple(sym.Grammar.json(schema)))
    walk(grammar, b"3" * 15)
    assert not set(b"0123456789") & allowed(grammar)
    with pytest.raises(Invalid, match="15 digits"):
        sym.Grammar.json({**schema, "maximum": 10**20})


def test_a_schema_that_combines_ever_more_is_refused(grammars):
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(1000)}
    with pytest.raises(Invalid, match="combines too many"):
        sym.Grammar.json({"$defs": chain, "$ref": "#/$defs/a0"})


def test_a_lark_grammar_parses(grammars):
    source = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n'
    grammar = grammars.compile(ANN, "lark", source)
    walk(grammar, b"12+3")
    assert allowed(grammar) == {*b"0123456789+", EOS}


def test_a_gbnf_grammar_parses(grammars):
    grammar = grammars.compile(ANN, "gbnf", 'root ::= sum\nsum ::= [0-9]+ ("+" [0-9]+)*')
    walk(grammar, b"12+3")
    assert allowed(grammar) == {*b"0123456789+", EOS}


def test_a_compiled_grammar_begins_anew_each_time(grammars):
    first = grammars.compile(ANN, "regex", "ab+")
    first.advance(ord("a"))
    second = grammars.compile(ANN, "regex", "ab+")
    assert allowed(second) == {ord("a")}
    assert ord("b") in allowed(first)
    assert grammars.kept(ANN, "regex", "ab+") is not None
    assert grammars.kept(ANN, "lark", "ab+") is None


def test_the_latest_grammars_are_kept(grammars):
    for number in range(NUM_KEPT + 1):
        grammars.compile(ANN, "regex", f"a{number}")
        grammars.compile(ANN, "regex", "a0")
    assert grammars.kept(ANN, "regex", "a0") is not None
    assert grammars.kept(ANN, "regex", "a1") is None


def test_no_account_finds_a_grammar_of_another_and_none_is_put_out_by_others(grammars):
    """Users and a gateway's keys are accounts; a key's account is its domain."""
    key, other_key = Owner(1000, 5), Owner(1000, 6)
    for owner in (ANN, key):
        grammars.compile(owner, "regex", "secret")
    for number in range(NUM_KEPT + 1):
        for owner in (BOB, other_key):
            assert grammars.kept(owner, "regex", "secret") is None
            grammars.compile(owner, "regex", f"a{number}")
    for owner in (ANN, key):
        assert grammars.kept(owner, "regex", "secret") is not None


def test_what_is_kept_of_an_account_and_of_all_is_bounded_and_the_largest_user_gives_up_first(grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_KEPT_BYTES", 8 << 10)
    monkeypatch.setattr(grammar_module, "MAX_ALL_KEPT_BYTES", 64 << 10)

    def kept(owner):
        return [number for number in range(5) if grammars.kept(owner, "regex", sized(number)) is not None]

    def sized(number):
        return f"a{number}|" + "b" * (2 << 10)

    grammars.compile(BOB, "regex", "secret")
    for number in range(5):
        grammars.compile(ANN, "regex", sized(number))
    assert kept(ANN) == [2, 3, 4]
    domains = [Owner(1000, number) for number in range(12)]
    for domain in domains:
        for number in range(3):
            grammars.compile(domain, "regex", sized(number))
    assert 20 < sum(len(kept(domain)) for domain in domains) < 32
    assert 2 in kept(domains[-1]), "the latest of all"
    assert grammars.kept(BOB, "regex", "secret") is not None, "of a user who has less"


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(", "unclosed"),
        ("lark", "start: nothing", "nothing"),
        ("json", '{"type": "frob"}', "frob"),
        ("json", '{"items": {"uniqueItems": true}}', 'cannot hold "uniqueItems"'),
        ("json", '{"not": {}}', 'cannot hold "not"'),
        ("json", '{"if": {}}', 'cannot hold "if"'),
        ("json", '{"contains": {}}', 'cannot hold "contains"'),
        ("json", '{"format": "frob"}', "frob"),
        ("json", "{", "JSON"),
        ("compact_json", "[]", "JSON schema can't be used"),
        ("gbnf", 'start ::= "a"', "root"),
        ("gbnf", 'root ::= "', "gbnf"),
        ("gbnf", "root ::= " + "(" * 4000 + ")" * 4000, "recursion"),
        ("gbnf", 'root ::= "' + "a" * (16 << 10) + '"', "16395"),
        ("yaml", "a: b", "yaml"),
        ("regex", "a" * 300_000, "300000"),
        ("regex", "half \ud800", "surrogate"),
        ("lark", 'start: "half \ud800"', "surrogate"),
        ("json", '{"const": "half \ud800"}', "surrogate"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line_that_says_why(grammars, kind, source, words):
    with pytest.raises(Invalid, match=words) as caught:
        grammars.compile(ANN, kind, source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_grammar_that_costs_too_much_is_an_error_of_its_own(grammars):
    """Thousands of ways to read each letter: the parser's work for one token is limited."""
    source = "start: a\na: a a | a a a | LETTER | LETTER a\nLETTER: /x/\n"
    other = grammars.compile(ANN, "regex", "x+")

    def go_on():
        grammar = grammars.compile(ANN, "lark", source)
        for _ in range(2000):
            grammar.allowed()
            grammar.advance(ord("x"))

    with pytest.raises(Invalid, match="grammar"):
        go_on()
    other.advance(ord("x"))
    assert ord("x") in allowed(other)


def test_a_token_that_was_not_allowed_is_an_error(grammars):
    grammar = grammars.compile(ANN, "regex", "a")
    with pytest.raises(Invalid, match="grammar"):
        grammar.advance(ord("b"))


def test_grammars_are_compiled_in_several_threads_at_once(grammars):
    made = []
    threads = [threading.Thread(target=lambda: made.append(grammars.compile(ANN, "regex", "[ab]c"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [allowed(each) for each in made] == [set(b"ab")] * 8
