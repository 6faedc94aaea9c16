"""A manual page as plain text, where nothing is installed that shows one: the few man(7) macros that our pages use."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

WIDTH = 78
_INDENT = 7
_CHARACTERS = {"-": "-", "e": "\\", "&": "", " ": " ", "(aq": "'", "(dq": '"', "(ti": "~", "(ha": "^", "(bu": "•"}
_ESCAPE = re.compile(r"\\(?:f[BIRP]|(?P<character>\(..|.))")
_WORD = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_ALTERNATING = {"BR", "RB", "IR", "RI", "BI", "IB"}


def plain_text(source: str) -> str:
    """Filled paragraphs below their headings; examples as they are."""
    return "\n".join(_blocks(source)) + "\n"


def _blocks(source: str) -> Iterator[str]:
    """Each line, or each paragraph as its lines."""
    words: list[str] = []
    is_filled = True
    for line in source.splitlines():
        macro, rest = _macro(line)
        if macro is None or macro in _ALTERNATING or macro in ("B", "I"):
            text = _text(line) if macro is None else _words(rest, "" if macro in _ALTERNATING else " ")
            if is_filled:
                words.append(text)
            else:
                yield (" " * _INDENT + text).rstrip()
            continue
        yield from _paragraph(words)
        words = []
        if macro in ("SH", "SS"):
            yield "" if macro == "SH" else " "
            yield " " * 3 * (macro == "SS") + _words(rest, " ")
        elif macro in ("nf", "EX", "fi", "EE"):
            is_filled = macro in ("fi", "EE")
        elif macro in ("PP", "TP", "IP"):
            yield ""
            words = [_words(rest, " ").split(" ")[0]] if macro == "IP" and rest else []
    yield from _paragraph(words)


def _paragraph(texts: list[str]) -> Iterator[str]:
    margin = " " * _INDENT
    yield from textwrap.wrap(
        " ".join(texts),
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _macro(line: str) -> tuple[str | None, str]:
    """What a request is called, and its arguments; None: the line is text."""
    if not line.startswith("."):
        return None, line
    name, _, rest = line[1:].partition(" ")
    return name, rest


def _words(rest: str, between: str) -> str:
    found = [quoted.replace('""', '"') if quoted or not bare else bare for quoted, bare in _WORD.findall(rest)]
    return _text(between.join(found))


def _text(line: str) -> str:
    return _ESCAPE.sub(lambda found: _CHARACTERS.get(found["character"] or "", found["character"] or ""), line)
