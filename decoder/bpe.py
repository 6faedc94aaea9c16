"""Byte-pair vocabularies, encoded by the `tokenizers` library, decoded here.

Almost every Llama-family tokenizer spells bytes in an alphabet of 256 printable characters (GPT-2's), so a
table from token to bytes makes decoding exact and gives a streaming decoder what it needs. The older kind
spells spaces as U+2581 and unknown bytes as `<0x0A>`; those decode through the library.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from threading import Lock

from tokenizers import Tokenizer as LibraryTokenizer

from decoder.cuts import SPACE, Cut, Cutter
from libsym.errors import Invalid

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_MOST_MISSING_BYTES = 64  # rare control characters and lead bytes of unassigned planes: 8 in SmolLM2
_NOT_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def _alphabet() -> dict[int, str]:
    """Byte -> character: printable bytes are themselves, the others follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)}


BYTE_ALPHABET = _alphabet()
# For `str.translate`: the alphabet to Latin-1, and Latin-1 outside the alphabet to what Latin-1 cannot encode.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for byte, char in BYTE_ALPHABET.items()}


class ByteLevelCodec:
    """Tokens are runs of bytes."""

    def __init__(
        self,
        library: LibraryTokenizer,
        tokens: Sequence[str | None],
        added: Mapping[int, str],
        where: str,
        cutter: Cutter | None,
    ) -> None:
        """`tokens`: spelling by id, None where there is none. `added`: text of tokens outside the byte alphabet."""
        self._library = _Library(library)
        self._cutter = cutter
        self._bytes = [_bytes_of(token) for token in tokens]
        for token, text in added.items():
            self._bytes[token] = text.encode()
        missing = _missing_bytes(tokens)
        if len(missing) > _MOST_MISSING_BYTES:
            raise Invalid(f"{where}: {len(missing)} bytes have no token of their own: the vocabulary is not byte-level")
        self._missing = re.compile(b"[" + b"".join(rb"\x%02x" % byte for byte in missing) + b"]") if missing else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        # The library would drop such a character without a word.
        if self._missing is not None and (found := self._missing.search(data := text.encode())):
            start = len(data[: found.start()].decode(errors="ignore"))
            code = f"U+{ord(text[start]):04X}"
            raise Invalid(f"the text has {code} at {start}, which this model's vocabulary cannot spell: remove it")
        return self._library.encode(text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def cut(self, text: str) -> Cut | None:
        return None if self._cutter is None else self._cutter.find(text)

    def twin(self) -> ByteLevelCodec:
        twin = copy.copy(self)
        twin._library = self._library.twin()  # noqa: SLF001 - of the same class
        return twin


class PieceCodec:
    """Tokens are runs of characters with U+2581 for a space, and single bytes for what has no token."""

    def __init__(
        self,
        library: LibraryTokenizer,
        tokens: Sequence[str | None],
        added: Mapping[int, str],
        cutter: Cutter | None,
    ) -> None:
        self._library = _Library(library)
        self._cutter = cutter
        self._tokens = tokens
        self._added = added

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._library.encode(text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._library.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = (self._tokens[token] if token < len(self._tokens) else None) or ""
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace(SPACE, " ").encode()

    def cut(self, text: str) -> Cut | None:
        return None if self._cutter is None else self._cutter.find(text)

    def twin(self) -> PieceCodec:
        twin = copy.copy(self)
        twin._library = self._library.twin()  # noqa: SLF001 - of the same class
        return twin


class _Library:
    """The library's tokenizer behind a lock: whether special tokens are recognised is a property of it."""

    def __init__(self, tokenizer: LibraryTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()

    def encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            self._tokenizer.encode_special_tokens = not special
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def twin(self) -> _Library:
        with self._lock:
            return _Library(copy.deepcopy(self._tokenizer))


def _bytes_of(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # not in the alphabet, so it stands for itself
        return token.encode()


def _missing_bytes(tokens: Sequence[str | None]) -> list[int]:
    """The bytes of UTF-8 text that no token spells (SmolLM2 lacks 0x04, 0xF1 and a few more)."""
    known = set(tokens)
    return [byte for byte, char in BYTE_ALPHABET.items() if char not in known and byte not in _NOT_IN_UTF8]
