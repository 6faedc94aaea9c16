"""The manual pages of this very Symphony, wherever it is installed: found beside it, and shown or printed.

man(1) knows the pages of the system's, not those of a virtual environment or of a checkout.
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libsym.errors import NotFound, SymError
from symphony.manual_entries import answer as answer_of
from symphony.manual_entries import entries, is_named
from symphony.manual_text import plain_line, plain_text

_OURS = re.compile(r"(?P<name>(symphony|libsym)([.-][\w.-]+)?|kv|kvfs|lips)\.(?P<section>[1-8])")
"""A share/man may have the pages of others, too."""
_WHERE = re.compile(r"(?P<name>.+?)(?:\.(?P<dot>[1-8])|\((?P<paren>[1-8])\))?")
_PREFIX = "symphony-"


@dataclass(frozen=True, slots=True)
class Page:
    """One page; an alias has the file of the page that it is another name of."""

    name: str
    section: str
    file: Path
    is_alias: bool

    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    def title(self) -> tuple[list[str], str]:
        """All its names, and what it is about: the line below NAME."""
        line = self.text().partition("\n.SH NAME\n")[2].partition("\n")[0]
        names, _, purpose = plain_line(line).partition(" - ")
        return names.split(", "), purpose


def directories() -> list[Path]:
    """Of pages: the checkout's that this module is in, or those of the environment that it is installed in."""
    checkout = Path(__file__).resolve().parents[1] / "man"
    if checkout.is_dir():
        return [checkout]
    return sorted(Path(sys.prefix, "share", "man").glob("man[1-8]"))


def find_pages(places: Sequence[Path]) -> list[Page]:
    """All of ours, by section and name. NotFound: there are none."""
    files = {file.name: file for place in places for file in place.iterdir() if _OURS.fullmatch(file.name)}
    if not files:
        raise NotFound("the manual is not installed with this Symphony: `symphony COMMAND --help` says the options")
    return sorted((_page(file, files) for file in files.values()), key=lambda page: (page.section, page.name))


def _page(file: Path, files: dict[str, Path]) -> Page:
    found = _OURS.fullmatch(file.name)
    assert found is not None
    with file.open(encoding="utf-8") as source:
        first = source.readline()
    target = first.removeprefix(".so ").strip().rpartition("/")[2] if first.startswith(".so ") else ""
    return Page(found["name"], found["section"], files.get(target, file), is_alias=bool(target))


def find_page(pages: Sequence[Page], topic: str) -> Page | None:
    """`run`, `kv`, `trace.5` or `libsym(3)`: a command's page goes first."""
    asked = _WHERE.fullmatch(topic)
    if asked is not None:
        section = asked["dot"] or asked["paren"]
        for name in (_PREFIX + asked["name"], asked["name"], f"symphony.{asked['name']}"):
            for page in pages:
                if page.name == name and section in (None, page.section):
                    return page
    return None


def answer(pages: Sequence[Page], words: Sequence[str]) -> Page | str:
    """The page that words name, or else what the manual has on them. NotFound names what is near."""
    if page := find_page(pages, "-".join(words)):
        return page
    found = entries([(f"{each.name}({each.section})", each.text()) for each in pages if not each.is_alias])
    if not is_named(found, " ".join(words)) and (page := find_page(pages, "-".join(["libsym", *words]))):
        return page
    if told := answer_of(found, words):
        return told
    topic = " ".join(words)
    names = [page.name.removeprefix(_PREFIX) for page in pages] + [name for each in found for name in each.names]
    near = difflib.get_close_matches(topic, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "`symphony help` lists all topics"
    raise NotFound(f"the manual has nothing on {topic!r}: {hint}")


def show(page: Page) -> None:
    """By man(1), which has a pager; else by mandoc; else as plain text."""
    for command in (["man", "-l"], ["mandoc", "-a"]):
        if shutil.which(command[0]):
            status = subprocess.run([*command, str(page.file)], check=False).returncode
            if status:
                raise SymError(f"{command[0]} could not show {page.file}: it ended with status {status}")
            return
    print(plain_text(page.text()))


def listing(pages: Sequence[Page]) -> list[str]:
    """A line for each page: first the commands, then what else there is."""
    rows = [(page.section == "1", _topics(page, pages), page.title()[1]) for page in pages if not page.is_alias]
    width = max(len(topics) for _, topics, _ in rows)
    lines = {
        is_command: [f"  {topics:{width}}  {purpose}" for each, topics, purpose in rows if each == is_command]
        for is_command in (True, False)
    }
    return ["Commands:", *lines[True], "", "Other topics:", *lines[False]]


def _topics(page: Page, pages: Sequence[Page]) -> str:
    """All words that are enough to ask for it: with a section where another page goes first."""
    short = [name.removeprefix(_PREFIX) for name in page.title()[0]]
    first = {name: find_page(pages, name) for name in short}
    shown = [name if found and found.file == page.file else f"{name}.{page.section}" for name, found in first.items()]
    return ", ".join(shown)
