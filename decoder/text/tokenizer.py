"""The tokenizer of one model: text to tokens and back.

A `Codec` knows the vocabulary. `Tokenizer` adds the tokens that end an answer, the chat template and a fingerprint.
Encoding adds no tokens. A prompt that needs the beginning-of-text token spells it out, as chat templates do. So
`decode(encode(text)) == text`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from decoder.text.chat import ChatTemplate, local_time
from decoder.text.cuts import ByteCutter, TextCut, joined_bytes, spans
from decoder.text.marks import MarkedPrompt, Marks, Render
from libsym.errors import Invalid

Part: TypeAlias = str | int
"""A part of a text: the id of a special token, or text without special tokens."""

_ASKED = {"role": "user", "content": "x"}
_WHOLE_CONVERSATION = "give chat_tokens() the whole conversation, without after_answer"
_NOT_SHOWN = f"the model's chat template does not show an answer just as it is: {_WHOLE_CONVERSATION}"
_EXCERPT = 40
"""Maximum number of letters of a text that an error shows."""


class Codec(Protocol):
    """A vocabulary. The caller checks token ids."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def split(self, text: str) -> list[Part]:
        """Split a text into the special tokens that are spelled out in it, and the texts between them."""
        ...

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Encode the parts. Only parts that are ids become special tokens."""
        ...

    @property
    def special_texts(self) -> Iterable[str]:
        """Return the texts of special tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def cut(self, text: str) -> TextCut | None: ...


class Tokenizer:
    """A model's tokenizer. Several threads may use it concurrently."""

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
        """Size of the model's vocabulary. Ids beyond the tokenizer's own tokens are padding, and stand for no text."""
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Tokens that end an answer."""
        self.special_ids = special_ids
        """Tokens that stand for no text. Texts that a grammar allows never contain them."""
        self.fingerprint = fingerprint

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids. Special tokens that the text spells out are recognised, unless `special` is False."""
        return self._codec.encode(_unicode(text), special=special)

    def own_encoder(self) -> Callable[[str], list[int]]:
        """Return a function that encodes text and does not recognise special tokens."""
        return lambda text: self._codec.encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self._codec.decode(self._checked(tokens))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. They may be only part of a character."""
        self._checked([token])
        return self._codec.token_bytes(token)

    def cut(self, text: str) -> TextCut | None:
        """Return a place where a text may be cut, whatever text follows. None: there is no such place yet.

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
        """Return the prompt for these messages, in the format that the model was trained on."""
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
        """Return the tokens of a chat's prompt. Only the template can write special tokens. All other parts are text.

        `after_answer`: the tokens follow an answer of the assistant. They end the answer, and continue with the
        messages. The file already has the top of the conversation. Invalid: the messages would change the top.
        `checkpoint` is called before each rendering. Dozens of renderings are possible. An exception from `checkpoint`
        ends the call.
        """
        now = local_time()  # the template runs several times, and must see the same time

        def render(messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
            checkpoint()
            return self._chat.render(messages, tools, add_generation_prompt, now, variables)

        if after_answer:
            return self._next_turn(render, messages, tools)
        prompt = self._marks.render(render, messages, tools)
        if not prompt.hidden:
            tokens = self.encode(prompt.text)
            # A tokenizer that normalizes text may find more special tokens than the text spells out.
            if sum(token in self.special_ids for token in tokens) == len(self._marks.whole_in(prompt.text)):
                return tokens
        return self._codec.encode_parts(self._parts(prompt))

    def _next_turn(self, render: Render, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
        """Return the tokens behind an answer. Invalid: these tokens would differ after more turns."""
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

    def _parts(self, prompt: MarkedPrompt) -> list[Part]:
        parts = self._codec.split(_unicode(prompt.text))
        return [prompt.shown(part) if isinstance(part, str) else part for part in parts]

    def _checked(self, tokens: Sequence[int]) -> Sequence[int]:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise Invalid(f"token {token} is out of range: this model's tokens are 0 to {self.vocab_size - 1}")
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
    """Refuse messages and tools that change the text before an answer: the file already has this text."""

    def top_of(messages: list[dict[str, Any]]) -> str | None:
        """Return the prompt before the answer, without tools. None: the template refuses the messages."""
        try:
            return _around(render([*turn, *messages], None), turn[-1]["content"])[0]
        except Invalid:
            return None

    # Some templates write the last answer differently, for example with its thoughts.
    known = [known for known in (top_of([]), top_of([_ASKED])) if known is not None]
    if top in known:
        return
    if tools and top_of(messages) in known:
        raise Invalid(
            "the model's chat template writes tools at the top of a conversation: give tools to the chat_tokens() that "
            f"begins the conversation, and no tools with after_answer, or {_WHOLE_CONVERSATION}"
        )
    usual = next(iter(known), "")
    at = next((i for i, (a, b) in enumerate(zip(top, usual, strict=False)) if a != b), min(len(top), len(usual)))
    raise Invalid(
        "the model's chat template writes the top of a conversation otherwise for these messages, from "
        f"{top[at : at + _EXCERPT]!r} on: {_WHOLE_CONVERSATION}"
    )


def _around(text: str, answer: str) -> tuple[str, str]:
    """Return the text before an answer and the text behind it."""
    if text.count(answer) != 1:
        raise Invalid(_NOT_SHOWN)
    before, _, behind = text.partition(answer)
    return before, behind


def _halves(parts: list[Part], answer: str) -> tuple[list[Part], list[Part]]:
    """Return the parts up to the end of an answer, and the parts behind it."""
    texts = [part for part in parts if isinstance(part, str)]
    if sum(text.count(answer) for text in texts) != 1:
        raise Invalid(_NOT_SHOWN)
    (text,) = (text for text in texts if answer in text)
    at, end = parts.index(text), text.index(answer) + len(answer)
    return [*parts[:at], text[:end]], [*([text[end:]] if text[end:] else []), *parts[at + 1 :]]


class ByteCodec:
    """The tiny model's vocabulary: a token for each byte, then `<bos>`, `<eos>`, `<pad>`."""

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

    def cut(self, text: str) -> TextCut | None:
        return self._CUTTER.find(text)


def fingerprint(*parts: Iterable[str]) -> str:
    """Return a hash of lists of strings, in order. The hash covers the length of each list and each string."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        encoded = [text.encode() for text in part]
        digest.update(f"{len(encoded)}:{','.join(map(str, map(len, encoded)))};".encode())
        digest.update(b"".join(encoded))
    return digest.hexdigest()
