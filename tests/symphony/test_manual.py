"""The manual page and the command line say the same."""

import argparse
import re
from pathlib import Path

from symphony.cli import build_parser

MANUAL = Path(__file__).resolve().parents[2] / "man" / "symphony.1"


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subparsers.choices)


def manual_text() -> str:
    return MANUAL.read_text(encoding="utf-8").replace("\\-", "-")


def test_every_command_has_a_section_and_every_section_a_command():
    sections = re.findall(r"^\.SS (\w+)$", manual_text(), re.MULTILINE)
    assert sorted(sections) == sorted(commands())


def test_every_option_is_described_and_every_described_option_exists():
    known = {word for command in commands().values() for action in command._actions for word in action.option_strings}
    described = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", manual_text()))
    of_other_programs = {"-d", "--kv", "--resume"}  # getfattr's, and lips/ask.py's in the examples
    assert described - of_other_programs == known
