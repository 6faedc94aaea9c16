"""The manual pages: of each command what the command line says, sound to two linters, and all links lead somewhere."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.trace.records import ANSWER, ARRIVAL, FILE, LOST, SEAT, STEP, VERSION, BlockKind
from symphony import __version__
from symphony.cli import build_parser
from symphony.manuals.manual import Page, find_pages
from symphony.manuals.manual_text import plain_line, plain_text

MAN = Path(__file__).resolve().parents[3] / "man"
PAGES = find_pages([MAN])
WRITTEN = [page for page in PAGES if not page.is_alias]
MOST_LINES = 400
"""Maximum number of lines of a page that a person can hold."""
OF_ALL = {"-h", "--help"}
"""Described in symphony(1) alone."""
OF_OTHER_PROGRAMS = {"-u", "--kv", "--resume", "--reflink", "--rollback", "--rpc", "--metrics"}
"""Options of python, of lips/ask.py, of cp, of scripts/install, and of mooncake_master, as far as `_`."""


def commands() -> dict[str, argparse.ArgumentParser]:
    return parts(build_parser())


def parts(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: part for action in found for name, part in action.choices.items()}


def options(parser: argparse.ArgumentParser) -> set[str]:
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    own = {word for action in shown for word in action.option_strings}
    return own.union(*map(options, parts(parser).values()))


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))


def described(page: Page) -> set[str]:
    """Return the options that a page's OPTIONS describe, each in one entry."""
    section = page.text().partition("\n.SH OPTIONS\n")[2].partition("\n.SH ")[0]
    entries = [options_in(plain_line(entry)) for entry in re.findall(r"^\.TP\n(.*)$", section, re.MULTILINE)]
    found = set[str]().union(*entries)
    assert sum(map(len, entries)) == len(found), f"{page.name}: an option has two entries"
    return found


def names_of(page: Page) -> list[str]:
    return [name.removeprefix("symphony-") for name in page.title()[0]]


def page_of(name: str) -> Page:
    return next(page for page in PAGES if (page.name, page.section) == (name, "1"))


def test_every_command_has_a_page_and_every_page_a_command():
    found = {page.name.removeprefix("symphony-") for page in PAGES if page.section == "1"}
    assert found - {"symphony"} == set(commands())


def test_a_page_and_its_aliases_have_the_names_that_it_says():
    for page in WRITTEN:
        names = {each.name for each in PAGES if each.file == page.file}
        if page.name == "libsym":
            continue  # its calls are found in it
        assert names == set(page.title()[0]), page


def test_symphony_1_lists_every_command():
    listed = re.findall(r'^\.BR (\w+) ", " symphony\\-(\w+) \(1\)$', page_of("symphony").text(), re.MULTILINE)
    assert sorted(listed) == sorted((name, name) for name in commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_page_of_a_command_describes_its_options_and_no_others(name):
    page = page_of(f"symphony-{name}")
    known = set[str]().union(*(options(commands()[each]) for each in names_of(page)))
    assert described(page) == known - OF_ALL


def test_the_options_of_all_commands_are_in_symphony_1():
    own = {word for action in build_parser()._actions for word in action.option_strings}
    assert described(page_of("symphony")) == own | OF_ALL | {"--socket"}


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.section == "1"], ids=lambda page: page.name)
def test_a_page_mentions_no_option_that_does_not_exist(page):
    known = set[str]().union(*map(options, commands().values()), options(build_parser()))
    text = re.sub(r"symphony\.toml", "", plain_text(page.text()))
    assert options_in(re.sub(r"\$ .*|^ {7}(cat|cp|mkdir|ls) .*", "", text)) - known - OF_OTHER_PROGRAMS == set()


def test_every_part_of_a_command_is_described():
    for name, command in commands().items():
        for part in parts(command):
            assert re.search(rf"^\.BI? {part}\b", page_of(f"symphony-{name}").text(), re.MULTILINE), f"{name} {part}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: f"{page.name}.{page.section}")
def test_two_linters_find_nothing(page):
    linters = {
        "mandoc": ["mandoc", "-T", "lint", "-W", "style", page.file],
        "groff": ["groff", "-K", "utf8", "-man", "-ww", "-T", "utf8", "-z", page.file],
    }
    missing = [name for name in linters if not shutil.which(name)]
    for name in linters.keys() - set(missing):
        done = subprocess.run(linters[name], capture_output=True, text=True, check=False, timeout=100)
        found = (done.stdout + done.stderr).splitlines()
        assert [line for line in found if "text line longer than 80" not in line] == [], name
    if missing:
        pytest.skip(f"MANUAL PAGES NOT LINTED BY {' AND '.join(missing)}: apt-get install mandoc groff-base")


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: f"{page.name}.{page.section}")
def test_a_page_is_short_says_what_it_is_and_of_which_release_and_its_links_lead_somewhere(page):
    assert page.text().count("\n") <= MOST_LINES
    linked = re.findall(r"\b((?:symphony|libsym|lips)[\w.-]*|kv|kvfs) ?\(([1-8])\)", plain_text(page.text()))
    assert set(linked) - {(each.name, each.section) for each in PAGES} == set()
    first = plain_line(page.text().partition("\n")[0])
    head = rf'\.TH {page.name.upper()} {page.section} "20\d\d-\d\d-\d\d"'
    assert re.fullmatch(rf'{head} "Symphony {__version__.rpartition(".")[0]}" "[\w ]+"', first)
    assert page.title()[1]
    assert ".SH SEE ALSO" in page.text().replace('"', "")


def test_the_layout_of_a_trace_is_what_its_manual_says():
    """Each structure that symphony-trace(5) lists: offsets, types and names."""
    text = (MAN / "symphony-trace.5").read_text(encoding="utf-8")
    described = re.findall(r"^(?:offset| {6}) +(\d+) +(u?int\d+|double) +(\w+)", text, re.MULTILINE)
    kinds = {"int8": "i1", "int16": "i2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "double": "<f8"}
    expected = []
    dtype: Any
    for dtype in (ARRIVAL, ANSWER, STEP, SEAT, LOST, FILE):
        expected += [(dtype.fields[name][1], dtype[name], name) for name in dtype.names]
    found = [(int(at), np.dtype(kinds[kind]), "reserved" if name == "0" else name) for at, kind, name in described]
    assert found == expected
    assert f"symphony trace {VERSION}" in text
    assert all(re.search(rf"^\.SS {int(kind)}: {kind.name.lower()}$", text, re.MULTILINE) for kind in BlockKind)
