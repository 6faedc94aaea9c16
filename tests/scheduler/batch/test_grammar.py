"""Grammars over the vocabularies of the tiny model and of small real tokenizers."""

import json
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


DIGITS = b"0123456789"
STEPS = {
    "what may follow": ("regex", "[ab]{2}[0-9]", b"", b"ab"),
    "no text": ("regex", "[ab]{2}[0-9]", b"ab", DIGITS),
    "where it may end": ("regex", "a{1,3}", b"a", [ord("a"), EOS]),
    "behind what is forced": ("regex", "(yes|no), thank you(!|\\.)", b"no, thank you", b"!."),
    "lark": ("lark", 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n', b"12+3", [*DIGITS, *b"+", EOS]),
    "gbnf": ("gbnf", 'root ::= sum\nsum ::= [0-9]+ ("+" [0-9]+)*', b"12+3", [*DIGITS, *b"+", EOS]),
}


@pytest.mark.parametrize(("kind", "source", "text", "following"), STEPS.values(), ids=STEPS)
def test_behind_a_text_is_allowed(grammars, kind, source, text, following):
    grammar = grammars.compile(ANN, kind, source)
    walk(grammar, text)
    assert allowed(grammar) == set(following)
    assert not grammar.is_over


def test_it_is_over_when_nothing_may_follow_and_takes_nothing_that_it_does_not_allow(grammars):
    grammar = grammars.compile(ANN, "regex", "a{1,2}")
    walk(grammar, b"aa")
    assert grammar.is_over
    assert grammar.forced() == []
    with pytest.raises(Invalid, match="grammar"):
        grammars.compile(ANN, "regex", "a").advance(ord("b"))


def test_special_tokens_and_padding_are_no_text_and_a_mask_has_a_word_for_each_32_tokens(grammars):
    grammar = grammars.compile(ANN, "regex", "(.|\\n)+")
    assert allowed(grammar) <= set(range(256))
    assert (grammar.allowed().itemsize, len(grammar.allowed())) == (4, -(-VOCAB_SIZE // 32))


def refuse(given):
    raise Invalid(f"{given} can't be spelled")


@pytest.mark.parametrize(
    "encode",
    [None, lambda given: list(b" " + given.encode()), refuse],
    ids=["as it is", "with a space before it", "not at all"],
)
def test_what_has_to_follow_is_forced_however_the_tokenizer_spells_it_alone(encode):
    text = Text(byte_tokenizer(VOCAB_SIZE))
    if encode is not None:
        text.own_encoder = lambda: encode
    grammar = Grammars(text).compile(ANN, "regex", "[ab] and so on[.!]")
    grammar.advance(ord("a"))
    assert bytes(grammar.forced()) == b" and so on"


@pytest.fixture(scope="module")
def smollm():
    """The vocabulary of a real model, and its tokenizer."""
    file = read_gguf(packaged_gguf())
    tokenizer = gguf_tokenizer(file, len(file.texts("tokenizer.ggml.tokens")))
    return Grammars(Text(tokenizer)), tokenizer


@pytest.mark.slow
def test_a_real_model_s_special_tokens_are_no_text_and_what_is_forced_is_tokenized_as_it_would(smollm):
    grammars, tokenizer = smollm
    assert allowed(grammars.compile(ANN, "regex", "(?s:.)*")) & tokenizer.special_ids == tokenizer.eos_ids
    grammar = grammars.compile(ANN, "regex", "(yes|no), thank you very much; naïve café(!|\\.)")
    assert tokenizer.encode("yes")[0] in allowed(grammar)
    grammar.advance(tokenizer.encode("yes")[0])
    assert grammar.forced() == tokenizer.encode(", thank you very much; naïve café")


def test_nobody_waits_for_the_first_grammar_who_only_asks_what_is_kept():
    """The daemon's thread asks, and a large vocabulary takes a second."""
    text = Text(byte_tokenizer(VOCAB_SIZE))
    make, answered = text.own_encoder, threading.Event()

    def ask():
        assert asked.kept(ANN, "regex", "a") is None
        answered.set()

    def own_encoder():
        threading.Thread(target=ask).start()
        assert answered.wait(10)
        return make()

    text.own_encoder = own_encoder
    asked = Grammars(text)
    asked.compile(ANN, "regex", "a")


def test_compact_json_has_no_white_space_and_other_json_may(grammars):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    for text in (b'{"a":[1,{"b":null}],"more":2}', b'{"a":[]}'):
        walk(grammars.compile(ANN, "compact_json", schema), text)
    walk(grammars.compile(ANN, "json", schema), b'{ "a" :\n [1, 2] , "more": 2}')
    for text in (b"{ ", b'{"a" ', b'{"a": ', b'{"a":[1, '):
        with pytest.raises(AssertionError):
            walk(grammars.compile(ANN, "compact_json", schema), text)
    walk(grammars.compile(ANN, "compact_json", "true"), b'{"a":[1,{"b":null}]}')  # of any schema
    name = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 5}}, "additionalProperties": False}
    walk(grammars.compile(ANN, "json", json.dumps(name)), b'{"n": "12345"}')
    with pytest.raises(AssertionError):
        walk(grammars.compile(ANN, "json", json.dumps(name)), b'{"n": "123456')


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


def test_the_latest_grammars_are_kept_and_each_compiled_one_begins_anew(grammars):
    first = grammars.compile(ANN, "regex", "ab+")
    first.advance(ord("a"))
    assert allowed(grammars.compile(ANN, "regex", "ab+")) == {ord("a")}
    assert ord("b") in allowed(first)
    assert grammars.kept(ANN, "regex", "ab+") is not None
    assert grammars.kept(ANN, "lark", "ab+") is None
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
