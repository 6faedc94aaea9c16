"""A tokenizer before odd texts, tokens out of range and several threads."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.text.stored_tokenizers import byte_tokenizer
from libsym.errors import Invalid
from tests.decoder.text.vocabularies import NASTY, in_memory, piece_metadata, share_of_the_longest_wait, smollm


def test_special_tokens_are_text_when_asked_and_whole_otherwise():
    assert smollm().bos_id == 1
    assert smollm().eos_ids == {0, 2}  # <|im_start|>; <|endoftext|>, <|im_end|>
    assert smollm().eos_ids <= smollm().special_ids
    for token in smollm().special_ids:
        text = smollm().token_bytes(token).decode()
        assert smollm().encode(text) == [token]
        assert token not in smollm().encode(text, special=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ab\x04", r"U\+0004 at 2, which this model's vocabulary cannot spell"),
        ("é🎉\U00041234", r"U\+41234 at 2, which this model's"),
        ("a\ud800", "lone surrogate at 1"),
    ],
)
def test_what_cannot_be_spelled_is_an_error_and_not_dropped(text, reason):
    with pytest.raises(Invalid, match=reason):
        smollm().encode(text)


def test_tokens_out_of_range_are_refused():
    for tokens in ([-1], [0, 49152], [1 << 40]):
        with pytest.raises(Invalid, match="out of range: this model's tokens are 0 to 49151"):
            smollm().decode(tokens)
    with pytest.raises(Invalid, match="token -1 is out of range"):
        smollm().token_bytes(-1)


def test_half_a_character_decodes_to_a_replacement_and_its_bytes_are_exact():
    tokens = smollm().encode("🦜")
    assert len(tokens) > 1
    assert "\ufffd" in smollm().decode(tokens[:1])
    assert b"".join(smollm().token_bytes(token) for token in tokens) == "🦜".encode()


@pytest.mark.slow
def test_an_encoder_of_its_own_encodes_as_the_tokenizer_does():
    for text in NASTY:
        assert smollm().own_encoder()(text) == smollm().encode(text, special=False)


def test_several_threads_may_encode_at_once():
    with ThreadPoolExecutor(8) as pool:
        lengths = list(pool.map(lambda i: len(smollm().encode("<|im_end|>" * 20, special=i % 2 == 0)), range(400)))
    assert set(lengths[::2]) == {20}
    assert len(set(lengths[1::2])) == 1
    assert lengths[1] > 20


def test_a_word_that_was_tokenized_before_takes_as_long_as_any_other():
    """A user could tell a right guess of another one's secret from a wrong one."""
    letters = random.Random(7)
    known, new = ([letters.choices("abcdefghijklmnopqrstuvwxyz", k=200) for _ in range(300)] for _ in range(2))
    for word in known:
        smollm().encode("".join(word))

    def took_s(word):
        began_s = time.perf_counter()
        smollm().encode("".join(word))
        return time.perf_counter() - began_s

    pairs = [
        (took_s(one), took_s(other)) if letters.random() < 0.5 else (took_s(other), took_s(one))[::-1]
        for one, other in zip(known, new, strict=True)
    ]
    assert sum(one < other for one, other in pairs) < 0.8 * len(pairs), "0.96 with the library's cache"


@pytest.mark.slow
def test_a_long_text_keeps_no_other_thread_waiting():
    """The text has no place for a cut, so one call into C converts it. The same holds for the way back."""
    text, plain = "hello" * 60_000, smollm()
    share = share_of_the_longest_wait(lambda: plain.encode(text), lambda: plain.encode("hi", special=False))
    assert share < 0.5, "0.9 with the interpreter's lock held"
    pieces = in_memory(piece_metadata(), 1 << 12)
    tokens = pieces.encode("banana " * 20_000)
    assert share_of_the_longest_wait(lambda: pieces.decode(tokens), lambda: pieces.decode(tokens[:2])) < 0.5


@settings(max_examples=100, deadline=None)
@given(st.text(), st.booleans())
def test_the_byte_tokenizer_gives_any_text_back(text, special):
    tokenizer = byte_tokenizer(259)
    assert tokenizer.decode(tokenizer.encode(text, special=special)) == text


def test_the_byte_tokenizer_knows_three_special_tokens():
    tokenizer = byte_tokenizer(300)
    assert tokenizer.encode("a<bos><eos><pad>") == [97, 256, 257, 258]
    assert tokenizer.encode("<eos>", special=False) == tokenizer.own_encoder()("<eos>") == list(b"<eos>")
    assert tokenizer.decode([256, 255, 97, 299]) == "<bos>\ufffda"
    assert tokenizer.bos_id == 256
    assert tokenizer.eos_ids == {257}
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.chat_template([{"role": "user", "content": "hi"}]) == "<bos>user: hi\nassistant: "
    with pytest.raises(Invalid, match="at least 259"):
        byte_tokenizer(258)
