"""Entries of the manual: what stands under one heading or tag of a page, and docstrings of libsym and of programs.

`symphony help WORD` looks here for a word that has no page of its own, and for several words.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import libsym
from symphony.launcher.finding import shipped
from symphony.manual_text import macro_text, plain_text

_HEADING = re.compile(r"\.(S[HS]) (.*)")
_ATTRIBUTE = re.compile(r"\buser\.kv\.\w+")
_DEEP = "libsym-abi", "symphony-security"
"""Pages for developers: other pages answer first."""
_WORD = re.compile(r"[a-z0-9]+")
MOST_WHOLE, MOST_NAMED = 3, 8


class Kind(IntEnum):
    """Where an entry is from: the better one is shown first."""

    PROGRAM, CALL, HEADING, TAG, ATTRIBUTE = range(5)


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of the manual; `names` are the words, in small letters, that ask for exactly that."""

    kind: Kind
    names: frozenset[str]
    heading: str
    """With the page that it is from."""
    text: str

    def score(self, words: Iterable[str]) -> float:
        """Rate how well the entry fits words that all begin words in it; 0: one of them does not."""
        heading, found = _WORD.findall(self.heading.casefold()), _WORD.findall(self.text.casefold())
        counts = [
            len(found) * sum(each.startswith(word) for each in heading) + sum(each.startswith(word) for each in found)
            for word in words
        ]
        return min(counts, default=0) and sum(counts) / (100 + len(found)) / (
            10 if self.heading.startswith(_DEEP) else 1
        )


def entries(pages: Iterable[tuple[str, str]]) -> list[Entry]:
    """Return all entries. `pages`: names like libsym(3), and their sources."""
    found = [*_of_programs(), *(entry for name, source in pages for entry in _of_page(name, source))]
    described = set[str]().union(*(each.names for each in found if each.kind == Kind.CALL))
    return [*found, *(each for each in _of_libsym() if not each.names & described)]


def is_named(all_entries: Iterable[Entry], word: str) -> bool:
    """Whether a program, or a call, class or method of libsym has this name."""
    return any(word.casefold() in each.names for each in all_entries if each.kind <= Kind.CALL)


def answer(all_entries: Sequence[Entry], words: Sequence[str]) -> str | None:
    """The entries that words ask for, the best ones whole; None: there is none."""
    asked = [word.casefold() for word in words]
    exact = sorted((each for each in all_entries if " ".join(asked) in each.names), key=lambda each: each.kind)
    if exact and exact[0].kind <= Kind.CALL:  # its docstring says the same
        exact = [each for each in exact if not each.heading.startswith(("lips(", "libsym(")) or each.kind == Kind.CALL]
    parts = [part for word in asked for part in _WORD.findall(word)]
    scores = {each: each.score(parts) for each in all_entries} if any(len(part) > 2 for part in parts) else {}
    near = sorted((each for each in scores if scores[each] and each not in exact), key=lambda each: -scores[each])
    whole, rest = (exact[:MOST_WHOLE], exact[MOST_WHOLE:]) if exact else (near[:1], near[1:])
    if not whole:
        return None
    lines = [f"{each.heading}\n{each.text.rstrip()}\n" for each in whole]
    more = [each.heading for each in (rest if exact else rest[: MOST_NAMED - 1])][:MOST_NAMED]
    return "\n".join([*lines, *(["More: " + "; ".join(more)] if more else [])])


def _of_programs() -> Iterator[Entry]:
    for name, path in shipped().items():
        file = path.with_name("__init__.py") if path.stem == "__main__" else path
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        end = f"\n\n`symphony run {name} --help` has its arguments; {path} is its source."
        yield Entry(Kind.PROGRAM, frozenset({name}), f"symphony run {name}", _indented(text + end))


def _of_libsym() -> Iterator[Entry]:
    """Functions, classes and what these have, by their docstrings."""
    for name in libsym.__all__:
        thing = getattr(libsym, name)
        if callable(thing) and inspect.getdoc(thing):
            yield _of_object(name, thing)
        for part in _parts(thing) if inspect.isclass(thing) else ():
            if not part.startswith("_") and inspect.getdoc(getattr(thing, part)):
                yield _of_object(f"{name}.{part}", getattr(thing, part))


def _parts(of: type) -> list[str]:
    """Names that a class defines, or inherits from bases without an entry, as far as completion offers them."""
    bases = [each for each in of.__mro__[1:] if each.__module__.startswith("libsym.")]
    inherited = {part for each in bases if each.__name__ not in libsym.__all__ for part in vars(each)}
    offered = object.__new__(of).__dir__() if inherited else ()
    return [*vars(of), *(part for part in sorted(inherited & {*offered}) if part not in vars(of))]


def _of_object(name: str, thing: object) -> Entry:
    called = (
        re.sub(r"(?<=: |> )'([^']*)'", r"\1", f"{name}{_signature(thing)}")
        .replace("(self, ", "(")
        .replace("(self)", "()")
    )
    names = frozenset({name.casefold(), name.rpartition(".")[2].casefold()})
    return Entry(Kind.CALL, names, f"libsym.{called}", _indented(inspect.getdoc(thing) or ""))


def _signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:  # of a class in C, or an exception's
        return ""


def _of_page(name: str, source: str) -> Iterator[Entry]:
    """Yield each heading with what is below it, each tag with its paragraph, and paragraphs on attributes."""
    lines, attributes = source.splitlines(), set[str]()
    for start, line in enumerate(lines):
        if found := _HEADING.fullmatch(line):
            heading = macro_text(line)
            if heading not in ("NAME", "SYNOPSIS", "SEE ALSO"):
                body = _until(lines, start + 1, (".SH", ".SS"))
                is_call = name.startswith("libsym") and found[1] == "SS"
                names = {heading.partition("(")[0].casefold()} if is_call else {heading.casefold()}
                yield _entry(Kind.CALL if is_call else Kind.HEADING, names, name, heading, body)
        elif line == ".TP" and start + 1 < len(lines):
            tag = macro_text(lines[start + 1])
            body = _until(lines, start + 2, (".TP", ".SH", ".SS", ".PP"))
            yield _entry(Kind.TAG, _names_of(tag), name, tag, body)
        elif line in (".PP", ".SH ATTRIBUTES", ".SH TIERS", ".SH QUOTAS AND DOMAINS"):
            body = _until(lines, start + 1, (".PP", ".SH", ".SS", ".TP"))
            if new := set(_ATTRIBUTE.findall("\n".join(body))) - attributes:
                attributes |= new
                names = {*new, *(each.rpartition(".")[2] for each in new)}
                yield _entry(Kind.ATTRIBUTE, names, name, ", ".join(sorted(new)), body)


def _until(lines: Sequence[str], start: int, ends: tuple[str, ...]) -> list[str]:
    end = next((at for at in range(start, len(lines)) if lines[at].startswith(ends)), len(lines))
    return list(lines[start:end])


def _entry(kind: Kind, names: Iterable[str], page: str, heading: str, body: Sequence[str]) -> Entry:
    return Entry(kind, frozenset(names), f"{page}: {heading}", plain_text("\n".join(body)))


def _names_of(tag: str) -> set[str]:
    """Words of a tag: an option's also without its dashes, and as a key's."""
    parts = [part.strip() for part in re.sub(r"\([^)]*\)", "", tag).casefold().split(",")]
    given = [part.split()[0] if part.startswith("-") else part for part in parts]
    plain = {word.strip("-[]") for word in given}
    return {*given, *plain, *(word.replace("-", "_") for word in plain)} - {""}


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()) + "\n"
