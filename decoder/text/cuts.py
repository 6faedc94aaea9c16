"""Cuts: places where a text may be cut before the rest of the text has arrived.

A long document is tokenized piece by piece as it arrives, and the tokens must be those of the whole text. A tokenizer
works in three stages. First it finds the tokens that the text spells out. Then it splits the remaining text into words
(or treats it as one long word). Last it merges letters within words. So a cut is right if no spelled-out token can
cross it, and if it falls between two words whatever text follows.

A proof for every expression that a checkpoint may bring is out of reach. For one kind of place the proof is easy: after
a letter or digit, and before one mark or space that another letter or digit follows: `end| of`, `f|(x)` or `好|。再`.
No expression of the supported families joins the two sides of such a place. Each expression finds the place by looking
one character ahead, and normalization leaves the characters there alone. A text without such a place is tokenized when
all of it has arrived. The tokens are the same, but they are available later.

A long text that has arrived is tokenized in pieces, too. A call into C holds the interpreter's lock while it turns
tokens into a list, an array or bytes. The trio thread waits 10 ms for 200,000 tokens, and less than 1 ms for AT_ONCE
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

SPACE = "\u2581"
"""SentencePiece's spelling of a space."""

_LETTER = (
    "[0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01bf\u0391-\u03a1\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u0621-\u063a\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
)
"""Characters that are letters or digits in every version of Unicode. (Libraries know different versions.)"""
_MARK = "[ \n!-/:-@\\[-`{-~\u3001\u3002\uff0c\uff01\uff1f\uff1a\uff1b]"

_BETWEEN_WORDS = re.compile(f"{_LETTER}(?={_MARK}{_LETTER})")
_BEFORE_SPACES = re.compile(f"{_LETTER}(?= {_LETTER})")

AT_ONCE = 8192
"""Maximum number of letters, or of tokens, that one call into C converts."""

_FIRST_WINDOW = 256
"""Number of characters at the end of a text that are searched first. Nearly always, a cut is found there."""


@dataclass(frozen=True, slots=True)
class TextCut:
    """A cut of a text: `text[:end]` may be tokenized now, and `text[resume:]` later with the text that follows."""

    end: int
    resume: int


class TextCutter:
    """Finder of the last place where a text may be cut, for one kind of tokenizer."""

    def __init__(self, spelled_out: Iterable[str], places: re.Pattern[str], *, drop_space: bool = False) -> None:
        """Take the texts of tokens that the tokenizer finds before it splits a text, and the pattern of places.

        `drop_space`: the tokenizer puts a space in front of every piece, so the piece loses the space at the cut.
        """
        # If several tokens match, the longest must come first.
        texts = sorted(filter(None, spelled_out), key=len, reverse=True)
        self._margin = max(map(len, texts), default=0)
        self._spelled_out = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._places = places
        self._drop_space = drop_space

    def find(self, text: str) -> TextCut | None:
        """Return the last cut that is right whatever text follows. None: there is no such cut yet."""
        visible = len(text) - self._margin  # a token that begins before this place has arrived in full
        window = _FIRST_WINDOW
        while visible > 1:
            found = self._places.finditer(text, max(visible - window, 0), min(visible + 1, len(text)))
            for place in reversed([match.end() for match in found]):
                if not self._is_touched(text, place):
                    return TextCut(place, place + 1 if self._drop_space else place)
            if window >= visible:
                break
            window *= 16
        return None

    def _is_touched(self, text: str, place: int) -> bool:
        """Return whether a spelled-out token crosses or touches the place. (Some tokens swallow spaces beside them.)"""
        if self._spelled_out is None:
            return False
        first = max(place - self._margin, 0)
        stop = place + 1 + self._margin
        # Every start is tried: tokens may overlap, and the library decides which token it takes.
        return any(
            (match := self._spelled_out.match(text, start, stop)) is not None and match.end() >= place
            for start in range(first, place + 1)
        )


class ByteCutter:
    """Cutter for vocabularies of bytes: any place may be a cut, except within a spelled-out token."""

    def __init__(self, spelled_out: Sequence[str]) -> None:
        heads = {text[:size] for text in spelled_out for size in range(1, len(text))}
        self._head = re.compile(f"(?:{'|'.join(map(re.escape, sorted(heads, key=len, reverse=True)))})\\Z")

    def find(self, text: str) -> TextCut | None:
        """Return a cut at the text's end, or before the last letters if they may begin a spelled-out token."""
        head = self._head.search(text)
        end = len(text) if head is None else head.start()
        return TextCut(end, end) if end else None


def spans(text: str, cut: Callable[[str], TextCut | None]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each piece of a text. Tokens of the pieces are the tokens of the text.

    A piece has up to AT_ONCE letters. If there is no place for a cut among them, the limit doubles until there is one.
    """
    start, size = 0, AT_ONCE
    while len(text) - start > size:
        found = cut(text[start : start + size])
        if found is None:
            size *= 2
            continue
        yield start, start + found.end
        start, size = start + found.resume, AT_ONCE
    yield start, len(text)


def joined_bytes(token_bytes: Callable[[int], bytes], tokens: Sequence[int]) -> bytes:
    """Return the bytes of tokens. One call into C joins at most AT_ONCE tokens."""
    parts = (tokens[at : at + AT_ONCE] for at in range(0, len(tokens), AT_ONCE))
    return b"".join(b"".join(map(token_bytes, part)) for part in parts)


def word_cutter(spelled_out: Iterable[str]) -> TextCutter:
    """Return the cutter for byte-level vocabularies that split words by one of the known expressions."""
    return TextCutter(spelled_out, _BETWEEN_WORDS)


def piece_cutter(pieces: Iterable[str], spelled_out: Iterable[str], *, adds_space: bool) -> TextCutter | None:
    """Return the cutter for SentencePiece, which does not split words. None: some piece has a space after a letter."""
    if any(SPACE in piece.lstrip(SPACE) for piece in pieces):
        return None
    return TextCutter(spelled_out, _BEFORE_SPACES, drop_space=adds_space)
