"""A text that is tokenized piece by piece, as it arrives, gives the tokens of the whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.checkpoints.gguf import read_gguf
from decoder.text import codecs, cuts
from decoder.text.stored_tokenizers import byte_tokenizer, gguf_tokenizer, huggingface_tokenizer
from decoder.text.tokenizer import Tokenizer
from tests.decoder.small_checkpoints import VOCAB_SIZE, small_library, write_gguf
from tests.decoder.text.vocabularies import NASTY, SPACE, piece_metadata, smollm, spellable, with_pre_tokenizer

PROSE = """It's the 2nd of May, 1999; they've cost 1,234.50 each (or "so").
Call f(x)[3] -> y_1 = x**2;\r\n\tif a<b && c|d: print('ok')\n\n
価格は、とても高い。 Цена: 5 рублей, да!  a b  c   d\n1\n22\n333\n
<|im_start|>user\nhi there<|im_end|>, not <|im_start or im_end|>; <|endoftext|> e\u0301 a\u0301,b <b>x</b> end of text
"""
TEXTS = [*NASTY, PROSE, PROSE * 3, "no_place" * 50, "word " * 100, "a,b\n" * 40, "<|im_end|> a b <|im_end|>c d " * 9]


def streamed(tokenizer: Tokenizer, chunks: Iterable[str]) -> tuple[list[int], int]:
    """The tokens of a text that arrives in chunks, and how many pieces it was cut into."""
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


@cache
def gguf_family(name: str) -> Tokenizer:
    return gguf_tokenizer(with_pre_tokenizer(name), 49152)


@cache
def byte_family() -> Tokenizer:
    return byte_tokenizer(259)


@pytest.fixture(scope="module")
def piece_families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """SentencePiece with and without a space in front, its pieces having spaces at their beginnings only."""
    base: dict[str, Any] = piece_metadata()
    tokens = [
        f"<unused{i}>" if SPACE in token.lstrip(SPACE) else token
        for i, token in enumerate(base["tokenizer.ggml.tokens"])
    ]
    families = {}
    for prefix in (False, True):
        metadata = {**base, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_space_prefix": prefix}
        path = write_gguf(tmp_path_factory.mktemp("pieces") / "a.gguf", metadata, {})
        families["prefixed" if prefix else "plain"] = gguf_tokenizer(read_gguf(path), 1 << 12)
    return families


@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize("text", TEXTS)
def test_smollm_tokenizes_a_text_in_pieces_as_it_does_the_whole(text, size):
    assert streamed(smollm(), chunks_of(text, size))[0] == smollm().encode(text)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("size", [1, 5])
def test_so_do_the_other_byte_level_families(name, size):
    for text in TEXTS:
        assert streamed(gguf_family(name), chunks_of(text, size))[0] == gguf_family(name).encode(text), text[:40]


ALPHABET = st.sampled_from([*"ab 1,.'\n<|_é价好。", "  ", "'s", "<|im_end|>", "<|im", "end|>", " the", "e\u0301", "\t"])


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(st.text(max_size=6).filter(spellable) | ALPHABET, max_size=40))
def test_any_text_in_any_pieces_gives_the_tokens_of_the_whole(chunks):
    for tokenizer in (smollm(), gguf_family("llama-bpe"), gguf_family("qwen2"), byte_family()):
        assert streamed(tokenizer, chunks)[0] == tokenizer.encode("".join(chunks))


def test_most_texts_are_cut_often():
    for tokenizer in (smollm(), byte_family()):
        for text in ("many words of prose, " * 50, "x=f(y)\n" * 100, "これは、とても長い文。" * 50, "1,2,3\n" * 100):
            _, num_pieces = streamed(tokenizer, chunks_of(text, 64))
            assert num_pieces >= len(text) // 128


def test_a_text_without_a_place_is_not_cut():
    assert smollm().cut("x" * 10_000) is None
    assert smollm().cut("") is None
    assert byte_family().cut("<bo") is None


def test_no_cut_is_made_before_it_is_sure():
    """The end may be the beginning of a spelled-out token, or of something that joins the last word."""
    whole = "so <|im_end|> is the end"
    for size in range(len(whole)):
        cut = smollm().cut(whole[:size])
        if cut is not None:
            before, behind = smollm().encode(whole[: cut.end]), smollm().encode(whole[cut.resume :])
            assert before + behind == smollm().encode(whole)


@pytest.mark.parametrize("kind", ["plain", "prefixed"])
def test_sentencepiece_is_cut_at_spaces(piece_families, kind):
    tokenizer = piece_families[kind]
    for text in (*TEXTS, "the theatre there them in inn  nine ninety\nbanana bandana " * 5, " the <b> the in"):
        for size in (1, 4):
            assert streamed(tokenizer, chunks_of(text, size))[0] == tokenizer.encode(text), text[:40]
    assert streamed(tokenizer, chunks_of("the theatre there " * 20, 8))[1] > 10


def test_a_sentencepiece_vocabulary_with_pieces_across_words_is_never_cut(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", piece_metadata(), {})
    assert gguf_tokenizer(read_gguf(path), 1 << 12).cut("the theatre there " * 20) is None


def test_no_call_converts_many_tokens_of_a_text_and_its_tokens_are_those_of_the_whole(monkeypatch, piece_families):
    """Texts are tokenized with special tokens, without, and with those that a chat template has written."""
    families = [smollm(), byte_family(), gguf_family("llama-bpe"), gguf_family("qwen2"), *piece_families.values()]

    def tokenized(at_once):
        monkeypatch.setattr(cuts, "AT_ONCE", at_once)
        return [
            (
                tokenizer.encode(text),
                tokenizer.encode(text, special=False),
                (codec := tokenizer._codec).encode_parts(codec.split(text)),
            )
            for tokenizer in families
            for text in (*TEXTS, "the theatre there " * 30)
        ]

    whole = tokenized(1 << 20)
    converted, ids = list[int](), codecs._ids
    monkeypatch.setattr(codecs, "_ids", lambda library, text: converted.append(len(text)) or ids(library, text))
    assert tokenized(64) == whole
    converted.clear()
    for tokenizer in (smollm(), *piece_families.values()):
        tokenizer.encode("the theatre there " * 30)
    assert max(converted) <= 64
    converted.clear()
    smollm().encode("x" * 65 + " the theatre there" * 30)
    assert max(converted) <= 128, "a long word takes no more along than it has to"
    pieces = [end - start for start, end in cuts.spans("the theatre there " * 30, byte_family().cut)]
    assert max(pieces) <= 64


def huggingface(tmp_path, change):
    description = json.loads(small_library().to_str())
    change(description)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    return huggingface_tokenizer(tmp_path, VOCAB_SIZE)


def test_a_tokenizer_json_is_cut_where_its_way_to_split_is_known(tmp_path):
    known = huggingface(tmp_path, lambda description: None)
    text = "hello world 12 1, hello<|im_end|> world " * 10
    tokens, num_pieces = streamed(known, chunks_of(text, 9))
    assert tokens == known.encode(text)
    assert num_pieces > 10


@pytest.mark.parametrize(
    "change",
    [
        lambda description: description["pre_tokenizer"].update(add_prefix_space=True),
        lambda description: description["pre_tokenizer"].update(use_regex=False),
        lambda description: description.update(pre_tokenizer=None),
        lambda description: description.update(normalizer={"type": "Lowercase"}),
        lambda description: description.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "l"}, "behavior": "Isolated", "invert": False}
        ),
    ],
)
def test_any_other_is_tokenized_when_the_text_has_all_arrived(tmp_path, change):
    assert huggingface(tmp_path, change).cut("hello world hello world " * 20) is None
