"""Text to tokens and back, for one model.

A `Codec` knows the vocabulary; `Tokenizer` adds what programs ask for: the tokens that end an answer, the
chat template, a fingerprint. Encoding adds nothing of its own: a prompt that should begin with the
beginning-of-text token says so (a chat template does), and `decode(encode(text)) == text`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from decoder.chat import ChatTemplate
from decoder.cuts import ByteCutter, Cut
from libsym.errors import Invalid


class Codec(Protocol):
    """A vocabulary. Token ids are checked by the caller."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def cut(self, text: str) -> Cut | None: ...

    def twin(self) -> Codec:
        """One that shares no lock with this."""
        ...


class Tokenizer:
    """A model's tokenizer; safe to use from several threads."""

    __slots__ = ("_chat", "_codec", "bos_id", "eos_ids", "fingerprint", "special_ids", "vocab_size")

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
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Invalid(f"the text has a lone surrogate at {error.start}: it is not Unicode text") from error
        return self._codec.encode(text, special=special)

    def own_encoder(self) -> Callable[[str], list[int]]:
        """An `encode` without special tokens that never waits for one who encodes a long text."""
        twin = self._codec.twin()
        return lambda text: twin.encode(text, special=False)

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
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt that the model was trained to see for these messages."""
        return self._chat.render(messages, tools, add_generation_prompt)

    def _checked(self, tokens: Sequence[int]) -> Sequence[int]:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise Invalid(f"token {token} is out of range: this model's are 0 to {self.vocab_size - 1}")
        return tokens


class ByteCodec:
    """A token for each byte, then `<bos>`, `<eos>`, `<pad>`: the tiny model's vocabulary."""

    BOS, EOS, PAD = 256, 257, 258
    VOCAB_SIZE = 259
    _SPECIAL = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}  # noqa: RUF012 - never changed
    _TEXT_OF = {token: text.encode() for text, token in _SPECIAL.items()}  # noqa: RUF012 - never changed
    _SPLIT = re.compile("(<bos>|<eos>|<pad>)")
    _CUTTER = ByteCutter(tuple(_SPECIAL))

    def encode(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return list(text.encode())
        tokens: list[int] = []
        for part in self._SPLIT.split(text):
            tokens.extend([self._SPECIAL[part]] if part in self._SPECIAL else part.encode())
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < self.BOS else self._TEXT_OF.get(token, b"")

    def cut(self, text: str) -> Cut | None:
        return self._CUTTER.find(text)

    def twin(self) -> ByteCodec:
        return self


def fingerprint(*parts: Iterable[str]) -> str:
    """A hash over lists of strings, in order; each string and each list is delimited by its length."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        encoded = [text.encode() for text in part]
        digest.update(f"{len(encoded)}:{','.join(str(len(text)) for text in encoded)};".encode())
        digest.update(b"".join(encoded))
    return digest.hexdigest()
