"""Text to tokens and back, for one model.

A `Codec` knows the vocabulary; `Tokenizer` adds what programs ask for: the tokens that end an answer, the
chat template, a fingerprint. Encoding adds nothing of its own: a prompt that should begin with the
beginning-of-text token says so (a chat template does), and `decode(encode(text)) == text`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from decoder.text.chat import ChatTemplate, local_time
from decoder.text.cuts import ByteCutter, Cut, joined_bytes, spans
from decoder.text.marks import Marks, Prompt, Render
from libsym.errors import Invalid

Part: TypeAlias = str | int
"""Of a text: a special token, or text in which nothing is one."""

_ASKED = {"role": "user", "content": "x"}
_WHOLE_CONVERSATION = "give chat_tokens() the whole conversation, without after_answer"
_NOT_SHOWN = f"the model's chat template does not show an answer just as it is: {_WHOLE_CONVERSATION}"
_EXCERPT = 40
"""Letters of a text that an error shows."""


class Codec(Protocol):
    """A vocabulary. Token ids are checked by the caller."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def split(self, text: str) -> list[Part]:
        """The special tokens that are spelled out in a text, and what is between them."""
        ...

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """As `encode` of the parts' text, with the special tokens that the parts are and no others."""
        ...

    @property
    def special_texts(self) -> Iterable[str]:
        """Give the spellings of special tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def cut(self, text: str) -> Cut | None: ...


class Tokenizer:
    """A model's tokenizer; safe to use from several threads."""

    __slots__ = ("_chat", "_codec", "_marks", "bos_id", "eos_ids", "fingerprint", "special_ids", "vocab_size")

    def __init__(
        self,
        codec: Codec,
        *,
        vocab_size: int,
        bos_id: int | None,
        eos_ids: frozenset[int],
        special_ids: frozenset[int],
        chat: ChatTemplate,
        fingerprint: str,
    ) -> None:
        self._codec = codec
        self._chat = chat
        self._marks = Marks(codec.special_texts)
        self.vocab_size = vocab_size
        """The model's: ids beyond the tokenizer's own are padding and stand for no text."""
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Tokens after which an answer is over."""
        self.special_ids = special_ids
        """Tokens that stand for no text: a grammar's text never has them in it."""
        self.fingerprint = fingerprint

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; special tokens that the text spells out are recognised unless `special` is False."""
        return self._codec.encode(_unicode(text), special=special)

    def own_encoder(self) -> Callable[[str], list[int]]:
        """An `encode` without special tokens."""
        return lambda text: self._codec.encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 give U+FFFD."""
        return self._codec.decode(self._checked(tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for: part of a character, perhaps."""
        self._checked([token])
        return self._codec.token_bytes(token)

    def cut(self, text: str) -> Cut | None:
        """Where the beginning of a text may be cut: its pieces give the tokens of the whole, whatever follows.

        `encode(text[:cut.end]) + encode(text[cut.resume:] + more) == encode(text + more)`, with special tokens.
        """
        return self._codec.cut(text)

    def chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt that the model was trained to see for these messages."""
        return self._chat.render(messages, tools, add_generation_prompt, variables=variables)

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        after_answer: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        checkpoint: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """The tokens of that prompt: special tokens are those that the template writes, messages and tools are text.

        `after_answer`: those that follow an answer of the assistant's: they end it, and go on with the messages.
        What the template writes at the top of a conversation is in the file already: Invalid where that would change.
        `checkpoint` is called before each rendering, of which there may be dozens: what it raises ends the call.
        """
        now = local_time()  # the template runs several times, and has to see the same

        def render(messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
            checkpoint()
            return self._chat.render(messages, tools, add_generation_prompt, now, variables)

        if after_answer:
            return self._next_turn(render, messages, tools)
        prompt = self._marks.render(render, messages, tools)
        if not prompt.hidden:
            tokens = self.encode(prompt.text)
            # Where a tokenizer normalizes what it looks for, there may be more special tokens than are spelled out.
            if sum(token in self.special_ids for token in tokens) == len(self._marks.whole_in(prompt.text)):
                return tokens
        return self._codec.encode_parts(self._parts(prompt))

    def _next_turn(self, render: Render, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
        """Give the text that a template writes behind an answer, the same however many turns were before."""
        answer = self._marks.word()
        turn = [_ASKED, {"role": "assistant", "content": answer}]
        earlier = [_ASKED, {"role": "assistant", "content": "x"}]
        prompt = self._marks.render(lambda messages, tools: render([*turn, *messages], tools), messages, tools)
        head, tail = _halves(self._parts(prompt), answer)
        top, behind = _around(prompt.plain, answer)
        if behind != _around(render([*earlier, *turn, *messages], tools), answer)[1]:
            raise Invalid(f"the model's chat template counts turns: {_WHOLE_CONVERSATION}")
        _check_top(render, turn, messages, tools, top)
        before, tokens = self._codec.encode_parts(head), self._codec.encode_parts([*head, *tail])
        if tokens[: len(before)] != before:
            raise Invalid(f"the model's tokenizer joins an answer and what ends it: {_WHOLE_CONVERSATION}")
        return tokens[len(before) :]

    def _parts(self, prompt: Prompt) -> list[Part]:
        parts = self._codec.split(_unicode(prompt.text))
        return [prompt.shown(part) if isinstance(part, str) else part for part in parts]

    def _checked(self, tokens: Sequence[int]) -> Sequence[int]:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise Invalid(f"token {token} is out of range: this model's are 0 to {self.vocab_size - 1}")
        return tokens


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"the text has a lone surrogate at {error.start}: it is not Unicode text") from error
    return text


def _check_top(
    render: Render, turn: list[dict[str, Any]], messages: list[dict[str, Any]], tools: list[Any] | None, top: str
) -> None:
    """Refuse messages and tools that a template shows before an answer: that part is in the file already."""

    def top_of(messages: list[dict[str, Any]]) -> str | None:
        """Without tools. None: the template refuses such messages."""
        try:
            return _around(render([*turn, *messages], None), turn[-1]["content"])[0]
        except Invalid:
            return None

    # Some write the last answer in another way, its thoughts for example.
    known = [known for known in (top_of([]), top_of([_ASKED])) if known is not None]
    if top in known:
        return
    if tools and top_of(messages) in known:
        raise Invalid(
            "the model's chat template writes tools at the top of a conversation: give them to the chat_tokens() that "
            f"begins it, and none with after_answer, or {_WHOLE_CONVERSATION}"
        )
    usual = next(iter(known), "")
    at = next((i for i, (a, b) in enumerate(zip(top, usual, strict=False)) if a != b), min(len(top), len(usual)))
    raise Invalid(
        "the model's chat template writes the top of a conversation otherwise for these messages, from "
        f"{top[at : at + _EXCERPT]!r} on: {_WHOLE_CONVERSATION}"
    )


def _around(text: str, answer: str) -> tuple[str, str]:
    """Give the parts of a text before an answer and behind."""
    if text.count(answer) != 1:
        raise Invalid(_NOT_SHOWN)
    before, _, behind = text.partition(answer)
    return before, behind


def _halves(parts: list[Part], answer: str) -> tuple[list[Part], list[Part]]:
    """Give the parts up to the end of an answer, and those behind."""
    texts = [part for part in parts if isinstance(part, str)]
    if sum(text.count(answer) for text in texts) != 1:
        raise Invalid(_NOT_SHOWN)
    (text,) = (text for text in texts if answer in text)
    at, end = parts.index(text), text.index(answer) + len(answer)
    return [*parts[:at], text[:end]], [*([text[end:]] if text[end:] else []), *parts[at + 1 :]]


class ByteCodec:
    """A token for each byte, then `<bos>`, `<eos>`, `<pad>`: the tiny model's vocabulary."""

    BOS, EOS, PAD = 256, 257, 258
    VOCAB_SIZE = 259
    _SPECIAL = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}  # noqa: RUF012 - never changed
    _TEXT_OF = {token: text.encode() for text, token in _SPECIAL.items()}  # noqa: RUF012 - never changed
    _SPLIT = re.compile("(<bos>|<eos>|<pad>)")
    _CUTTER = ByteCutter(tuple(_SPECIAL))

    def encode(self, text: str, *, special: bool) -> list[int]:
        tokens: list[int] = []
        for start, end in spans(text, self.cut):
            piece = text[start:end]
            for part in self._SPLIT.split(piece) if special else [piece]:
                tokens.extend([self._SPECIAL[part]] if special and part in self._SPECIAL else part.encode())
        return tokens

    def split(self, text: str) -> list[Part]:
        return [self._SPECIAL.get(part, part) for part in self._SPLIT.split(text) if part]

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        return [
            token for part in parts for token in ([part] if isinstance(part, int) else self.encode(part, special=False))
        ]

    @property
    def special_texts(self) -> Iterable[str]:
        return self._SPECIAL

    def decode(self, tokens: Sequence[int]) -> str:
        return joined_bytes(self.token_bytes, tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < self.BOS else self._TEXT_OF.get(token, b"")

    def cut(self, text: str) -> Cut | None:
        return self._CUTTER.find(text)


def fingerprint(*parts: Iterable[str]) -> str:
    """A hash over lists of strings, in order; each string and each list is delimited by its length."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        encoded = [text.encode() for text in part]
        digest.update(f"{len(encoded)}:{','.join(map(str, map(len, encoded)))};".encode())
        digest.update(b"".join(encoded))
    return digest.hexdigest()
