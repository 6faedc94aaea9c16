"""Texts that end a generation, found in bytes as tokens add them. `stops.c` searches, and says how."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from libsym._channel import ffi, lib
from libsym.channel.hot import address
from libsym.errors import Invalid


class TokenTexts:
    """The bytes of every token of a model, as C reads them: one table for all that watch for texts.

    >>> from libsym.rows.stops import TokenTexts
    >>> TokenTexts([b"one", b"", b"two"]).num_tokens
    3
    """

    __slots__ = ("_keep", "num_tokens", "table")

    def __init__(self, texts: Sequence[bytes]) -> None:
        data = ffi.from_buffer(b"".join(texts))
        begins = ffi.from_buffer("uint64_t[]", array("Q", accumulate(map(len, texts), initial=0)))
        self._keep = (data, begins)
        self.num_tokens = len(texts)
        self.table: Any = ffi.new("sym_token_texts *", (data, begins, self.num_tokens))
        """A `sym_token_texts`, good as long as this object is."""


class StopTexts:
    """Watches one generation. Only what was generated counts: no stop text begins in the prompt. Of one thread.

    >>> from libsym.rows.stops import StopTexts, TokenTexts
    >>> stops = StopTexts(["User:", "END"], TokenTexts([b"one. Us", b"er", b": two"]))
    >>> [stops.add(token) for token in (0, 1, 2)], stops.found
    ([False, False, True], 0)
    """

    __slots__ = ("_stops", "_tokens")

    def __init__(self, texts: Sequence[str], tokens: TokenTexts) -> None:
        if not all(texts):
            raise Invalid("a stop text must not be empty: every text has that in it")
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            raise Invalid(f"the stop text {error.object!r} has half a surrogate pair in it, no Unicode text") from None
        stops = lib.sym_stops_new(tokens.table, b"".join(encoded), list(map(len, encoded)), len(encoded))
        if stops == ffi.NULL:
            raise MemoryError("no memory to watch for stop texts")
        self._stops: Any = ffi.gc(stops, lib.sym_stops_free)
        self._tokens = tokens  # C reads it

    @property
    def address(self) -> int:
        """Of the C half, for the functions of `libsym.channel.hot`; good as long as this object is."""
        return address(self._stops)

    @property
    def found(self) -> int | None:
        """The number of the stop text that is complete; of several that of the one that began first."""
        found = int(lib.sym_stops_found(self._stops))
        return found if found >= 0 else None

    def add(self, token: int) -> bool:
        """Take one more token; True: a stop text is complete, and `found` stays that one."""
        if not 0 <= token < self._tokens.num_tokens:
            raise Invalid(f"token {token} is not in the vocabulary of {self._tokens.num_tokens}")
        return bool(lib.sym_stops_add(self._stops, token) >= 0)
