"""Rules for every program that ships: its length, its words, its place in lips(7) and the page of its purpose."""

import ast
import re
import runpy
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

import libsym as sym
from symphony.launcher.common.finding import PURPOSES, does_without_sandbox, shipped

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = shipped()


def manual(page):
    text = (ROOT / "man" / f"{page}.7").read_text(encoding="utf-8")
    return text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e\n", "\\\n")


MANUAL = manual("lips")
PAGES = {name: f"lips-{purpose.lower()}" for purpose, names in PURPOSES.items() for name in names}
PAGES["gateway"] = "lips-gateway"

PACKAGES = {name for name, path in PROGRAMS.items() if path.name == "__main__.py"}


def docstring(name):
    path = PROGRAMS[name].with_name("__init__.py") if name in PACKAGES else PROGRAMS[name]
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


class Parsed(Exception):
    """A program asks for its arguments, by this parser."""


@cache
def parser_of(name):
    """Return the parser that a program has made when it asks for its arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(PROGRAMS[name])])
        patch.setattr(sym.Arguments, "parse_args", lambda parser: (_ for _ in ()).throw(Parsed(parser)))
        with pytest.raises(Parsed) as found:
            runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
    return found.value.args[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_short_and_says_what_it_is_for_as_the_overview_does(name):
    num_lines = len(PROGRAMS[name].read_text(encoding="utf-8").splitlines())
    assert 20 <= num_lines <= 120 or name in PACKAGES
    first, _, rest = docstring(name).partition("\n")
    assert first.endswith(".")
    assert len(first) <= 100, "`symphony run --list` has one line for it"
    assert f"symphony run {name}" in rest
    assert re.findall(rf"^\.TP\n\.B {name}\n(.*)$", MANUAL, re.MULTILINE) == [first]


def test_a_package_that_ships_may_say_that_it_needs_no_sandbox_and_nothing_else_may(tmp_path):
    assert {name for name, path in PROGRAMS.items() if does_without_sandbox(str(path))} == {"gateway"}
    copy = shutil.copytree(PROGRAMS["gateway"].parent, tmp_path / "gateway")
    assert not does_without_sandbox(str(copy / "__main__.py"))


@pytest.mark.parametrize("page", sorted({*PAGES.values(), "lips", "lips-gateway-fields"}))
def test_a_page_has_an_example_and_the_overview_names_it(page):
    assert re.search(r"^\.EX\n\$ ", manual(page), re.MULTILINE)
    assert page == "lips" or f".BR {page} (7)" in MANUAL or f".BR {page} (7)" in manual("lips-gateway")


def test_programs_are_listed_by_what_they_are_for_as_the_manual_has_them():
    sections = re.split(r"^\.SH ([A-Z ]+)\n", MANUAL, flags=re.MULTILINE)[1:]
    found = {
        heading.title(): tuple(re.findall(r"^\.TP\n\.B (\w+)$", text, re.MULTILINE))
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert {heading: names for heading, names in found.items() if heading in PURPOSES} == PURPOSES
    assert sorted(name for names in PURPOSES.values() for name in names) == sorted(PROGRAMS)


def in_its_page(name):
    """Return what the manual says of a program: a section, or for the gateway the whole page."""
    page = manual(PAGES[name])
    section = page if name in PACKAGES else page.partition(f"\n.SS {name}\n")[2].partition("\n.S")[0]
    return "\n".join(re.findall(r"^\.EX\n(.*?)^\.EE$", section, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("text_of", [docstring, in_its_page])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_examples_that_it_shows_are_taken(name, text_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_of(name)
    for word in set(re.findall(r"\b(?:docs|src|\w+\.(?:md|txt|db|jsonl))\b", text)):
        Path(word).write_text("a text") if "." in word else Path(word).mkdir()
    examples = re.findall(r"^(?:\$| )*(?:cat .*)?symphony run (?:-\S+ \S+ )*(\w+)( .*)?$", text, re.MULTILINE)
    assert examples
    for program, words in examples:
        assert program == name
        parser_of(name).parse_args(shlex.split(words.partition("  #")[0]))


def test_the_page_of_the_gateway_describes_its_options_and_no_others():
    section = manual("lips-gateway").partition("\n.SH OPTIONS\n")[2].partition("\n.SH ")[0]
    described = {word for entry in re.findall(r"^\.TP\n(.*)$", section, re.MULTILINE) for word in options_in(entry)}
    known = {word for each in parser_of("gateway")._actions for word in each.option_strings}
    assert described == known - {"-h", "--help"}


def options_in(text):
    return re.findall(r"--[a-z][a-z-]*", text)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_explains_its_arguments_and_refuses_others(name, capsys):
    with pytest.raises(SystemExit) as helped:
        parser_of(name).parse_args(["--help"])
    assert helped.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) >= 3
    with pytest.raises(SystemExit) as refused:
        parser_of(name).parse_args(["--no-such-option"])
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("name", "option"), [("beam", "normalize"), ("jacobi", "window"), ("smc", "longest"), ("watermark", "delta")]
)
def test_a_number_that_no_run_could_end_with_is_refused(name, option, capsys):
    with pytest.raises(SystemExit) as refused:
        parser_of(name).parse_args(["a text", f"--{option}=1000000"])
    assert refused.value.code == 2
    assert f"argument --{option}: '1000000' is not from" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_of_no_use_is_refused_in_one_line(name, capsys):
    """Options refuse an empty text; `--max-tokens` refuses NaN, 0 and -1, too."""
    parser = parser_of(name)
    assert type(parser) is sym.Arguments
    for action in parser._actions:
        if action.nargs == 0 or action.choices is not None:
            continue
        wrong = ["", *(["nan", "0", "-1"] if action.dest == "max_tokens" else [])]
        for value in wrong:
            with pytest.raises(SystemExit) as refused:
                parser.parse_args([f"{action.option_strings[-1]}={value}" if action.option_strings else value])
            err = capsys.readouterr().err
            assert (refused.value.code, err.count("\n")) == (2, 1), (action.dest, value)
            assert err.startswith(f"symphony run {name}: argument "), (action.dest, value, err)
