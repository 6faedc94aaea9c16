from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from decoder.checkpoints.gguf import GgufFile, read_gguf
from decoder.text.codecs import BYTE_ALPHABET
from decoder.text.stored_tokenizers import byte_tokenizer, gguf_tokenizer, huggingface_tokenizer
from decoder.text.tokenizer import Tokenizer
from libsym.errors import Invalid
from tests.decoder.small_checkpoints import (
    MERGES,
    TEMPLATE,
    VOCAB_SIZE,
    gguf_metadata,
    small_library,
    small_vocabulary,
    write_gguf,
)
from tests.decoder.text.vocabularies import (
    ELABORATE,
    NASTY,
    hf_directory,
    share_of_the_longest_wait,
    smollm,
    smollm_file,
    spellable,
    with_pre_tokenizer,
)

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def split_smollm(text: str) -> list[str]:
    """llama.cpp's two expressions for `smollm`: each number character alone, then GPT-2's."""
    return [word for part in regex.split(r"(\p{N})", text) for word in regex.findall(GPT_2, part)]


def split_gpt2(text: str) -> list[str]:
    return regex.findall(GPT_2, text)


class Textbook:
    """Byte-pair encoding as it is described, one merge at a time."""

    def __init__(self, file: GgufFile, split: Callable[[str], list[str]]) -> None:
        self.ids = {token: i for i, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(file.texts("tokenizer.ggml.merges"))}
        types = file.integers("tokenizer.ggml.token_type")
        self.special = regex.compile(
            "(" + "|".join(regex.escape(t) for t, i in self.ids.items() if types[i] == 3) + ")"
        )
        self.split = split

    def encode(self, text: str) -> list[int]:
        tokens = []
        for i, part in enumerate(self.special.split(text)):
            if i % 2:
                tokens.append(self.ids[part])
                continue
            for word in self.split(part):
                tokens += [self.ids[piece] for piece in self._merge([BYTE_ALPHABET[byte] for byte in word.encode()])]
        return tokens

    def _merge(self, pieces: list[str]) -> list[str]:
        while True:
            ranked = [(self.ranks.get(pair, 1 << 60), i) for i, pair in enumerate(pairwise(pieces))]
            rank, i = min(ranked, default=(1 << 60, 0))
            if rank == 1 << 60:
                return pieces
            pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


@pytest.mark.parametrize("text", NASTY)
def test_smollm_splits_and_merges_as_the_textbook_does(text):
    assert smollm().encode(text) == textbook().encode(text)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60).filter(spellable))
def test_any_text_is_split_and_merged_as_in_the_textbook_and_comes_back(text):
    tokens = smollm().encode(text)
    assert tokens == textbook().encode(text)
    assert smollm().decode(tokens) == text


@cache
def textbook() -> Textbook:
    return Textbook(smollm_file(), split_smollm)


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("special", [True, False])
def test_decoding_gives_the_text_back(text, special):
    assert smollm().decode(smollm().encode(text, special=special)) == text


@pytest.mark.parametrize("text", NASTY)
def test_smollm_equals_transformers_fast_tokenizer(text):
    assert smollm().encode(text) == transformers_smollm()(text).input_ids
    tokens = smollm().encode(text)
    assert smollm().decode(tokens) == transformers_smollm().decode(tokens, clean_up_tokenization_spaces=False)


@cache
def transformers_smollm():
    """The tokenizer that SmolLM2's publishers ship: individual digits, then GPT-2's bytes."""
    from transformers import PreTrainedTokenizerFast

    tokens, merges = smollm_file().texts("tokenizer.ggml.tokens"), smollm_file().texts("tokenizer.ggml.merges")
    library = LibraryTokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=library,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
    )
    fast.chat_template = smollm_file().text("tokenizer.chat_template")
    return fast


@cache
def gpt_2_three_ways():
    """Ours, transformers' and the textbook's."""
    from transformers import GPT2Tokenizer

    file = with_pre_tokenizer("gpt-2")
    vocabulary = {token: i for i, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ")) for merge in file.texts("tokenizer.ggml.merges")]
    theirs = GPT2Tokenizer(vocab=vocabulary, merges=merges)
    return gguf_tokenizer(file, 49152), theirs, Textbook(file, split_gpt2)


@pytest.mark.parametrize("text", NASTY)
def test_the_gpt_2_pre_tokenizer_equals_transformers_gpt_2(text):
    plain = text.replace("<|", "< |")  # special tokens are compared elsewhere
    ours, theirs, textbook = gpt_2_three_ways()
    assert ours.encode(plain) == theirs(plain).input_ids == textbook.encode(plain)


@cache
def llama_3_both_ways():
    """Ours and transformers'."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = with_pre_tokenizer("llama-bpe")
    tokens = file.texts("tokenizer.ggml.tokens")

    class FromLists(TikTokenConverter):
        def tokenizer(self) -> LibraryTokenizer:
            merges = [tuple(merge.split(" ")) for merge in file.texts("tokenizer.ggml.merges")]
            return LibraryTokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=True))

    return gguf_tokenizer(file, 49152), FromLists(extra_special_tokens=tokens[:17]).converted()


@pytest.mark.parametrize("text", NASTY)
def test_the_llama_3_pre_tokenizer_equals_transformers_converter(text):
    ours, theirs = llama_3_both_ways()
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["default", "deepseek-llm", ""])
def test_a_pre_tokenizer_that_nobody_verified_is_refused(name):
    with pytest.raises(Invalid, match=r"the pre-tokenizer .* is not supported: smollm, gpt-2, llama-bpe, qwen2 are"):
        gguf_tokenizer(with_pre_tokenizer(name), 49152)


def test_special_tokens_are_text_when_asked():
    as_special, as_text = (smollm().encode("<|im_end|>", special=special) for special in (True, False))
    assert as_special == [2]
    assert len(as_text) > 1
    assert smollm().decode(as_text) == "<|im_end|>"


@pytest.mark.parametrize(("text", "name", "at"), [("ab\x04", "U\\+0004", 2), ("é🎉\U00041234", "U\\+41234", 2)])
def test_a_character_without_a_token_is_an_error_and_not_dropped(text, name, at):
    with pytest.raises(Invalid, match=f"{name} at {at}, which this model's vocabulary cannot spell"):
        smollm().encode(text)


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(Invalid, match="lone surrogate at 1"):
        smollm().encode("a\ud800")


def test_tokens_out_of_range_are_refused():
    for tokens in ([-1], [0, 49152], [1 << 40]):
        with pytest.raises(Invalid, match="out of range: this model's are 0 to 49151"):
            smollm().decode(tokens)
    with pytest.raises(Invalid, match="token -1 is out of range"):
        smollm().token_bytes(-1)


def test_half_a_character_decodes_to_a_replacement_and_its_bytes_are_exact():
    tokens = smollm().encode("🦜")
    assert len(tokens) > 1
    assert "\ufffd" in smollm().decode(tokens[:1])
    assert b"".join(smollm().token_bytes(token) for token in tokens) == "🦜".encode()


@pytest.mark.parametrize("text", NASTY)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text):
    assert b"".join(map(smollm().token_bytes, smollm().encode(text))) == text.encode()


def test_the_end_tokens_of_smollm_include_the_chats_end():
    assert smollm().eos_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert smollm().bos_id == 1


def test_the_special_tokens_of_smollm_are_those_that_text_never_has_in_it():
    special = smollm().special_ids
    assert smollm().eos_ids <= special
    for token in special:
        text = smollm().token_bytes(token).decode()
        assert smollm().encode(text) == [token]
        assert token not in smollm().encode(text, special=False)


@pytest.mark.slow
@pytest.mark.parametrize("text", NASTY)
def test_an_encoder_of_its_own_encodes_as_the_tokenizer_does(text):
    if spellable(text):
        assert smollm().own_encoder()(text) == smollm().encode(text, special=False)


def test_several_threads_may_encode_at_once():
    from concurrent.futures import ThreadPoolExecutor

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


def test_a_long_text_keeps_no_other_thread_waiting():
    """Neither who encodes a short one, nor who runs Python: the daemon's thread does both."""
    tokenizer, text = smollm(), "hello world " * 40_000
    share = share_of_the_longest_wait(lambda: tokenizer.encode(text), lambda: tokenizer.encode("hi", special=False))
    assert share < 0.5


MESSAGES = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> & <b>"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "  c\n"}],
]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_template_gives_transformers_prompt(messages, add_generation_prompt):
    expected = transformers_smollm().apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert smollm().chat_template(messages, None, add_generation_prompt) == expected


TOOLS = [{"type": "function", "function": {"name": "grüßen", "parameters": {"a": [1, None, True, "<&'\">"]}}}]


def small_tokenizer(tmp_path: Path, template: str | None = TEMPLATE) -> Tokenizer:
    metadata = {**gguf_metadata(), "tokenizer.chat_template": template}
    if template is None:
        del metadata["tokenizer.chat_template"]
    return gguf_tokenizer(read_gguf(write_gguf(tmp_path / "small.gguf", metadata)), VOCAB_SIZE)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_an_elaborate_template_gives_transformers_prompt(tmp_path, tools):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=small_library(), bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=ELABORATE
    )
    messages = [
        {"role": "user", "content": " x "},
        {"role": "tool", "content": "-"},
        {"role": "assistant", "content": "y"},
    ]
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert small_tokenizer(tmp_path, ELABORATE).chat_template(messages, tools) == expected


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('no\nsystem role') }}", [], "refused the messages: no system role"),
        ("{% if %}", [], "broken at line 1"),
        ("{{ messages[0]['content'] + 'x' }}", [{"role": "user"}], "refused the messages"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": 7}], "refused the messages"),
        ("{{ messages.append(1) }}", [], "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", [], "refused the messages"),
        ("{% for i in range(10**9) %}{% endfor %}", [], "refused the messages"),
        (None, [], "has no chat template"),
        (TEMPLATE, "hello", "a conversation is a list of messages"),
        (TEMPLATE, ["hello"], "a conversation is a list of messages"),
    ],
)
def test_what_a_template_objects_to_is_one_line(tmp_path, template, messages, reason):
    with pytest.raises(Invalid, match=reason) as caught:
        small_tokenizer(tmp_path, template).chat_template(messages)
    assert "\n" not in str(caught.value)


def test_a_template_is_given_variables_but_none_of_its_own(tmp_path):
    tokenizer = small_tokenizer(tmp_path, "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}")
    turns, thinking = [{"role": "user", "content": "a"}], {"enable_thinking": True}
    assert tokenizer.chat_template(turns) == "a"
    assert tokenizer.chat_template(turns, variables=thinking) == "<think>a"
    assert tokenizer.chat_tokens(turns, variables=thinking) == tokenizer.encode("<think>a")
    for name in ("messages", "bos_token"):
        with pytest.raises(Invalid, match=f"{name} is no variable"):
            tokenizer.chat_template(turns, variables={name: []})


def test_a_gguf_vocabulary_with_user_defined_tokens_keeps_them_whole(tmp_path):
    metadata = gguf_metadata()
    tokens = [*small_vocabulary(), "<tool call>"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 4],
    }
    tokenizer = gguf_tokenizer(read_gguf(write_gguf(tmp_path / "a.gguf", metadata)), VOCAB_SIZE + 5)
    assert tokenizer.encode("a<tool call>") == [tokens.index("a"), VOCAB_SIZE]
    assert tokenizer.decode([VOCAB_SIZE, tokens.index("a"), VOCAB_SIZE + 4]) == "<tool call>a"  # the last is padding


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.merges": ["h e", "q zz"]}, "merges do not fit the vocabulary"),
        ({"tokenizer.ggml.merges": ["he"]}, "merges do not fit the vocabulary"),
        ({"tokenizer.ggml.tokens": ["a"] * VOCAB_SIZE}, "has a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, f"{VOCAB_SIZE} tokens have 1 types"),
        ({"tokenizer.ggml.eos_token_id": VOCAB_SIZE}, "not in the vocabulary"),
        (
            {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB_SIZE)], "tokenizer.ggml.merges": ["t1 t2"]},
            "merges do not fit|not byte-level",
        ),
    ],
)
def test_a_damaged_gguf_vocabulary_is_refused(tmp_path, change, reason):
    file = read_gguf(write_gguf(tmp_path / "a.gguf", {**gguf_metadata(), **change}))
    with pytest.raises(Invalid, match=reason):
        gguf_tokenizer(file, VOCAB_SIZE)


def test_more_tokens_than_the_model_has_are_refused(tmp_path):
    with pytest.raises(Invalid, match=f"has {VOCAB_SIZE} tokens, the model only {VOCAB_SIZE - 1}"):
        gguf_tokenizer(read_gguf(write_gguf(tmp_path / "a.gguf")), VOCAB_SIZE - 1)


def test_the_fingerprint_tells_vocabularies_apart(tmp_path):
    metadata = gguf_metadata()
    fingerprints = set()
    for change in ({}, {"tokenizer.ggml.merges": MERGES[::-1]}, {"tokenizer.ggml.token_type": [1] * VOCAB_SIZE}):
        file = read_gguf(write_gguf(tmp_path / "a.gguf", {**metadata, **change}))
        fingerprints.add(gguf_tokenizer(file, VOCAB_SIZE).fingerprint)
        assert gguf_tokenizer(file, VOCAB_SIZE).fingerprint in fingerprints
    assert len(fingerprints) == 3


def piece_library() -> LibraryTokenizer:
    """A tokenizer of the older kind: pieces with U+2581 for a space, bytes where no piece fits."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    library = LibraryTokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return library


@pytest.mark.parametrize("text", NASTY)
def test_a_tokenizer_json_encodes_as_the_library_does_and_decodes_exactly(tmp_path, text):
    tokenizer = huggingface_tokenizer(hf_directory(tmp_path, small_library()), VOCAB_SIZE + 10)
    assert tokenizer.encode(text) == small_library().encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([VOCAB_SIZE + 9]) == ""


@pytest.mark.parametrize("text", ["hi", " hi hi", "hi \n you, 你好 🎉", "", "hi</s>hi"])
def test_a_tokenizer_of_pieces_gives_the_text_and_the_bytes_back(tmp_path, text):
    tokenizer = huggingface_tokenizer(hf_directory(tmp_path, piece_library()), 300)
    tokens = tokenizer.encode(text)
    assert tokens == piece_library().encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokens) == piece_library().decode(tokens, skip_special_tokens=False)
    # Every word after a special token gets a space of its own, and so does the beginning.
    expected = "".join(part if part == "</s>" else part and " " + part for part in regex.split("(</s>)", text))
    assert b"".join(map(tokenizer.token_bytes, tokens)) == expected.encode()


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
    tokenizer = huggingface_tokenizer(directory, VOCAB_SIZE)
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {0, 2, 3, 4, 5, small_vocabulary().index("a")}
    assert tokenizer.chat_template([], None, True) == "<|im_start|>assistant\n"


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "is not JSON"),
        (b"{}", "is not a BPE tokenizer"),
        (b'{"model": {"type": "WordPiece"}, "decoder": {"type": "WordPiece"}}', "is not a BPE tokenizer"),
        (b'{"model": {"type": "BPE"}, "decoder": {"type": "Metaspace"}}', "Metaspace.* is not supported"),
        (b'{"model": {"type": "BPE", "vocab": 7}, "decoder": {"type": "ByteLevel"}}', "library cannot read it"),
        (
            (
                b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": '
                b'{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}}'
            ),
            "242 bytes have no token",
        ),
    ],
)
def test_a_tokenizer_json_that_cannot_be_used_is_refused(tmp_path, content, reason):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(Invalid, match=reason):
        huggingface_tokenizer(tmp_path, VOCAB_SIZE)


def test_a_tokenizer_json_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(Invalid, match=f"has token {VOCAB_SIZE - 1}, the model's vocabulary ends at 99"):
        huggingface_tokenizer(hf_directory(tmp_path, small_library()), 100)


@settings(max_examples=200, deadline=None)
@given(st.text(), st.booleans())
def test_the_byte_tokenizer_gives_any_text_back(text, special):
    tokenizer = byte_tokenizer(259)
    assert tokenizer.decode(tokenizer.encode(text, special=special)) == text


def test_the_byte_tokenizer_knows_three_special_tokens():
    tokenizer = byte_tokenizer(300)
    assert tokenizer.encode("a<bos><eos><pad>") == [97, 256, 257, 258]
    assert tokenizer.encode("<eos>", special=False) == list(b"<eos>")
    assert tokenizer.decode([256, 255, 97, 299]) == "<bos>\ufffda"
    assert tokenizer.eos_ids == {257}
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.own_encoder()("<eos>") == list(b"<eos>")
    assert tokenizer.bos_id == 256
    assert tokenizer.chat_template([{"role": "user", "content": "hi"}]) == "<bos>user: hi\nassistant: "
    with pytest.raises(Invalid, match="at least 259"):
        byte_tokenizer(258)
