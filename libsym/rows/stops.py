"""Search for texts in the bytes of tokens: stop texts of a generation, and tokens that contain a text (`stops.c`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from libsym._channel import ffi, lib
from libsym.channel.client import ClientChannel
from libsym.channel.hot import address
from libsym.channel.scripts import Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import Invalid

MAX_TEXT_SETS = 64
"""Limit of cached bitmasks. Each set of texts has a bitmask, which takes 6 KB for a vocabulary of 49,152."""


class TokenTexts:
    """The bytes of every token of a model, in one table for C that all searches share.

    >>> from libsym.rows.stops import TokenTexts
    >>> TokenTexts([b"one", b"", b"two"]).num_tokens
    3
    """

    __slots__ = ("_found", "_keep", "num_tokens", "table")

    def __init__(self, texts: Sequence[bytes]) -> None:
        data = ffi.from_buffer(b"".join(texts))
        begins = ffi.from_buffer("uint64_t[]", array("Q", accumulate(map(len, texts), initial=0)))
        self._keep = (data, begins)
        self.num_tokens = len(texts)
        self.table: Any = ffi.new("sym_token_texts *", (data, begins, self.num_tokens))
        """A `sym_token_texts`, valid as long as this object lives."""
        self._found: dict[tuple[bytes, ...], bytes] = {}

    def having(self, texts: tuple[bytes, ...]) -> bytes:
        """Return a bitmask of the tokens that contain one of these texts. Invalid: a text is in no token.

        >>> from libsym.rows.stops import TokenTexts
        >>> TokenTexts([b"one", b"", b"two"]).having((b"o", b"w")).hex()
        '05000000'
        """
        found = self._found.get(texts)
        if found is None:
            bits = bytearray((self.num_tokens + 31) // 32 * 4)
            for text in texts:
                if lib.sym_tokens_with(self.table, text, len(text), ffi.from_buffer(bits)) == 0:
                    raise Invalid(f"the breaker {text.decode(errors='replace')!r} is in no token of the model")
            if len(self._found) >= MAX_TEXT_SETS:
                self._found.pop(next(iter(self._found)), None)
            found = self._found[texts] = bytes(bits)
        return found


def token_texts_script(channel: ClientChannel) -> Script[TokenTexts]:
    """Return the texts of the model's tokens. Each connection makes the table once."""
    if channel.token_texts is None:
        channel.token_texts = TokenTexts((yield from vocabulary_script(channel)))
    found: TokenTexts = channel.token_texts
    return found


class StopTexts:
    """Search for stop texts in one generation. A stop text cannot begin in the prompt. Only one thread may use it.

    >>> from libsym.rows.stops import StopTexts, TokenTexts
    >>> stops = StopTexts(["User:", "END"], TokenTexts([b"one. Us", b"er", b": two"]))
    >>> [stops.add(token) for token in (0, 1, 2)], stops.found
    ([False, False, True], 0)
    """

    __slots__ = ("_stops", "_tokens")

    def __init__(self, texts: Sequence[str], tokens: TokenTexts) -> None:
        if not all(texts):
            raise Invalid("a stop text must not be empty: every text contains the empty text")
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            raise Invalid(f"the stop text {error.object!r} has half a surrogate pair in it, no Unicode text") from None
        stops = lib.sym_stops_new(tokens.table, b"".join(encoded), list(map(len, encoded)), len(encoded))
        if stops == ffi.NULL:
            raise MemoryError("no memory to watch for stop texts")
        self._stops: Any = ffi.gc(stops, lib.sym_stops_free)
        self._tokens = tokens  # keeps the table alive for C

    @property
    def address(self) -> int:
        """Address of the C half, for the functions of `libsym.channel.hot`; valid as long as this object lives."""
        return address(self._stops)

    @property
    def found(self) -> int | None:
        """Index of the complete stop text. If several texts are complete, the text that began first counts. None: no
        text is complete.
        """
        found = int(lib.sym_stops_found(self._stops))
        return found if found >= 0 else None

    def add(self, token: int) -> bool:
        """Take the next token. Return whether a stop text is complete; from then on `found` does not change."""
        if not 0 <= token < self._tokens.num_tokens:
            raise Invalid(f"token {token} is not in the vocabulary of {self._tokens.num_tokens}")
        return bool(lib.sym_stops_add(self._stops, token) >= 0)
