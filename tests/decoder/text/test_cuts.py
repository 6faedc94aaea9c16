"""A text that is tokenized piece by piece, as it arrives, gives the tokens of the whole."""

import json
from collections.abc import Callable, Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.text import codecs, cuts
from decoder.text.stored_tokenizers import byte_tokenizer, huggingface_tokenizer
from decoder.text.tokenizer import Tokenizer
from tests.decoder.small_checkpoints import VOCAB_SIZE, small_library
from tests.decoder.text.vocabularies import (
    NASTY,
    SPACE,
    in_memory,
    piece_metadata,
    smollm,
    spellable,
    with_pre_tokenizer,
)

PROSE = """It's the 2nd of May, 1999; they've cost 1,234.50 each (or "so").
Call f(x)[3] -> y_1 = x**2;\r\n\tif a<b && c|d: print('ok')\n\n
価格は、とても高い。 Цена: 5 рублей, да!  a b  c   d\n1\n22\n333\n
<|im_start|>user\nhi there<|im_end|>, not <|im_start or im_end|>; <|endoftext|> e\u0301 a\u0301,b <b>x</b> end of text
"""
WORDS = "the theatre there " * 30
TEXTS = [
    *(*NASTY, PROSE, PROSE * 3, "no_place" * 50, "word " * 100, "a,b\n" * 40, "<|im_end|> a b <|im_end|>c d " * 9),
    *(WORDS, "the theatre there them in inn  nine ninety\nbanana bandana " * 5, " the <b> the in"),
]


@cache
def pieces(*, prefixed: bool) -> Tokenizer:
    """SentencePiece with or without a space in front, its pieces having spaces at their beginnings only."""
    words = piece_metadata()["tokenizer.ggml.tokens"]
    words = [f"<unused{i}>" if SPACE in word.lstrip(SPACE) else word for i, word in enumerate(words)]
    return in_memory(piece_metadata(prefixed), 1 << 12, tokens=words)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    **{name: cache(lambda name=name: with_pre_tokenizer(name)) for name in ("smollm", "gpt-2", "llama-bpe", "qwen2")},
    "bytes": cache(lambda: byte_tokenizer(259)),
    "pieces": lambda: pieces(prefixed=False),
    "prefixed pieces": lambda: pieces(prefixed=True),
}


def streamed(tokenizer: Tokenizer, chunks: Iterable[str]) -> tuple[list[int], int]:
    tokens: list[int] = []
    pending, num_pieces = "", 1
    for chunk in chunks:
        pending += chunk
        cut = tokenizer.cut(pending)
        if cut is not None:
            assert cut.end > 0
            tokens += tokenizer.encode(pending[: cut.end])
            pending = pending[cut.resume :]
            num_pieces += 1
    return tokens + tokenizer.encode(pending), num_pieces


def chunks_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 5, 64])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(family, size):
    tokenizer = FAMILIES[family]()
    for text in TEXTS:
        assert streamed(tokenizer, chunks_of(text, size))[0] == tokenizer.encode(text), text[:40]


ALPHABET = st.sampled_from([*"ab 1,.'\n<|_é价好。", "  ", "'s", "<|im_end|>", "<|im", "end|>", " the", "e\u0301", "\t"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=6).filter(spellable) | ALPHABET, max_size=40))
def test_any_text_in_any_pieces_has_the_tokens_of_the_whole(chunks):
    for family in ("smollm", "llama-bpe", "qwen2", "bytes"):
        tokenizer = FAMILIES[family]()
        assert streamed(tokenizer, chunks)[0] == tokenizer.encode("".join(chunks))


def test_most_texts_are_cut_often():
    for family in ("smollm", "bytes"):
        for text in ("many words of prose, " * 50, "x=f(y)\n" * 100, "これは、とても長い文。" * 50, "1,2,3\n" * 100):
            assert streamed(FAMILIES[family](), chunks_of(text, 64))[1] >= len(text) // 128
    for prefixed in (False, True):
        assert streamed(pieces(prefixed=prefixed), chunks_of(WORDS, 8))[1] > 10


def test_a_text_without_a_place_is_not_cut():
    assert smollm().cut("x" * 10_000) is None
    assert smollm().cut("") is None
    assert byte_tokenizer(259).cut("<bo") is None
    across_words = in_memory(piece_metadata(), 1 << 12)
    assert across_words.cut(WORDS) is None


@pytest.mark.slow
def test_no_call_converts_many_tokens_of_a_text_and_its_tokens_are_those_of_the_whole(monkeypatch):
    """Texts are tokenized with special tokens, without, and with those that a chat template has written."""
    families = [FAMILIES[name]() for name in FAMILIES if name != "gpt-2"]

    def tokenized(at_once):
        monkeypatch.setattr(cuts, "AT_ONCE", at_once)
        return [
            (
                tokenizer.encode(text),
                tokenizer.encode(text, special=False),
                (codec := tokenizer._codec).encode_parts(codec.split(text)),
            )
            for tokenizer in families
            for text in TEXTS
        ]

    whole = tokenized(1 << 20)
    converted, ids = list[int](), codecs._ids

    def noted(library, text):
        converted.append(len(text))
        return ids(library, text)

    monkeypatch.setattr(codecs, "_ids", noted)
    assert tokenized(64) == whole
    converted.clear()
    for family in ("smollm", "pieces", "prefixed pieces"):
        FAMILIES[family]().encode(WORDS)
    assert max(converted) <= 64
    converted.clear()
    smollm().encode("x" * 65 + " the theatre there" * 30)
    assert max(converted) <= 128, "a long word takes no more along than it has to"
    assert max(end - start for start, end in cuts.spans(WORDS, byte_tokenizer(259).cut)) <= 64


def huggingface(tmp_path, **change):
    description = json.loads(small_library().to_str())
    description["pre_tokenizer"] |= change.pop("splitter", {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description | change))
    return huggingface_tokenizer(tmp_path, VOCAB_SIZE)


def test_a_tokenizer_json_is_cut_where_its_way_to_split_is_known(tmp_path):
    known = huggingface(tmp_path)
    text = "hello world 12 1, hello<|im_end|> world " * 10
    tokens, num_pieces = streamed(known, chunks_of(text, 9))
    assert tokens == known.encode(text)
    assert num_pieces > 10


@pytest.mark.parametrize(
    "change",
    [
        {"splitter": {"add_prefix_space": True}},
        {"splitter": {"use_regex": False}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "l"}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_any_other_is_tokenized_when_the_text_has_all_arrived(tmp_path, change):
    assert huggingface(tmp_path, **change).cut("hello world hello world " * 20) is None
