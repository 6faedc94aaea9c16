"""The manual page and the command line say the same."""

import argparse
import re
from pathlib import Path

import numpy as np

from scheduler.trace.records import ANSWER, ARRIVAL, LOST, SEAT, STEP, VERSION, BlockKind
from symphony.cli import build_parser

MANUAL = Path(__file__).resolve().parents[2] / "man" / "symphony.1"


def commands() -> dict[str, argparse.ArgumentParser]:
    return parts(build_parser())


def parts(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: part for action in found for name, part in action.choices.items()}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Those of its own, and of its parts."""
    own = {word for action in parser._actions for word in action.option_strings}
    return own.union(*map(options, parts(parser).values()))


def manual_text() -> str:
    pages = [MANUAL, *MANUAL.parent.glob("symphony-*.1")]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\-", "-")


def test_every_command_has_a_section_and_every_section_a_command():
    sections = re.findall(r"^\.SS (\w+)$", manual_text(), re.MULTILINE)
    assert sorted(sections) == sorted(commands())


def test_every_option_is_described_and_every_described_option_exists():
    known = set[str]().union(*map(options, commands().values()))
    described = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", manual_text()))
    of_other_programs = {"-u", "--kv", "--resume"}  # python's, and those of lips/ask.py in the examples
    assert described - of_other_programs == known


def test_every_part_of_a_command_is_described():
    sections = dict(re.findall(r"^\.SS (\w+)$(.*?)(?=^\.S)", manual_text(), re.MULTILINE | re.DOTALL))
    for name, command in commands().items():
        for part in parts(command):
            assert re.search(rf"^\.BI? {part}\b", sections[name], re.MULTILINE), f"{name} {part}"


def test_the_layout_of_a_trace_is_what_its_manual_says():
    """Each structure that symphony-trace(5) lists: offsets, types and names."""
    text = (MANUAL.parent / "symphony-trace.5").read_text(encoding="utf-8")
    described = re.findall(r"^(?:offset| {6}) +(\d+) +(u?int\d+|double) +(\w+)", text, re.MULTILINE)
    kinds = {"int8": "i1", "int16": "i2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "double": "<f8"}
    expected = []
    for dtype in (ARRIVAL, ANSWER, STEP, SEAT, LOST):
        expected += [(dtype.fields[name][1], dtype[name], name) for name in dtype.names]
    found = [(int(at), np.dtype(kinds[kind]), "reserved" if name == "0" else name) for at, kind, name in described]
    assert found == expected
    assert f"symphony trace {VERSION}" in text
    assert all(re.search(rf"^\.SS {int(kind)}: {kind.name.lower()}$", text, re.MULTILINE) for kind in BlockKind)
