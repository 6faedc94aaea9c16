"""The table in scripts/attacks/README.md of objects that users make the daemon keep: rows match attacks and code."""

import importlib
import re
import sys
from dataclasses import fields
from pathlib import Path

from kvfs.pages.holdings import WEIGHTS, Kind
from symphony.settings.config import Config

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Objects that users make the daemon keep\n"


def rows():
    section = (ROOT / "scripts/attacks/README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def hoard(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts/attacks"))
    monkeypatch.delitem(sys.modules, "hoard", raising=False)
    return importlib.import_module("hoard")


def resolve(name):
    """The value of a dotted name, also of a class's attribute or annotation."""
    parts = name.split(".")
    for at in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for part in parts[at:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {name}")


def test_each_case_of_the_hoard_is_a_row_and_each_row_a_case(monkeypatch):
    assert [row[0].strip("`") for row in rows()] == list(hoard(monkeypatch).CASES)


def test_each_bound_exists_and_each_option_too():
    options = {f"--{field.name.replace('_', '-')}" for field in fields(Config)}
    for name, _what, account, bound, option in rows():
        assert account, name
        assert resolve(bound.strip("`")) is not None
        for word in re.findall(r"`(--[a-z-]+)`", option):
            assert word in options, f"{name}: there is no {word}"


def test_each_kind_that_is_weighed_has_a_row_and_is_what_its_case_makes(monkeypatch):
    found = {kind for row in rows() if isinstance(kind := resolve(row[3].strip("`")), Kind)}
    told = {Kind.FRAME: "frames", Kind.CONNECTION: "connections", Kind.PLAIN: "plain"}
    assert found | told.keys() == set(Kind) == WEIGHTS.keys()
    cases = hoard(monkeypatch).CASES
    assert {kind: cases[case] for kind, case in told.items()} == {kind: kind.word for kind in told}
    for row in rows():
        kind = resolve(row[3].strip("`"))
        if isinstance(kind, Kind):
            assert cases[row[0].strip("`")] == kind.word
