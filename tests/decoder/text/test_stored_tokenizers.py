"""Tokenizers and chat templates of the families beside SmolLM2, on small vocabularies of their kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.checkpoints.gguf import GgufFile, read_gguf
from decoder.text.stored_tokenizers import gguf_tokenizer, huggingface_tokenizer, piece_merges
from decoder.text.tokenizer import Tokenizer
from libsym.errors import Invalid
from tests.decoder.small_checkpoints import VOCAB_SIZE, gguf_metadata, small_library, write_gguf
from tests.decoder.text.vocabularies import (
    CONTROL,
    CORPUS,
    GEMMA,
    NASTY,
    QWEN,
    SPACE,
    USER_DEFINED,
    piece_metadata,
    pieces,
    share_of_the_longest_wait,
    with_pre_tokenizer,
)


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory) -> GgufFile:
    return read_gguf(write_gguf(tmp_path_factory.mktemp("pieces") / "a.gguf", piece_metadata(), {}))


def piece_tokenizer(file: GgufFile, **changes: Any) -> Tokenizer:
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return gguf_tokenizer(dataclasses.replace(file, metadata={**file.metadata, **changes}), 1 << 12)


def textbook_pieces(text: str) -> list[str]:
    """SentencePiece, one merge at a time: of all neighbours the two that make the best piece, leftmost first."""
    scores = {piece: -i for i, piece in enumerate(pieces())}
    symbols = list(text.replace(" ", SPACE))
    while True:
        merged = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not merged:
            return [
                out
                for symbol in symbols
                for out in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])
            ]
        at = -max(merged)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


WORDS = st.text(alphabet=[*sorted(set(CORPUS) - {"\n", "<", " "}), "X", "🎉"], max_size=30)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(WORDS)
def test_pieces_are_merged_as_in_the_textbook_and_come_back(piece_file, text):
    tokenizer = cached_pieces(piece_file)
    tokens = tokenizer.encode(text)
    assert [piece_file.texts("tokenizer.ggml.tokens")[token] for token in tokens] == textbook_pieces(text)
    assert tokenizer.decode(tokens) == text
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()


_made: dict[int, Tokenizer] = {}


def cached_pieces(file: GgufFile) -> Tokenizer:
    return _made.setdefault(id(file), piece_tokenizer(file))


@pytest.mark.parametrize("text", [text for text in NASTY if SPACE not in text])
def test_any_text_comes_back_from_pieces(piece_file, text):
    tokenizer = cached_pieces(piece_file)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize("text", NASTY)
def test_pieces_equal_transformers_gemma(piece_file, text):
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer

    tokens = piece_file.texts("tokenizer.ggml.tokens")
    scores = dict(zip(tokens, piece_file.numbers("tokenizer.ggml.scores"), strict=True))
    merges = piece_merges({piece: scores[piece] for piece in pieces()})
    theirs = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    theirs.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    theirs.add_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL], special_tokens=True)
    ours = cached_pieces(piece_file)
    assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))


def test_special_and_user_defined_pieces_are_whole(piece_file):
    tokenizer, tokens = cached_pieces(piece_file), piece_file.texts("tokenizer.ggml.tokens")
    whole = [tokens[i] for i in tokenizer.encode("<start_of_turn>the\n\n   <b><end_of_turn>")]
    assert whole[0] == "<start_of_turn>"
    assert whole[-4:] == ["\n\n", "   ", "<b>", "<end_of_turn>"]
    assert tokens.index("<end_of_turn>") not in tokenizer.encode("<end_of_turn>", special=False)
    assert tokenizer.decode(tokenizer.encode("<end_of_turn>", special=False)) == "<end_of_turn>"
    assert tokenizer.bos_id == 2
    assert tokenizer.eos_ids == {1, tokens.index("<end_of_turn>")}


def test_a_long_list_of_pieces_that_is_decoded_keeps_no_other_thread_waiting(piece_file):
    tokenizer = piece_tokenizer(piece_file)
    tokens = tokenizer.encode("banana " * 20_000)
    assert share_of_the_longest_wait(lambda: tokenizer.decode(tokens), lambda: tokenizer.decode(tokens[:2])) < 0.4


def test_a_space_before_the_first_word_where_the_file_says_so(piece_file):
    tokens = piece_file.texts("tokenizer.ggml.tokens")
    for changes in ({"add_space_prefix": True}, {"add_space_prefix": None}):
        kept = {key: value for key, value in changes.items() if value is not None}
        file = dataclasses.replace(
            piece_file, metadata={k: v for k, v in piece_file.metadata.items() if "space_prefix" not in k}
        )
        tokenizer = piece_tokenizer(file, **kept)
        encoded = tokenizer.encode("the<bos>the")
        prefixed = tokenizer.encode("the")
        assert "".join(tokens[i] for i in prefixed) == f"{SPACE}the"
        assert encoded == [*prefixed, 2, *prefixed]
        assert tokenizer.decode(prefixed) == "the"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "bert"}, r"tokenizer model 'bert' is not supported: byte-level BPE \('gpt2'\) and SentencePiece"),
        ({"scores": [1.0]}, "have 1 scores: the file is damaged"),
        ({"scores": "high"}, "not a list of numbers"),
        ({"token_type": "all"}, "not a list of whole numbers"),
        ({"add_space_prefix": 1}, "not true or false"),
    ],
)
def test_a_damaged_vocabulary_of_pieces_is_refused(piece_file, changes, reason):
    with pytest.raises(Invalid, match=reason):
        piece_tokenizer(piece_file, **changes)


def test_pieces_without_every_byte_are_refused(piece_file):
    types = list(piece_file.integers("tokenizer.ggml.token_type"))
    types[piece_file.texts("tokenizer.ggml.tokens").index("<0x07>")] = 1
    with pytest.raises(Invalid, match="no token for the byte 7"):
        piece_tokenizer(piece_file, token_type=types)


@cache
def qwen_both_ways() -> tuple[Tokenizer, Any]:
    """Ours and transformers', with SmolLM2's vocabulary."""
    from transformers import Qwen2Tokenizer

    file = with_pre_tokenizer("qwen2")
    tokens, merges = file.texts("tokenizer.ggml.tokens"), file.texts("tokenizer.ggml.merges")
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        additional_special_tokens=tokens[:17],
    )
    return gguf_tokenizer(file, 49152), theirs


@pytest.mark.parametrize("text", NASTY)
def test_the_qwen_2_pre_tokenizer_equals_transformers(text):
    ours, theirs = qwen_both_ways()
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", NASTY)
def test_a_saved_qwen_2_tokenizer_encodes_as_transformers_does(qwen_directory, text):
    _, theirs = qwen_both_ways()
    assert loaded(qwen_directory).encode(text) == theirs(text).input_ids


@pytest.fixture(scope="module")
def qwen_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    qwen_both_ways()[1].save_pretrained(directory)
    return directory


@cache
def loaded(directory: Path) -> Tokenizer:
    return huggingface_tokenizer(directory, 49152)


CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
CHATS: dict[str, tuple[str, list[dict[str, Any]], list[Any] | None]] = {
    "gemma": (GEMMA, [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "you"}], None),
    "gemma, system": (GEMMA, [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}], None),
    "gemma, parts": (GEMMA, [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}]}], None),
    "qwen": (QWEN, [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}], None),
    "qwen, tools": (
        QWEN,
        [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "<think>\nsum\n</think>\n\nI add.", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "2"},
        ],
        [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    ),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_idioms_of_a_familys_template_give_transformers_prompt(chat, add_generation_prompt):
    template, messages, tools = CHATS[chat]
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=small_library(), bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=template
    )
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert templated(template).chat_template(messages, tools, add_generation_prompt) == expected


def templated(template: str) -> Tokenizer:
    metadata = {**gguf_metadata(), "tokenizer.chat_template": template}
    return gguf_tokenizer(GgufFile(Path("small.gguf"), metadata, {}), VOCAB_SIZE)


def test_a_template_that_raises_says_why():
    roles: Sequence[str] = ("user", "user")
    with pytest.raises(Invalid, match="refused the messages: Conversation roles must alternate user/assistant"):
        templated(GEMMA).chat_template([{"role": role, "content": "x"} for role in roles])
