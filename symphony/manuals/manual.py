"""Find the manual pages of this installation, and show them.

man(1) finds the system's pages, but not the pages of a virtual environment or a checkout.
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
from symphony.manuals.manual_entries import answer as answer_of
from symphony.manuals.manual_entries import entries, is_named
from symphony.manuals.manual_text import plain_line, plain_text

_OURS = re.compile(r"(?P<name>(symphony|libsym|lips)([.-][\w.-]+)?|kv|kvfs)\.(?P<section>[1-8])")
"""Names of Symphony's pages, since a share/man may hold other pages too."""
_WHERE = re.compile(r"(?P<name>.+?)(?:\.(?P<dot>[1-8])|\((?P<paren>[1-8])\))?")
_PREFIX = "symphony-"
_MODULE = re.compile(r"^(lib)?sym\.(?=\w)")
"""The module in names that programs use, as in `sym.pred`."""


@dataclass(frozen=True, slots=True)
class Page:
    """Manual page. The file of an alias is the file of its target."""

    name: str
    section: str
    file: Path
    is_alias: bool

    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    def title(self) -> tuple[list[str], str]:
        """Return all names of the page and its purpose, from the line below the heading NAME."""
        line = self.text().partition("\n.SH NAME\n")[2].partition("\n")[0]
        names, _, purpose = plain_line(line).partition(" - ")
        return names.split(", "), purpose


def directories() -> list[Path]:
    """Return the directories that hold pages: the directory of the checkout, or of the virtual environment."""
    checkout = Path(__file__).resolve().parents[2] / "man"
    if checkout.is_dir():
        return [checkout]
    return sorted(Path(sys.prefix, "share", "man").glob("man[1-8]"))


def find_pages(places: Sequence[Path]) -> list[Page]:
    """Return Symphony's pages, sorted by section and name. NotFound: no page is installed."""
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
    """Return the page for a topic like `run`, `kv`, `trace.5` or `libsym(3)`. The page of a command takes precedence.
    None: no page has the name.
    """
    asked = _WHERE.fullmatch(topic)
    if asked is not None:
        section = asked["dot"] or asked["paren"]
        for name in (_PREFIX + asked["name"], asked["name"], f"symphony.{asked['name']}"):
            for page in pages:
                if page.name == name and section in (None, page.section):
                    return page
    return None


def answer(pages: Sequence[Page], words: Sequence[str]) -> Page | str:
    """Return the page that the words name, or else the text of entries that match them.
    NotFound: nothing matches; the message suggests a similar name.
    """
    if page := find_page(pages, "-".join(words)):
        return page
    words = [_MODULE.sub("", word) for word in words]
    found = entries([(f"{each.name}({each.section})", each.text()) for each in pages if not each.is_alias])
    named = [page for family in ("libsym", "lips") if (page := find_page(pages, "-".join([family, *words])))]
    if named and not is_named(found, " ".join(words)):
        return named[0]
    if told := answer_of(found, words):
        return told + "".join(f"\nPage: {each.name}({each.section})\n" for each in named)
    topic = " ".join(words)
    names = [page.name.removeprefix(_PREFIX) for page in pages] + [name for each in found for name in each.names]
    near = difflib.get_close_matches(topic, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "`symphony help` lists all topics"
    raise NotFound(f"the manual has nothing on {topic!r}: {hint}")


def show(page: Page) -> None:
    """Show a page by man(1), which has a pager. Without man, use mandoc. Without either, print plain text."""
    for command in (["man", "-l"], ["mandoc", "-a"]):
        if shutil.which(command[0]):
            status = subprocess.run([*command, str(page.file)], check=False).returncode
            if status:
                raise SymError(f"{command[0]} could not show {page.file}: it ended with status {status}")
            return
    print(plain_text(page.text()))


def listing(pages: Sequence[Page]) -> list[str]:
    """Return a line for each page: commands first, then other topics."""
    rows = [(page.section == "1", _topics(page, pages), page.title()[1]) for page in pages if not page.is_alias]
    width = max(len(topics) for _, topics, _ in rows)
    lines = {
        is_command: [f"  {topics:{width}}  {purpose}" for each, topics, purpose in rows if each == is_command]
        for is_command in (True, False)
    }
    return ["Commands:", *lines[True], "", "Other topics:", *lines[False]]


def _topics(page: Page, pages: Sequence[Page]) -> str:
    """Return the topics that find a page. A topic includes the section if another page would take precedence."""
    short = [name.removeprefix(_PREFIX) for name in page.title()[0]]
    first = {name: find_page(pages, name) for name in short}
    shown = [name if found and found.file == page.file else f"{name}.{page.section}" for name, found in first.items()]
    return ", ".join(shown)
