"""Rendering of a manual page as plain text, for machines without man(1) and mandoc.

The renderer knows only the man(7) macros that Symphony's pages use.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

WIDTH = 78
_MARGIN, _BELOW_TAG = 7, 14
_CHARACTERS = {
    "e": "\\",
    "&": "",
    "(aq": "'",
    "(bu": "•",
    "(dq": '"',
    "(ha": "^",
    "(lq": "“",
    "(rq": "”",
    "(ti": "~",
}
_ESCAPE = re.compile(r"\\(f[BIRP]|\(..|.)")
_WORD = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
_FONTS = {"B": " ", "I": " ", "BR": "", "RB": "", "IR": "", "RI": "", "BI": "", "IB": ""}
"""Font macros, and the separator that each puts between its words."""
_AS_THEY_ARE = {"nf": True, "EX": True, "fi": False, "EE": False}


def plain_text(source: str) -> str:
    """Return a page as plain text. Paragraphs are filled, examples stay as they are."""
    page = _Text()
    for line in source.splitlines():
        name, _, rest = line[1:].partition(" ") if line.startswith(".") else ("", "", "")
        if not name:
            page.add(plain_line(line))
        elif name in _FONTS:
            page.add(_FONTS[name].join(_words(rest)))
        else:
            page.request(name, _words(rest))
    page.end_paragraph()
    return "\n".join(page.lines) + "\n"


def plain_line(line: str) -> str:
    """Return a line with its escapes replaced or removed."""

    def read(found: re.Match[str]) -> str:
        return "" if found[1] in ("fB", "fI", "fR", "fP") else _CHARACTERS.get(found[1], found[1])

    return _ESCAPE.sub(read, line)


def macro_text(line: str) -> str:
    """Return the text of a line that is a heading or a tag, without its macro."""
    name, _, rest = line[1:].partition(" ") if line.startswith(".") else ("", "", line)
    return _FONTS.get(name, " ").join(_words(rest)) if name else plain_line(rest)


def _words(rest: str) -> list[str]:
    """Return the arguments of a macro. An argument of several words is quoted."""
    return [plain_line(bare or quoted.replace('""', '"')) for quoted, bare in _WORD.findall(rest)]


@dataclass(slots=True)
class _Text:
    """Renderer: the finished lines, and the words of the paragraph that is being filled."""

    lines: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    margin: int = _MARGIN
    is_as_it_is: bool = False
    is_tag: bool = False
    """Whether the next line is the tag of a paragraph."""

    def add(self, text: str) -> None:
        if self.is_as_it_is or self.is_tag:
            self.lines.append(" " * self.margin + text)
            self.margin = _BELOW_TAG if self.is_tag else self.margin
            self.is_tag = False
        else:
            self.words.append(text)

    def request(self, name: str, words: list[str]) -> None:
        self.end_paragraph()
        if name in ("SH", "SS"):
            self._space()
            self.margin = _MARGIN
            self.lines.append(" " * 3 * (name == "SS") + " ".join(words))
        elif name in ("PP", "TP", "IP"):
            self._space()
            self.margin = _MARGIN
            self.is_tag = name == "TP" or (name == "IP" and words[:1] not in ([], ["•"]))
            if name == "IP" and words:
                self.add(words[0])
        self.is_as_it_is = _AS_THEY_ARE.get(name, self.is_as_it_is)

    def _space(self) -> None:
        is_below_heading = self.lines and self.lines[-1] and not self.lines[-1].startswith(" " * _MARGIN)
        if self.lines and self.lines[-1] and not is_below_heading:
            self.lines.append("")

    def end_paragraph(self) -> None:
        margin = " " * self.margin
        self.lines += textwrap.wrap(
            " ".join(self.words),
            WIDTH,
            initial_indent=margin,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
        self.words = []
