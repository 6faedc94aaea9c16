"""Codecs of byte-pair vocabularies. The `tokenizers` library encodes text for them.

Almost every tokenizer of the Llama family spells bytes in GPT-2's alphabet of 256 printable characters. For these
tokenizers, a table from token to bytes makes decoding exact, also for streams. Older tokenizers
spell spaces as U+2581 and unknown bytes as `<0x0A>`. For them, the library decodes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from decoder.text.cuts import AT_ONCE, SPACE, TextCut, TextCutter, joined_bytes, spans
from libsym.errors import Invalid

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_MOST_MISSING_BYTES = 64  # rare control characters and lead bytes of unassigned planes: 8 in SmolLM2
_NO_LETTER = "\ue000"
"""Character of the private use area: no normalizer changes it, and no token begins with it."""
_SHORT = 2048
"""Letters or tokens that the calling thread converts itself, in some 0.2 ms. Threads of the library convert more."""
_NOT_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def _alphabet() -> dict[int, str]:
    """Return the character of each byte. A printable byte is its own character.

    The other bytes get U+0100, U+0101, ….
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)}


BYTE_ALPHABET = _alphabet()
# Table for `str.translate`: maps the alphabet to Latin-1, and the rest of Latin-1 to a character that Latin-1 lacks.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for byte, char in BYTE_ALPHABET.items()}


class ByteLevelCodec:
    """Codec of byte-level vocabularies, whose tokens are runs of bytes."""

    def __init__(
        self,
        library: LibraryTokenizer,
        tokens: Sequence[str | None],
        added: Mapping[int, str],
        where: str,
        cutter: TextCutter | None,
    ) -> None:
        """Take the spelling of each token by id (None: the id is unused).

        `added` has the texts of tokens that are not spelled in the byte alphabet.
        """
        self._library = _Library(library, self.cut)
        self._cutter = cutter
        self._bytes = [_bytes_of(token) for token in tokens]
        for token, text in added.items():
            self._bytes[token] = text.encode()
        missing = _missing_bytes(tokens)
        if len(missing) > _MOST_MISSING_BYTES:
            raise Invalid(f"{where}: {len(missing)} bytes have no token of their own: the vocabulary is not byte-level")
        self._missing = re.compile(b"[" + b"".join(rb"\x%02x" % byte for byte in missing) + b"]") if missing else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        self._check_spelling(text)
        return self._library.encode(text, special=special)

    def split(self, text: str) -> list[str | int]:
        return self._library.split(text)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        self._check_spelling(self._library.joined(parts))
        return self._library.encode_parts(parts)

    @property
    def special_texts(self) -> Iterable[str]:
        return self._library.special_texts.values()

    def _check_spelling(self, text: str) -> None:
        # The library would silently drop such a character.
        if self._missing is None:
            return
        data = text.encode()
        for at in range(0, len(data), AT_ONCE):
            if found := self._missing.search(data, at, at + AT_ONCE):
                start = len(data[: found.start()].decode(errors="ignore"))
                code = f"U+{ord(text[start]):04X}"
                raise Invalid(f"the text has {code} at {start}, which this model's vocabulary cannot spell: remove it")

    def decode(self, tokens: Sequence[int]) -> str:
        return joined_bytes(self.token_bytes, tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def cut(self, text: str) -> TextCut | None:
        return None if self._cutter is None else self._cutter.find(text)


class PieceCodec:
    """Codec of SentencePiece vocabularies: tokens are runs of characters with U+2581 for a space, or single bytes."""

    def __init__(
        self,
        library: LibraryTokenizer,
        tokens: Sequence[str | None],
        added: Mapping[int, str],
        cutter: TextCutter | None,
    ) -> None:
        self._library = _Library(library, self.cut)
        self._cutter = cutter
        self._tokens = tokens
        self._added = added

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._library.encode(text, special=special)

    def split(self, text: str) -> list[str | int]:
        return self._library.split(text)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        return self._library.encode_parts(parts)

    @property
    def special_texts(self) -> Iterable[str]:
        return self._library.special_texts.values()

    def decode(self, tokens: Sequence[int]) -> str:
        return self._library.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = (self._tokens[token] if token < len(self._tokens) else None) or ""
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace(SPACE, " ").encode()

    def cut(self, text: str) -> TextCut | None:
        return None if self._cutter is None else self._cutter.find(text)


class _Library:
    """Two tokenizers of the library: one recognises special tokens in text, the other does not.

    In the library, this choice is a property of a tokenizer. With one tokenizer, callers with different choices would
    have to wait for each other.

    Each special token has an alias: an added token whose text can't be guessed. The tokenizer that does not recognise
    special tokens still recognises aliases. So a caller can put special tokens at the intended places, and the rest is
    text. Everything that the library does between and around special tokens stays the same.
    """

    def __init__(self, tokenizer: LibraryTokenizer, cut: Callable[[str], TextCut | None]) -> None:
        """Take a tokenizer, and the `cut` of its codec. The cut is never inside an alias or next to an alias."""
        self._cut = cut
        _forget_words(tokenizer)
        special = {token: added for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self.special_texts = {token: added.content for token, added in special.items()}
        secret = secrets.token_hex(16)
        self._aliases = {token: f"{_NO_LETTER}{secret}{token}{_NO_LETTER}" for token in special}
        tokenizer.add_tokens([_renamed(added, self._aliases[token]) for token, added in special.items()])
        self._meant_by = {tokenizer.token_to_id(alias): token for token, alias in self._aliases.items()}
        self._unknown = tokenizer.token_to_id(tokenizer.model.unk_token or "")
        self._recognising, self._plain = tokenizer, _second(tokenizer)
        self._plain.encode_special_tokens = True

    def encode(self, text: str, *, special: bool) -> list[int]:
        tokenizer = self._recognising if special else self._plain
        tokens: list[int] = []
        for start, end in spans(text, self._cut):
            tokens += _ids(tokenizer, text[start:end])
        return tokens

    def split(self, text: str) -> list[str | int]:
        """Split a text into the special tokens that are recognised in it, and the texts between them."""
        parts: list[str | int] = []
        done = 0
        for first, last in spans(text, self._cut):
            found = _encoding(self._recognising, text[first:last])
            for place, token in enumerate(found.ids):
                spelled_out = self.special_texts.get(token)  # offsets are slow, and only special tokens need them
                if spelled_out is None or (chars := found.token_to_chars(place)) is None:
                    continue
                start, end = first + chars[0], first + chars[1]
                if spelled_out in text[start:end]:  # the text itself has the token, not only its normalized form
                    parts += [text[done:start], token] if start > done else [token]
                    done = end
        return [*parts, text[done:]] if done < len(text) else parts

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Encode text and special tokens. Nothing in the text becomes a special token."""
        text = "".join(part if isinstance(part, str) else self._aliases[part] for part in parts)
        tokens = [self._meant_by.get(token, token) for token in self.encode(text, special=False)]
        meant = [part for part in parts if isinstance(part, int) and part != self._unknown]
        found = [token for token in tokens if token in self.special_texts and token != self._unknown]
        if found != meant:
            strays = ", ".join(sorted({self.special_texts[token] for token in {*found} - {*meant}} or {"one"}))
            raise Invalid(f"this model's vocabulary has special tokens ({strays}) that are words of text, too")
        return tokens

    def joined(self, parts: Sequence[str | int]) -> str:
        return "".join(part if isinstance(part, str) else self.special_texts[part] for part in parts)

    def decode(self, tokens: Sequence[int]) -> str:
        # The model may have a padding token with the id of an alias. Such a token stands for no text, and the alias
        # must stay secret.
        known = [token for token in tokens if token not in self._meant_by]
        if len(known) <= _SHORT:
            return str(self._plain.decode(known, skip_special_tokens=False))
        (text,) = self._plain.decode_batch([known], skip_special_tokens=False)
        return str(text)


def _second(tokenizer: LibraryTokenizer) -> LibraryTokenizer:
    """Return a tokenizer equal to `tokenizer`. The two share all large parts, because copying them takes 0.2 s."""
    second = LibraryTokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(second, part, value)
    added = tokenizer.get_added_tokens_decoder()
    second.add_tokens([token for _, token in sorted(added.items())])
    assert second.get_added_tokens_decoder() == added
    return second


def _forget_words(tokenizer: LibraryTokenizer) -> None:
    """Turn off the library's cache of words, which all users would share.

    With this cache, a word that any user has tokenized before takes two thirds of the time of a new word. So a program
    could tell whether its guess of another user's secret is right. The library has no public name for this setting.
    Models without merges have no such cache.
    """
    if hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(0)  # noqa: SLF001


def _encoding(tokenizer: LibraryTokenizer, text: str) -> Encoding:
    """Encode a text. A long text is a batch of one: the library releases the interpreter's lock only for batches."""
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=False)
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding


def _ids(tokenizer: LibraryTokenizer, text: str) -> list[int]:
    """Return the ids of `_encoding`. Without offsets, the library takes a third less time and less memory."""
    if len(text) <= _SHORT:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    else:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _renamed(token: AddedToken, text: str) -> AddedToken:
    """Return an added token with another text. Both tokenizers recognise it, by the rules of `token`."""
    return AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _bytes_of(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # a token outside the alphabet stands for its own text
        return token.encode()


def _missing_bytes(tokens: Sequence[str | None]) -> list[int]:
    """Return the bytes of UTF-8 text that no token spells (SmolLM2 lacks 0x04, 0xF1 and a few more)."""
    known = set(tokens)
    return [byte for byte, char in BYTE_ALPHABET.items() if char not in known and byte not in _NOT_IN_UTF8]
