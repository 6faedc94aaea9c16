"""Entries of the manual: the text below one heading or tag of a page, or a docstring of libsym or of a program.

`symphony help` searches the entries for several words, or for a word that is not the name of a page.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import libsym
from symphony.launcher.common.finding import shipped
from symphony.manuals.manual_text import macro_text, plain_text

_HEADING = re.compile(r"\.(S[HS]) (.*)")
_ATTRIBUTE = re.compile(r"\buser\.kv\.\w+")
_DEEP = "libsym-abi", "libsym-operations", "lips-gateway-fields", "symphony-security"
"""Pages for developers. Their entries get a lower score, so entries of other pages are shown first."""
_WORD = re.compile(r"[a-z0-9]+")
MOST_WHOLE, MOST_NAMED = 3, 8


class EntryKind(IntEnum):
    """Origin of an entry. Entries of a lower kind are shown first."""

    PROGRAM, CALL, HEADING, TAG, ATTRIBUTE = range(5)


@dataclass(frozen=True, slots=True)
class ManualEntry:
    """A piece of the manual. `names`: words, in small letters, that name exactly this entry."""

    kind: EntryKind
    names: frozenset[str]
    heading: str
    """Heading of the entry, with the name of its page."""
    text: str

    def score(self, words: Iterable[str]) -> float:
        """Return a score of the match with `words`, each taken as the beginning of a word. 0: a word is missing."""
        heading, found = _WORD.findall(self.heading.casefold()), _WORD.findall(self.text.casefold())
        counts = [
            len(found) * sum(each.startswith(word) for each in heading) + sum(each.startswith(word) for each in found)
            for word in words
        ]
        return min(counts, default=0) and sum(counts) / (100 + len(found)) / (
            10 if self.heading.startswith(_DEEP) else 1
        )


def entries(pages: Iterable[tuple[str, str]]) -> list[ManualEntry]:
    """Return all entries. `pages`: pairs of a name like libsym(3) and the page's source."""
    found = [*_of_programs(), *(entry for name, source in pages for entry in _of_page(name, source))]
    described = set[str]().union(*(each.names for each in found if each.kind == EntryKind.CALL))
    return [*found, *(each for each in _of_libsym() if not each.names & described)]


def is_named(all_entries: Iterable[ManualEntry], word: str) -> bool:
    """Return whether a program, or a call, class or method of libsym has this name."""
    return any(word.casefold() in each.names for each in all_entries if each.kind <= EntryKind.CALL)


def answer(all_entries: Sequence[ManualEntry], words: Sequence[str]) -> str | None:
    """Return the text of the entries that match `words`: the best entries in full, of other entries only the headings.
    None: no entry matches.
    """
    asked = [word.casefold() for word in words]
    exact = sorted((each for each in all_entries if " ".join(asked) in each.names), key=lambda each: each.kind)
    if exact and exact[0].kind <= EntryKind.CALL:  # its docstring says the same as lips(7) or libsym(3)
        repeated = "lips", "libsym("
        exact = [each for each in exact if each.kind == EntryKind.CALL or not each.heading.startswith(repeated)]
    parts = [part for word in asked for part in _WORD.findall(word)]
    scores = {each: each.score(parts) for each in all_entries} if any(len(part) > 2 for part in parts) else {}
    near = sorted((each for each in scores if scores[each] and each not in exact), key=lambda each: -scores[each])
    whole, rest = (exact[:MOST_WHOLE], exact[MOST_WHOLE:]) if exact else (near[:1], near[1:])
    if not whole:
        return None
    lines = [f"{each.heading}\n{each.text.rstrip()}\n" for each in whole]
    more = [each.heading for each in (rest if exact else rest[: MOST_NAMED - 1])][:MOST_NAMED]
    return "\n".join([*lines, *(["More: " + "; ".join(more)] if more else [])])


def _of_programs() -> Iterator[ManualEntry]:
    for name, path in shipped().items():
        file = path.with_name("__init__.py") if path.stem == "__main__" else path
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        end = f"\n\n`symphony run {name} --help` has its arguments; {path} is its source."
        yield ManualEntry(EntryKind.PROGRAM, frozenset({name}), f"symphony run {name}", _indented(text + end))


def _of_libsym() -> Iterator[ManualEntry]:
    """Yield an entry for each documented function, class and member of libsym."""
    for name in libsym.__all__:
        thing = getattr(libsym, name)
        if callable(thing) and inspect.getdoc(thing):
            yield _of_object(name, thing)
        for part in _parts(thing) if inspect.isclass(thing) else ():
            if not part.startswith("_") and inspect.getdoc(getattr(thing, part)):
                yield _of_object(f"{name}.{part}", getattr(thing, part))


def _parts(of: type) -> list[str]:
    """Return the names that a class defines, or inherits from bases that have no entry.
    An inherited name counts only if `__dir__` has it, so that completion offers it.
    """
    bases = [each for each in of.__mro__[1:] if each.__module__.startswith("libsym.")]
    inherited = {part for each in bases if each.__name__ not in libsym.__all__ for part in vars(each)}
    offered = object.__new__(of).__dir__() if inherited else ()
    return [*vars(of), *(part for part in sorted(inherited & {*offered}) if part not in vars(of))]


def _of_object(name: str, thing: object) -> ManualEntry:
    called = (
        re.sub(r"(?<=: |> )'([^']*)'", r"\1", f"{name}{_signature(thing)}")
        .replace("(self, ", "(")
        .replace("(self)", "()")
    )
    names = frozenset({name.casefold(), name.rpartition(".")[2].casefold()})
    return ManualEntry(EntryKind.CALL, names, f"libsym.{called}", _indented(inspect.getdoc(thing) or ""))


def _signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:  # classes in C and exceptions have no signature
        return ""


def _of_page(name: str, source: str) -> Iterator[ManualEntry]:
    """Yield an entry for each heading with its text, each tag with its paragraph, and each paragraph on attributes."""
    lines, attributes = source.splitlines(), set[str]()
    for start, line in enumerate(lines):
        if found := _HEADING.fullmatch(line):
            heading = macro_text(line)
            if heading not in ("NAME", "SYNOPSIS", "SEE ALSO"):
                body = _until(lines, start + 1, (".SH", ".SS"))
                is_call = name.startswith("libsym") and found[1] == "SS"
                names = {heading.partition("(")[0].casefold()} if is_call else {heading.casefold()}
                yield _entry(EntryKind.CALL if is_call else EntryKind.HEADING, names, name, heading, body)
        elif line == ".TP" and start + 1 < len(lines):
            tag = macro_text(lines[start + 1])
            body = _until(lines, start + 2, (".TP", ".SH", ".SS", ".PP"))
            yield _entry(EntryKind.TAG, _names_of(tag), name, tag, body)
        elif line == ".PP":
            body = _until(lines, start + 1, (".PP", ".SH", ".SS", ".TP"))
            if new := set(_ATTRIBUTE.findall("\n".join(body))) - attributes:
                attributes |= new
                names = {*new, *(each.rpartition(".")[2] for each in new)}
                yield _entry(EntryKind.ATTRIBUTE, names, name, ", ".join(sorted(new)), body)


def _until(lines: Sequence[str], start: int, ends: tuple[str, ...]) -> list[str]:
    end = next((at for at in range(start, len(lines)) if lines[at].startswith(ends)), len(lines))
    return list(lines[start:end])


def _entry(kind: EntryKind, names: Iterable[str], page: str, heading: str, body: Sequence[str]) -> ManualEntry:
    return ManualEntry(kind, frozenset(names), f"{page}: {heading}", plain_text("\n".join(body)))


def _names_of(tag: str) -> set[str]:
    """Return the names in a tag. An option also counts without its dashes, and spelled as a configuration key."""
    parts = [part.strip() for part in re.sub(r"\([^)]*\)", "", tag).casefold().split(",")]
    given = [part.split()[0] if part.startswith("-") else part for part in parts]
    plain = {word.strip("-[]") for word in given}
    return {*given, *plain, *(word.replace("-", "_") for word in plain)} - {""}


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()) + "\n"
