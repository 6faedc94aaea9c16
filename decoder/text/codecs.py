"""Byte-pair vocabularies, encoded by the `tokenizers` library, decoded here.

Almost every Llama-family tokenizer spells bytes in an alphabet of 256 printable characters (GPT-2's). So a table from
token to bytes makes decoding exact and gives a streaming decoder what it needs. The older kind spells spaces as U+2581
and unknown bytes as `<0x0A>`; those decode through the library.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from decoder.text.cuts import AT_ONCE, SPACE, Cut, Cutter, joined_bytes, spans
from libsym.errors import Invalid

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_MOST_MISSING_BYTES = 64  # rare control characters and lead bytes of unassigned planes: 8 in SmolLM2
_NO_LETTER = "\ue000"
"""Of the private use area: no normalizer changes it, and no token begins with it."""
_SHORT = 2048
"""Letters, or tokens: up to here the calling thread does it (some 0.2 ms), beyond a thread of the library's."""
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
        # The library would drop such a character without a word.
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

    def cut(self, text: str) -> Cut | None:
        return None if self._cutter is None else self._cutter.find(text)


class PieceCodec:
    """Tokens are runs of characters with U+2581 for a space, and single bytes for what has no token."""

    def __init__(
        self,
        library: LibraryTokenizer,
        tokens: Sequence[str | None],
        added: Mapping[int, str],
        cutter: Cutter | None,
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

    def cut(self, text: str) -> Cut | None:
        return None if self._cutter is None else self._cutter.find(text)


class _Library:
    """The library's tokenizer, twice: whether special tokens are recognised is a property of it. Nobody waits for it.

    Each special token has an alias, an added token that can't be guessed. Where special tokens are not recognised the
    aliases are. So a text may have special tokens at the places that are meant, and be text everywhere else. All that
    the library does between and around them stays what it is.
    """

    def __init__(self, tokenizer: LibraryTokenizer, cut: Callable[[str], Cut | None]) -> None:
        """`cut`: of `Codec`. Aliases have no place to cut in them or beside them."""
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
        """The special tokens that are recognised in a text, and what is between them."""
        parts: list[str | int] = []
        done = 0
        for first, last in spans(text, self._cut):
            found = _encoding(self._recognising, text[first:last])
            for place, token in enumerate(found.ids):
                spelled_out = self.special_texts.get(token)  # of those alone: a list of all offsets takes long
                if spelled_out is None or (chars := found.token_to_chars(place)) is None:
                    continue
                start, end = first + chars[0], first + chars[1]
                if spelled_out in text[start:end]:  # not only when it is normalized
                    parts += [text[done:start], token] if start > done else [token]
                    done = end
        return [*parts, text[done:]] if done < len(text) else parts

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Text and special tokens: nothing in the text becomes one."""
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
        # The number of an alias may be one of the model's, which stands for no text: the alias is a secret.
        known = [token for token in tokens if token not in self._meant_by]
        if len(known) <= _SHORT:
            return str(self._plain.decode(known, skip_special_tokens=False))
        (text,) = self._plain.decode_batch([known], skip_special_tokens=False)
        return str(text)


def _second(tokenizer: LibraryTokenizer) -> LibraryTokenizer:
    """Give a tokenizer that encodes and decodes as another; the two share all that is large (a copy takes 0.2 s)."""
    second = LibraryTokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(second, part, value)
    added = tokenizer.get_added_tokens_decoder()
    second.add_tokens([token for _, token in sorted(added.items())])
    assert second.get_added_tokens_decoder() == added
    return second


def _forget_words(tokenizer: LibraryTokenizer) -> None:
    """Take away the library's cache of words, which all users would share.

    A word that somebody has tokenized before would take two thirds of the time: a guess of a secret could be told from
    a wrong one. The library has no public name for this; models without merges have no such cache.
    """
    if hasattr(tokenizer.model, "_resize_cache"):
        tokenizer.model._resize_cache(0)  # noqa: SLF001


def _encoding(tokenizer: LibraryTokenizer, text: str) -> Encoding:
    """A long text goes as a batch of one: only for batches the library lets go of the interpreter's lock."""
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=False)
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding


def _ids(tokenizer: LibraryTokenizer, text: str) -> list[int]:
    """Return the ids of `_encoding`, by a call that notes no places in the text: a third faster, and less to free."""
    if len(text) <= _SHORT:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    else:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _renamed(token: AddedToken, text: str) -> AddedToken:
    """A token that is recognised as another is, and always."""
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
    except UnicodeEncodeError:  # not in the alphabet, so it stands for itself
        return token.encode()


def _missing_bytes(tokens: Sequence[str | None]) -> list[int]:
    """The bytes of UTF-8 text that no token spells (SmolLM2 lacks 0x04, 0xF1 and a few more)."""
    known = set(tokens)
    return [byte for byte, char in BYTE_ALPHABET.items() if char not in known and byte not in _NOT_IN_UTF8]
