"""Marks: distinguish special tokens that a template writes from special tokens that programs spell out in messages.

A mark is the text of a special token. A template returns one text, in which `<|im_end|>` of a user's message looks like
the template's own mark. So `Marks` hides the marks of messages and tools while the template runs: a word that can't be
guessed replaces each mark. Then every mark in the result comes from the template. The tokenizer finds these marks
before it puts the hidden marks back. Templates trim contents, put them into JSON, and look at them. A word of small
letters and digits comes out of these steps unchanged, like the mark itself.

Two adjacent contents, or a content and the template's text beside it, could form a mark together. So `Marks` also hides
parts of marks at the ends of a text (`<|im`, `|>`).

With the hidden marks put back, the text must equal the prompt of the original messages. If it differs, the template
looked at a hidden text. If that text was a part of a mark, the next rendering leaves the part unhidden: the template
took the part for a word, like `"type": "text"`. A whole mark is refused with an error that names it, because an
unhidden mark could not be told from the template's own.

Programs choose the messages, so the work is bounded: the number of words, and the letters that are rendered to find
the text that the template looked at. Marks with the same text are of one kind, and so are parts of marks
with the same text. The search tries whole kinds first, because there are few kinds, and then single places.
"""

from __future__ import annotations

import re
import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

from libsym.errors import Invalid

_WORD_LETTERS = 20
_NUMBER_DIGITS = 6
_MOST_SHOWN = 16
"""Maximum number of kinds of parts that a template may look at. To find one kind takes several renderings."""
_MOST_HIDDEN = 10_000
"""Maximum number of marks and parts of marks in one prompt. A word stands for each while the template runs."""
_MOST_SEARCHED = 40 << 20
"""Maximum number of letters that are rendered to find the text that a template looks at. This takes about a second."""
_TEXT_LETTERS = 1000
"""Cost of each text in messages or tools, in letters, in addition to the letters of the text."""
_MOST_LOOKED_AT = 4
"""Maximum number of letters at the beginning of a mark that are compared to find where marks may begin in a text."""
_SCANNED_LETTERS = 1 << 14
"""Maximum number of letters that one search scans. The search holds the interpreter's lock for at most a millisecond.
"""
_NAMES = frozenset({"role", "type"})
"""Fields whose values a template may put into marks: `<|` + role + `|>`."""

_INSTEAD = "take it out, or tokenize() what chat_template() gives"

Kind: TypeAlias = tuple[str, bool]
"""Text of a mark or of a part of a mark, and whether the mark is whole."""
Place: TypeAlias = tuple[int, int, int, bool]
"""Start and end of a place, length of the first mark in the place, and whether this mark is whole.

Adjacent marks share one place.
"""
Find: TypeAlias = Callable[[str, bool], list[Place]]
"""Function that finds the places to hide in a text. The second argument says whether the text is a name: a name has
fewer places."""
Render: TypeAlias = Callable[[Any, Any], str]
"""Function that renders the prompt of messages and tools."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark, or a part of a mark, in a program's messages or tools. Adjacent marks are one `Found`."""

    text: str
    """Text of the mark, or of the first of several adjacent marks."""
    where: str
    is_whole: bool

    @property
    def kind(self) -> Kind:
        return self.text, self.is_whole


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A prompt from a template, in which words stand for hidden marks."""

    text: str
    base: str
    """Prefix of the words."""
    hidden: Mapping[str, str]
    """Hidden texts, by their words."""
    plain: str
    """The text with the hidden marks put back."""

    def shown(self, part: str) -> str:
        """Return a part of the text with the hidden marks put back."""
        return re.sub(f"{self.base}\\d{{{_NUMBER_DIGITS}}}", lambda word: self.hidden.get(word[0], word[0]), part)


class Marks:
    """The special tokens of one vocabulary, by their texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(filter(None, texts))
        self._sizes = sorted({len(text) for text in self._texts}, reverse=True)
        self._num_looked_at = min(_MOST_LOOKED_AT, min(self._sizes, default=0))
        self._begin = _begin_of(self._texts, self._num_looked_at)
        self._heads = {text[:size] for text in self._texts for size in range(1, len(text))}
        self._tails = {text[size:] for text in self._texts for size in range(1, len(text))}
        self._joined = "\0".join(self._texts)
        self._longest = max(self._sizes, default=0)

    def word(self, but_in: str = "") -> str:
        """Return a random word that has no mark in it and does not occur in `but_in`."""
        for _ in range(100):
            word = "".join(secrets.choice(string.ascii_lowercase) for _ in range(_WORD_LETTERS))
            if word not in but_in and not self.whole_in(word):
                return word
        raise Invalid("the vocabulary has nearly every letter as a special token: this is no text model")

    def render(self, render: Render, messages: Any, tools: Any) -> MarkedPrompt:
        """Return the prompt, in which words replace marks. Invalid: the template looks at a mark, or changes it."""
        plain = render(messages, tools)
        search = _Search(self, render, messages, tools, plain)
        shown: frozenset[Kind] = frozenset()
        while True:
            hiding = _Hiding(search.find, search.base, shown)
            prompt = search.prompt(hiding)
            if prompt is not None:
                return prompt
            culprit = search.culprit(hiding)
            if culprit.is_whole or len(shown) == _MOST_SHOWN:
                raise Invalid(
                    f"{culprit.where} has {culprit.text!r} in it, which the model's chat template looks at or changes: "
                    f"{_INSTEAD}"
                )
            shown |= {culprit.kind}

    def in_text(self, text: str, is_name: bool) -> list[Place]:
        """Return the places of whole marks, and of parts of marks at both ends of the text, in order of position."""
        whole = self.whole_in(text)
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())  # templates trim
        core = text[first:last]
        if not whole and not is_name and 0 < len(core) < self._longest and "\0" not in core and core in self._joined:
            return [(first, last, last - first, False)]
        before = text[first : whole[0][0] if whole else last]
        tail = _first_known(self._tails, (before[:size] for size in range(min(len(before), self._longest), 0, -1)))
        behind = text[whole[-1][1] if whole else first + len(tail) : last]
        head = _first_known(self._heads, (behind[-size:] for size in range(min(len(behind), self._longest), 0, -1)))
        parts = [(first, first + len(tail), len(tail), False), (last - len(head), last, len(head), False)]
        return [each for each in (parts[0], *_joined(whole), parts[1]) if each[0] < each[1]]

    def whole_in(self, text: str) -> list[tuple[int, int]]:
        """Return the places of marks that are spelled out.

        Of overlapping marks, the first mark counts. Of marks that begin at the same place, the longest counts.

        The text is searched in pieces, for places where a mark may begin: one regular expression of some thousand marks
        would hold the interpreter's lock while it searches a whole long text.
        """
        found: list[tuple[int, int]] = []
        end = 0
        for start in self._may_begin(text):
            if start < end:
                continue
            mark = _first_known(self._texts, (text[start : start + size] for size in self._sizes))
            if mark:
                end = start + len(mark)
                found.append((start, end))
        return found

    def _may_begin(self, text: str) -> Iterator[int]:
        if self._begin is None:
            return
        for first in range(0, len(text), _SCANNED_LETTERS):
            last = first + _SCANNED_LETTERS + self._num_looked_at - 1
            for place in self._begin.finditer(text, first, last):
                yield place.start()


class _Search:
    """Search for the marks that can be hidden: each attempt is a rendering."""

    def __init__(self, marks: Marks, render: Render, messages: Any, tools: Any, plain: str) -> None:
        self.find = cache(marks.in_text)  # each walk looks at the same texts
        self._render = render
        self._messages = messages
        self._tools = tools
        self._plain = plain
        self.base = marks.word(plain)
        self._left = _MOST_SEARCHED

    def prompt(self, hiding: _Hiding) -> MarkedPrompt | None:
        """Render the prompt with marks hidden. None: the result differs from the prompt of the original messages."""
        try:
            hidden = hiding.everything(self._messages, self._tools)
        except RecursionError:
            raise Invalid("messages and tools are nested too deep") from None
        if not hiding.words:
            return MarkedPrompt(self._plain, hiding.base, {}, self._plain)
        try:
            prompt = MarkedPrompt(self._render(*hidden), hiding.base, hiding.words, self._plain)
        except Invalid:
            return None
        return prompt if prompt.shown(prompt.text) == self._plain else None

    def culprit(self, failed: _Hiding) -> Found:
        """Return the first mark or part that can't be hidden together with the marks and parts before it.

        A whole mark is a single place, which the error names. A part stands for all parts of its kind.
        """
        alike: dict[Kind, list[int]] = {}
        for i, found in enumerate(failed.found):
            alike.setdefault(found.kind, []).append(i)
        groups = list(alike.values())
        num_groups = self._first_bad(failed, groups)
        culprits = groups[num_groups - 1]
        num_places = 1
        if failed.found[culprits[0]].is_whole:
            before = set(chain(*groups[: num_groups - 1]))
            num_places = self._first_bad(failed, [[i] for i in culprits], before)
        return failed.found[culprits[num_places - 1]]

    def _first_bad(
        self, failed: _Hiding, groups: list[list[int]], besides: frozenset[int] | set[int] = frozenset()
    ) -> int:
        """Return the smallest number of leading groups that can't be hidden together. Hiding all groups has failed."""

        def is_bad(count: int) -> bool:
            hiding = _Hiding(self.find, self.base, failed.shown, {*besides, *chain(*groups[:count])})
            self._left -= len(self._plain) + _TEXT_LETTERS * failed.num_texts
            if self._left < 0:
                first = failed.found[0]
                raise Invalid(
                    f"the model's chat template looks at or changes {first.text!r} in {first.where}, or a mark behind "
                    f"it. There are too many to find out which: {_INSTEAD}"
                )
            return self.prompt(hiding) is None

        return 1 + bisect_left(range(1, len(groups)), True, key=is_bad)


class _Hiding:
    """A walk through messages and tools that replaces marks by words.

    `only` has the serial numbers of the marks and parts to replace. None: all are replaced.
    """

    def __init__(self, find: Find, base: str, shown: frozenset[Kind], only: set[int] | None = None) -> None:
        self._find = find
        self.base = base
        self.shown = shown
        self._only = only
        self.found: list[Found] = []
        self.words: dict[str, str] = {}
        self.num_texts = 0

    def everything(self, messages: list[Any], tools: Any) -> tuple[list[Any], Any]:
        hidden = [self._value(message, f"messages[{i}]") for i, message in enumerate(messages)]
        return hidden, self._value(tools, "tools")

    def _value(self, value: Any, where: str, *, is_name: bool = False) -> Any:
        match value:
            case str():
                return self._text(value, where, is_name=is_name)
            case list():
                return [self._value(each, where) for each in value]
            case dict():
                return {
                    self._text(key, where, is_name=True): self._value(each, where, is_name=key in _NAMES)
                    for key, each in value.items()
                }
        return value

    def _text(self, text: str, where: str, *, is_name: bool) -> str:
        parts, done = [], 0
        self.num_texts += 1
        for start, end, size, is_whole in self._find(text, is_name):
            found = Found(text[start : start + size], where, is_whole)
            if found.kind in self.shown:
                continue
            if len(self.found) == _MOST_HIDDEN:
                raise Invalid(
                    f"messages and tools have more than {_MOST_HIDDEN} special tokens and parts of them in them, as "
                    f"{found.text!r} in {where}: give fewer, or tokenize() what chat_template() gives"
                )
            if self._only is None or len(self.found) in self._only:
                word = f"{self.base}{len(self.words):0{_NUMBER_DIGITS}}"
                self.words[word] = text[start:end]
                parts += [text[done:start], word]
                done = end
            self.found.append(found)
        return "".join([*parts, text[done:]]) if parts else text


def _begin_of(texts: Iterable[str], num_letters: int) -> re.Pattern[str] | None:
    """Return a pattern that matches one letter wherever a mark may begin. None: no mark has letters."""
    first, *others = [
        f"[{''.join(sorted(map(re.escape, letters)))}]"
        for letters in map(set, zip(*(text[:num_letters] for text in texts), strict=True))
    ] or [""]
    return re.compile(f"{first}(?={''.join(others)})") if first else None


def _joined(whole: Iterable[tuple[int, int]]) -> list[Place]:
    joined: list[Place] = []
    for start, end in whole:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end, joined[-1][2], True)
        else:
            joined.append((start, end, end - start, True))
    return joined


def _first_known(known: set[str] | frozenset[str], candidates: Iterable[str]) -> str:
    """Return the first candidate that is in `known`; the empty text if there is none."""
    return next((candidate for candidate in candidates if candidate in known), "")
