"""Tokenizers of checkpoints beside transformers' own and beside the textbook; vocabularies that are refused."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from decoder.text.stored_tokenizers import huggingface_tokenizer, piece_merges
from decoder.text.tokenizer import Tokenizer
from libsym.errors import Invalid
from tests.decoder.small_checkpoints import (
    MERGES,
    TEMPLATE,
    VOCAB_SIZE,
    gguf_metadata,
    of_transformers,
    small_library,
    small_vocabulary,
)
from tests.decoder.text.vocabularies import (
    CONTROL,
    CORPUS,
    NASTY,
    SPACE,
    USER_DEFINED,
    bpe,
    hf_directory,
    in_memory,
    piece_metadata,
    pieces,
    smollm,
    smollm_file,
    spellable,
    with_pre_tokenizer,
)

TEXTS = [*NASTY, "hi", " hi hi", "hi \n you, 你好 🎉", "hi</s>hi"]


class Pair(NamedTuple):
    """Our tokenizer, and what transformers does with the same vocabulary."""

    ours: Tokenizer
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    gives_back: Callable[[str], bool] = lambda _: True
    """Whether a text comes back: some families compose letters, or spell spaces with a letter."""


def vocabulary() -> list[str]:
    return smollm_file().texts("tokenizer.ggml.tokens")


def smollm_library(**options: Any) -> LibraryTokenizer:
    return bpe(vocabulary(), smollm_file().texts("tokenizer.ggml.merges"), **options)


def beside_library(ours: Tokenizer, library: LibraryTokenizer, **options: Any) -> Pair:
    return Pair(
        ours,
        lambda text: library.encode(text, add_special_tokens=False).ids,
        lambda tokens: library.decode(tokens, skip_special_tokens=False),
        **options,
    )


def beside_transformers(ours: Tokenizer, theirs: Any, **options: Any) -> Pair:
    return Pair(
        ours,
        lambda text: theirs(text, add_special_tokens=False).input_ids,
        lambda tokens: theirs.decode(tokens, clean_up_tokenization_spaces=False),
        **options,
    )


def smollm_pair(_: Path) -> Pair:
    """SmolLM2's publishers ship this: individual digits, then GPT-2's bytes."""
    library = smollm_library()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, normalized=False) for token in vocabulary()[:17]])
    return beside_library(smollm(), library)


def by_their_class(name: str) -> Any:
    """Transformers' slow-named class of a family, with SmolLM2's vocabulary."""
    return of_transformers(name)(
        vocab={token: i for i, token in enumerate(vocabulary())},
        merges=[tuple(merge.split(" ")) for merge in smollm_file().texts("tokenizer.ggml.merges")],
        additional_special_tokens=vocabulary()[:17],
    )


def llama_3_pair(_: Path) -> Pair:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class FromLists(TikTokenConverter):
        def tokenizer(self) -> LibraryTokenizer:
            return smollm_library(ignore_merges=True)

    return beside_library(
        with_pre_tokenizer("llama-bpe"), FromLists(extra_special_tokens=vocabulary()[:17]).converted()
    )


def is_composed(text: str) -> bool:
    return "e\u0301" not in text


def saved_qwen_pair(directory: Path) -> Pair:
    theirs = by_their_class("Qwen2Tokenizer")
    theirs.save_pretrained(directory)
    return beside_transformers(huggingface_tokenizer(directory, 49152), theirs, gives_back=is_composed)


def gemma_pair(_: Path) -> Pair:
    metadata = piece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    merges: Any = piece_merges({piece: scores[piece] for piece in pieces()})
    theirs = of_transformers("GemmaTokenizer")(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    theirs.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    theirs.add_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL], special_tokens=True)
    return beside_transformers(gemma(), theirs, gives_back=lambda text: SPACE not in text)


@cache
def gemma() -> Tokenizer:
    return in_memory(piece_metadata(), 1 << 12)


def small_json_pair(directory: Path) -> Pair:
    return beside_library(
        huggingface_tokenizer(hf_directory(directory, small_library()), VOCAB_SIZE + 10), small_library()
    )


def old_pieces_pair(directory: Path) -> Pair:
    """A tokenizer of the older kind: pieces with U+2581 for a space, bytes where no piece fits."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    library = bpe(words, ["▁ h", "▁h i"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    ours = huggingface_tokenizer(hf_directory(directory, library), 300)
    return beside_library(ours, library, gives_back=lambda _: False)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "smollm": smollm_pair,
    "gpt-2": lambda _: beside_transformers(with_pre_tokenizer("gpt-2"), by_their_class("GPT2Tokenizer")),
    "llama 3": llama_3_pair,
    "qwen 2": lambda _: beside_transformers(
        with_pre_tokenizer("qwen2"), by_their_class("Qwen2Tokenizer"), gives_back=is_composed
    ),
    "qwen 2, saved": saved_qwen_pair,
    "gemma": gemma_pair,
    "a small tokenizer.json": small_json_pair,
    "older pieces": old_pieces_pair,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS)
def test_texts_become_tokens_and_texts_again_as_in_transformers(tmp_path, kind):
    pair = PAIRS[kind](tmp_path)
    for text in TEXTS:
        tokens = pair.ours.encode(text)
        assert tokens == pair.encode(text), text
        assert pair.ours.decode(tokens) == pair.decode(tokens), text
        if pair.gives_back(text):
            assert pair.ours.decode(tokens) == text
            assert b"".join(map(pair.ours.token_bytes, tokens)) == text.encode()
            assert pair.ours.decode(pair.ours.encode(text, special=False)) == text


def test_every_word_behind_a_special_token_gets_a_space_of_its_own_and_so_does_the_first(tmp_path):
    tokenizer = old_pieces_pair(tmp_path).ours
    for text in ("hi", " hi hi", "hi \n you, 你好 🎉", "", "hi</s>hi"):
        expected = "".join(part if part == "</s>" else part and " " + part for part in re.split("(</s>)", text))
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == expected.encode()


SPLIT = {name: cache(lambda name=name: PAIRS[name](Path())) for name in ("smollm", "gpt-2")}


@pytest.mark.parametrize("name", SPLIT)
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60).filter(spellable))
def test_any_text_is_split_and_merged_as_in_transformers_and_comes_back(text, name):
    ours, encode, *_ = SPLIT[name]()
    tokens = ours.encode(text)
    assert tokens == encode(text)
    assert ours.decode(tokens) == text


def textbook_pieces(text: str) -> list[str]:
    """SentencePiece, one merge at a time: of all neighbours the two that make the best piece, leftmost first."""
    scores = {piece: -i for i, piece in enumerate(pieces())}
    symbols = list(text.replace(" ", SPACE))
    while merged := [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
        at = -max(merged)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    spelled = ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols)
    return [piece for part in spelled for piece in part]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=[*sorted(set(CORPUS) - {"\n", "<", " "}), "X", "🎉"], max_size=30))
def test_pieces_are_merged_as_in_the_textbook(text):
    words = piece_metadata()["tokenizer.ggml.tokens"]
    assert [words[token] for token in gemma().encode(text)] == textbook_pieces(text)


def test_special_and_user_defined_pieces_are_whole():
    words = piece_metadata()["tokenizer.ggml.tokens"]
    whole = [words[i] for i in gemma().encode("<start_of_turn>the\n\n   <b><end_of_turn>")]
    assert whole[0] == "<start_of_turn>"
    assert whole[-4:] == ["\n\n", "   ", "<b>", "<end_of_turn>"]
    assert words.index("<end_of_turn>") not in gemma().encode("<end_of_turn>", special=False)
    assert gemma().bos_id == 2
    assert gemma().eos_ids == {1, words.index("<end_of_turn>")}


@pytest.mark.parametrize("said", [True, None])
def test_a_space_before_the_first_word_where_the_file_says_so_or_nothing(said):
    words, tokenizer = (
        piece_metadata()["tokenizer.ggml.tokens"],
        in_memory(piece_metadata(), 1 << 12, add_space_prefix=said),
    )
    prefixed = tokenizer.encode("the")
    assert "".join(words[i] for i in prefixed) == f"{SPACE}the"
    assert tokenizer.encode("the<bos>the") == [*prefixed, 2, *prefixed]
    assert tokenizer.decode(prefixed) == "the"


def test_user_defined_tokens_of_a_byte_level_vocabulary_are_whole():
    words = [*small_vocabulary(), "<tool call>", "<é>"]
    types = [*gguf_metadata()["tokenizer.ggml.token_type"], 4, 4]
    tokenizer = in_memory(gguf_metadata(), VOCAB_SIZE + 5, tokens=words, token_type=types)
    assert tokenizer.encode("a<tool call><é>") == [words.index("a"), VOCAB_SIZE, VOCAB_SIZE + 1]
    padding = VOCAB_SIZE + 4
    assert tokenizer.decode([VOCAB_SIZE, VOCAB_SIZE + 1, words.index("a"), padding]) == "<tool call><é>a"


@pytest.mark.parametrize(("pre", "num_tokens"), [("llama-bpe", 1), ("qwen2", 5)])
def test_a_word_of_llama_3s_vocabulary_is_a_token_even_if_no_merges_lead_to_it(pre, num_tokens):
    assert len(in_memory(gguf_metadata(), pre=pre, merges=[]).encode("hello")) == num_tokens


def without_byte_7() -> list[int]:
    types = list(piece_metadata()["tokenizer.ggml.token_type"])
    types[piece_metadata()["tokenizer.ggml.tokens"].index("<0x07>")] = 1
    return types


@pytest.mark.parametrize(
    ("metadata", "change", "reason"),
    [
        (gguf_metadata, {"model": "t5"}, r"model 't5' is not supported: byte-level BPE \('gpt2'\) and SentencePiece"),
        (gguf_metadata, {"pre": None}, "the pre-tokenizer 'default' is not supported: smollm, gpt-2, llama-bpe, qwen2"),
        (gguf_metadata, {"pre": ""}, "the pre-tokenizer '' is not supported"),
        (gguf_metadata, {"merges": ["h e", "q zz"]}, "merges do not fit the vocabulary"),
        (gguf_metadata, {"merges": ["he"]}, "merges do not fit the vocabulary"),
        (gguf_metadata, {"tokens": ["a"] * VOCAB_SIZE}, "has a token twice"),
        (gguf_metadata, {"tokens": [*small_vocabulary(), "more"]}, f"has {VOCAB_SIZE + 1} tokens, the model only"),
        (gguf_metadata, {"token_type": [1]}, f"{VOCAB_SIZE} tokens have 1 types"),
        (gguf_metadata, {"eos_token_id": VOCAB_SIZE}, "not in the vocabulary"),
        (gguf_metadata, {"tokens": [f"t{i}" for i in range(VOCAB_SIZE)], "merges": []}, "not byte-level"),
        (piece_metadata, {"scores": [1.0]}, "have 1 scores: the file is damaged"),
        (piece_metadata, {"scores": "high"}, "not a list of numbers"),
        (piece_metadata, {"token_type": "all"}, "not a list of whole numbers"),
        (piece_metadata, {"add_space_prefix": 1}, "not true or false"),
        (piece_metadata, {"token_type": without_byte_7()}, "no token for the byte 7"),
    ],
)
def test_a_vocabulary_that_is_damaged_or_unknown_is_refused(metadata, change, reason):
    with pytest.raises(Invalid, match=reason):
        in_memory(metadata(), VOCAB_SIZE if metadata is gguf_metadata else 1 << 12, **change)


def test_the_fingerprint_tells_vocabularies_apart():
    changes: list[dict[str, Any]] = [{}, {"merges": MERGES[::-1]}, {"token_type": [1] * VOCAB_SIZE}]
    first, second = ([in_memory(gguf_metadata(), **change).fingerprint for change in changes] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_truncation_and_padding_of_a_tokenizer_json_do_not_apply(tmp_path):
    library = small_library()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    tokenizer = huggingface_tokenizer(hf_directory(tmp_path, library), VOCAB_SIZE)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_special_tokens_come_from_the_checkpoints_configuration(tmp_path):
    directory = hf_directory(
        tmp_path,
        small_library(),
        tokenizer_config={"bos_token": "<|im_start|>", "eos_token": {"content": "a"}, "chat_template": TEMPLATE},
        generation_config={"eos_token_id": [3, 4]},
        config={"eos_token_id": 5, "bos_token_id": 9},
    )
    tokenizer = huggingface_tokenizer(directory, VOCAB_SIZE + 10)
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {0, 2, 3, 4, 5, small_vocabulary().index("a")}
    assert tokenizer.chat_template([], None, True) == "<|im_start|>assistant\n"
    assert tokenizer.decode([VOCAB_SIZE + 9]) == "", "padding"


def test_the_template_file_goes_before_the_configuration(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "named {{ bos_token }}"}]
    directory = hf_directory(
        tmp_path, small_library(), tokenizer_config={"bos_token": "<|im_start|>", "chat_template": named}
    )
    assert huggingface_tokenizer(directory, VOCAB_SIZE).chat_template([]) == "named <|im_start|>"
    (directory / "chat_template.jinja").write_text("filed")
    assert huggingface_tokenizer(directory, VOCAB_SIZE).chat_template([]) == "filed"
    (directory / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(Invalid, match=r"chat_template\.jinja: is not UTF-8"):
        huggingface_tokenizer(directory, VOCAB_SIZE)


ONE_LETTER = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a BPE tokenizer"),
        ('{"model": {"type": "WordPiece"}, "decoder": {"type": "WordPiece"}}', "is not a BPE tokenizer"),
        ('{"model": {"type": "BPE"}, "decoder": {"type": "Metaspace"}}', "Metaspace.* is not supported"),
        ('{"model": {"type": "BPE", "vocab": 7}, "decoder": {"type": "ByteLevel"}}', "library cannot read it"),
        (json.dumps({"added_tokens": [], "model": ONE_LETTER, "decoder": BYTE_LEVEL}), "242 bytes have no token"),
        (small_library().to_str(), f"has token {VOCAB_SIZE - 1}, the model's vocabulary ends at 99"),
    ],
)
def test_a_tokenizer_json_that_cannot_be_used_is_refused(tmp_path, content, reason):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(Invalid, match=reason):
        huggingface_tokenizer(tmp_path, 100)
