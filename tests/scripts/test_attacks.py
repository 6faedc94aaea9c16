"""Attacks of other users and of keys, in their short form: each promise holds, and the tables name all of them."""

import importlib
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvfs.pages.holdings import WEIGHTS, Kind
from symphony.settings.config import Config
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = sorted(path.stem for path in (ROOT / "scripts/attacks").glob("*.py") if path.stem != "attacked")
PAGE = ROOT / "man/symphony-security.7"

can_mount = os.access("/dev/fuse", os.R_OK | os.W_OK)
needs_mount = pytest.mark.skipif(not can_mount, reason="NO MOUNT TESTED: /dev/fuse is missing or closed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO ATTACK TRIED: needs root, to be several users")


def run(script, *words, status=0):
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, words)]
    done = forked.run(command, text=True, timeout=110)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@needs_mount
@needs_root
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails(name):
    assert run(f"attacks/{name}.py", "--quick").startswith("held: ")


@pytest.mark.slow
@needs_mount
@needs_root
def test_how_long_attacks_held_the_main_thread_is_told():
    told = run("soak/attacks.py", "--quick")
    assert re.search(r"^1 attacks; held over 1 ms \d+ of [1-9]\d* times", told, re.MULTILINE)


def test_the_page_on_security_names_every_attack():
    assert len(ATTACKS) > 20
    assert [name for name in ATTACKS if not re.search(rf"\.IR? {name}\.py", PAGE.read_text())] == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Cases: \\fItwins\\fP.\n", "", "twins: no case asks this cache"),
        ("\\fItwins\\fP", "\\fIsecrets\\fP", "secrets: there is no such case"),
        (", \\fIflights of keys\\fP", "", "flights of keys: no cache of the table has this case"),
        (".SH CACHES", ".SH NONE", "grammars: no cache of the table has this case"),
    ],
)
def test_a_cache_of_the_manual_without_a_case_fails_the_checks(tmp_path, old, new, says):
    text = PAGE.read_text()
    assert old in text
    (tmp_path / "page.7").write_text(text.replace(old, new))
    assert says in run("attacks/caches.py", "--table", tmp_path / "page.7", status=1).splitlines()


def test_the_checks_look_at_the_caches_of_the_manual():
    run("attacks/caches.py", "--table", PAGE)
    assert "caches.py --table man/symphony-security.7" in (ROOT / "scripts/check").read_text()


SECTION = "## Objects that users make the daemon keep\n"


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/attacks"))
    monkeypatch.delitem(sys.modules, "hoard", raising=False)
    return importlib.import_module("hoard").CASES


@pytest.fixture
def rows():
    """The table of objects that users make the daemon keep: case, what, account, bound, option."""
    section = (ROOT / "scripts/attacks/README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def resolve(name):
    parts = name.strip("`").split(".")
    for at in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for part in parts[at:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {name}")


def test_each_case_of_the_hoard_is_a_row_whose_bound_and_options_exist(cases, rows):
    assert [row[0].strip("`") for row in rows] == list(cases)
    options = {f"--{field.name.replace('_', '-')}" for field in fields(Config)}
    for name, _what, account, bound, option in rows:
        assert account, name
        assert resolve(bound) is not None
        assert set(re.findall(r"`(--[a-z-]+)`", option)) <= options, name


def test_each_kind_that_is_weighed_has_a_row_and_is_what_its_case_makes(cases, rows):
    kinds = {name.strip("`"): resolve(bound) for name, _, _, bound, _ in rows}
    found = {name: kind for name, kind in kinds.items() if isinstance(kind, Kind)}
    told = {Kind.FRAME: "frames", Kind.CONNECTION: "connections", Kind.PLAIN: "plain"}
    assert {*found.values(), *told} == set(Kind) == WEIGHTS.keys()
    for name, kind in [*found.items(), *((name, kind) for kind, name in told.items())]:
        assert cases[name] == kind.word
