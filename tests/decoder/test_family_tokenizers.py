"""Tokenizers and chat templates of the families beside SmolLM2, on small vocabularies of their kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, gguf_metadata, small_library, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import NASTY, share_of_the_longest_wait, with_pre_tokenizer

from decoder.checkpoints.gguf import GgufFile, read_gguf
from decoder.text.tokenizer import Tokenizer
from decoder.text.vocabulary import gguf_tokenizer, huggingface_tokenizer, piece_merges
from libsym.errors import Invalid

SPACE = "\u2581"
CORPUS = "the theatre there them in inn nine ninety banana bandana 12 123 1212 e\u0301te\u0301 你好你 <b> \t  \n"
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["\n", "\n\n", "  ", "   ", "<b>", "</s>"]


@cache
def pieces() -> list[str]:
    """Every substring of up to four characters of the corpus, longer ones of two words."""
    text = CORPUS.replace(" ", SPACE)
    short = {text[at : at + size] for size in range(1, 5) for at in range(len(text) - size + 1)}
    return sorted((short | {f"{SPACE}the", "theatre", "banana", "nana"}) - set(USER_DEFINED), key=hash_of)


def hash_of(piece: str) -> int:
    """An order that has nothing to do with the alphabet and is the same in every run."""
    return sum(ord(char) * 31**at for at, char in enumerate(piece)) % 1009


@cache
def piece_metadata(add_space_prefix: bool = False) -> dict[str, Any]:
    letters = pieces()
    tokens = [*CONTROL, *USER_DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    metadata = {key: value for key, value in gguf_metadata().items() if not key.startswith("tokenizer.")}
    return metadata | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(letters)) + [float(-i) for i in range(len(letters))],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, 3] + [4] * len(USER_DEFINED) + [6] * 256 + [1] * len(letters),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


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


GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>' + message.role }}
            {{- '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
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
