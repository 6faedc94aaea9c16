"""Vocabularies, chat templates and texts that the tests of tokenizers share."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from decoder.checkpoints.gguf import GgufFile, read_gguf
from decoder.model import packaged_gguf
from decoder.text.stored_tokenizers import gguf_tokenizer
from decoder.text.tokenizer import Tokenizer
from tests.decoder.small_checkpoints import VOCAB_SIZE, gguf_metadata

NASTY = [
    "",
    " ",
    "   leading and trailing   ",
    "Hello world",
    "it's they're I'LL don't 'Tis",
    "pi is 3.14159, year 2024! 1234567890 a  1   22    333",
    "def f(x):\n    return x**2\n\n\n\t# tab\r\nCRLF\r\n\r\n   \n  end",
    "ünïcödé 你好，世界 こんにちは 안녕 עברית العربية हिन्दी",  # noqa: RUF001 - other scripts on purpose
    "🎉👩‍👩‍👧‍👦🇩🇪 \u200d\u200b\u00a0\u2028\ufeff",
    "e\u0301 vs \u00e9, ﬁ ligature, ½ ² Ⅷ ٣ ৪",  # noqa: RUF001 - other digits on purpose
    "a\x00b\x01c\x7fd\x85e\xa0f\xad",
    "!!!???...---___***###@@@$$$%%%^^^&&&",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start",
    "https://example.com/a?b=c&d=%20#x",
    "\U0001d54f\U00020000\ue000",
    "ĠĊ ▁ <0x0A> \\u0041",
    "x" * 300 + " " * 70 + "\n" * 9,
]
SPACE = "\u2581"
CORPUS = "the theatre there them in inn nine ninety banana bandana 12 123 1212 e\u0301te\u0301 你好你 <b> \t  \n"
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["\n", "\n\n", "  ", "   ", "<b>", "</s>"]
ELABORATE = """
{%- if tools %}
  {{- '<|im_start|>system\\n' + (tools | tojson(indent=2)) + '\\n' }}
{%- endif %}
{%- set ns = namespace(last=none) %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('role ' + message.role) }}{% endif %}
  {% generation %}
{{ bos_token }}{{ message.role | upper }}: {{ message.content | trim }}{{ eos_token }}
  {% endgeneration %}
  {%- set ns.last = loop.index %}
{% endfor %}
{{ ns.last }}{{ unheard_of }}{{ strftime_now('%%') }}
{% if add_generation_prompt %}>{% endif %}
"""
GEMMA = """{{ bos_token }}
{%- set is_begun = messages[0]['role'] == 'system' -%}
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' if is_begun else "" -%}
{%- set loop_messages = messages[1:] if is_begun else messages -%}
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
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {%- set content = message.content %}
        {%- if message.role == "assistant" and '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- (tool_call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@cache
def smollm_file() -> GgufFile:
    return read_gguf(packaged_gguf())


@cache
def with_pre_tokenizer(name: str) -> Tokenizer:
    """SmolLM2's vocabulary, whose texts are split as another family's are."""
    metadata = {**smollm_file().metadata, "tokenizer.ggml.pre": name}
    return gguf_tokenizer(dataclasses.replace(smollm_file(), metadata=metadata), 49152)


def smollm() -> Tokenizer:
    return with_pre_tokenizer("smollm")


def in_memory(metadata: Mapping[str, Any], vocab_size: int = VOCAB_SIZE, **changes: Any) -> Tokenizer:
    """The tokenizer of a file with such metadata; of `tokenizer.ggml.*` some keys are changed, or (None) left out."""
    metadata = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return gguf_tokenizer(GgufFile(Path("small.gguf"), kept, {}), vocab_size)


def templated(template: str | None) -> Tokenizer:
    return in_memory({**gguf_metadata(), "tokenizer.chat_template": template})


def bpe(tokens: list[str], merges: list[str], **options: Any) -> LibraryTokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    return LibraryTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs, **options))


def spellable(text: str) -> bool:
    """SmolLM2's vocabulary has no token for these bytes."""
    return not set(text.encode()) & {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


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


def hf_directory(tmp_path: Path, library: LibraryTokenizer, **files: object) -> Path:
    library.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def share_of_the_longest_wait(work: Callable[[], object], beside: Callable[[], object]) -> float:
    """How much of a work's processor time passes, at most, between two turns of a thread that goes on beside it.

    The best of three tries, since the machine may keep the thread waiting, too.
    """
    return min(_share_of_the_longest_wait(work, beside) for _ in range(3))


def _share_of_the_longest_wait(work: Callable[[], object], beside: Callable[[], object]) -> float:
    may_begin, turns_s = threading.Event(), [0.0]

    def timed() -> None:
        may_begin.wait()
        began_s = time.thread_time()
        work()
        took_s.append(time.thread_time() - began_s)

    took_s = list[float]()
    other = threading.Thread(target=timed)
    other.start()
    assert other.ident is not None
    clock = time.pthread_getcpuclockid(other.ident)
    began_s = time.clock_gettime(clock)
    may_begin.set()
    while not took_s:
        beside()
        with suppress(OSError):  # the thread has ended
            turns_s.append(time.clock_gettime(clock) - began_s)
    other.join()
    turns_s = [each for each in turns_s if each < took_s[0]] + took_s
    return max(end - begin for begin, end in pairwise(turns_s)) / took_s[0]
