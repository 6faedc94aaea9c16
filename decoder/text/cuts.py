"""Where a text may be cut while the rest of it is still on its way.

A long document is tokenized piece by piece as it arrives, and the tokens must be those of the whole. A tokenizer looks
at a text in three ways. It finds the tokens that are spelled out; it splits what is left into words (or takes it for
one long word); it merges within words. So a cut is right when no spelled-out token can lie across it and when it falls
between two words, whatever follows.

Proving that for any expression that a checkpoint may bring is hopeless; for one kind of place it is easy. Such a place
is after a letter or digit and before one mark or space that has a letter or digit behind it: `end| of`, `f|(x)` or
`好|。再`. No expression of the families that this release knows joins the two sides there. Each expression sees such a
place as soon as it looks one character ahead, and nothing there is composed or decomposed. Where a text has no such
place it is tokenized when it has all arrived: slower, never different.

A long text that is there is tokenized in pieces, too. A call of C's holds the interpreter's lock while it turns tokens
into a list, an array or bytes; the trio thread waits 10 ms for 200,000 of them, and less than 1 ms for AT_ONCE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

SPACE = "\u2581"
"""Space as SentencePiece spells it."""

_LETTER = (
    "[0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01bf\u0391-\u03a1\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u0621-\u063a\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
)
"""Letters and digits that have been just that in every version of Unicode: libraries know different ones."""
_MARK = "[ \n!-/:-@\\[-`{-~\u3001\u3002\uff0c\uff01\uff1f\uff1a\uff1b]"

_BETWEEN_WORDS = re.compile(f"{_LETTER}(?={_MARK}{_LETTER})")
_BEFORE_SPACES = re.compile(f"{_LETTER}(?= {_LETTER})")

AT_ONCE = 8192
"""Letters of a piece, or tokens, that one call of C's converts."""

_FIRST_WINDOW = 256
"""Characters at the end of a text that are searched first; there nearly always is a place."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`text[:end]` may be tokenized now, and `text[resume:]` together with what follows."""

    end: int
    resume: int


class Cutter:
    """Finds the last place where a text may be cut, for one kind of tokenizer."""

    def __init__(self, spelled_out: Iterable[str], places: re.Pattern[str], *, drop_space: bool = False) -> None:
        """`spelled_out`: the texts of tokens that are found before anything is split.

        `drop_space`: every piece gets a space in front when it is tokenized, so the one at the cut is left out.
        """
        # Where several match, the longest is tried first.
        texts = sorted(filter(None, spelled_out), key=len, reverse=True)
        self._margin = max(map(len, texts), default=0)
        self._spelled_out = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._places = places
        self._drop_space = drop_space

    def find(self, text: str) -> Cut | None:
        """The last place that is settled, whatever follows the text; None if there is none yet."""
        visible = len(text) - self._margin  # a token that began before here would be seen in full
        window = _FIRST_WINDOW
        while visible > 1:
            found = self._places.finditer(text, max(visible - window, 0), min(visible + 1, len(text)))
            for place in reversed([match.end() for match in found]):
                if not self._is_touched(text, place):
                    return Cut(place, place + 1 if self._drop_space else place)
            if window >= visible:
                break
            window *= 16
        return None

    def _is_touched(self, text: str, place: int) -> bool:
        """Whether a spelled-out token lies across the place, or ends or begins there: some swallow spaces around."""
        if self._spelled_out is None:
            return False
        first = max(place - self._margin, 0)
        stop = place + 1 + self._margin
        # One search for each start: tokens may overlap, and which of them wins is the library's affair.
        return any(
            (match := self._spelled_out.match(text, start, stop)) is not None and match.end() >= place
            for start in range(first, place + 1)
        )


class ByteCutter:
    """A token for each byte: a cut may be anywhere but in the middle of a spelled-out token."""

    def __init__(self, spelled_out: Sequence[str]) -> None:
        heads = {text[:size] for text in spelled_out for size in range(1, len(text))}
        self._head = re.compile(f"(?:{'|'.join(map(re.escape, sorted(heads, key=len, reverse=True)))})\\Z")

    def find(self, text: str) -> Cut | None:
        """Give all of a text but what may be the beginning of a spelled-out token."""
        head = self._head.search(text)
        end = len(text) if head is None else head.start()
        return Cut(end, end) if end else None


def spans(text: str, cut: Callable[[str], Cut | None]) -> Iterator[tuple[int, int]]:
    """Yield where each piece of a text begins and ends: the tokens of the pieces are those of the text.

    A piece has up to AT_ONCE letters; where they have no place to cut, twice as many, and so on.
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
    """Return the bytes of tokens: one call joins AT_ONCE of them."""
    parts = (tokens[at : at + AT_ONCE] for at in range(0, len(tokens), AT_ONCE))
    return b"".join(b"".join(map(token_bytes, part)) for part in parts)


def word_cutter(spelled_out: Iterable[str]) -> Cutter:
    """For byte-level vocabularies with one of the known expressions that split words."""
    return Cutter(spelled_out, _BETWEEN_WORDS)


def piece_cutter(pieces: Iterable[str], spelled_out: Iterable[str], *, adds_space: bool) -> Cutter | None:
    """For SentencePiece, which splits nothing: a space is a place only if no piece has one behind a letter."""
    if any(SPACE in piece.lstrip(SPACE) for piece in pieces):
        return None
    return Cutter(spelled_out, _BEFORE_SPACES, drop_space=adds_space)
