"""Constrained answers have the form that was asked for: the command. `tests/symphony` has the rest."""

import json
import re

import pytest

pytestmark = pytest.mark.slow
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
REASON = 'start: ("yes" | "no") ", because " /[a-z ]{4,60}/ "."'


def test_the_command_takes_each_form(lips):
    said = lips.run("constrained", "When did the Second World War end?", "--regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}\n", said)
    said = lips.run("constrained", "Is the sky blue?", "--lark", REASON)
    assert re.fullmatch("(yes|no), because [a-z ]{4,60}[.]\n", said)
    asked = [
        "Ada Lovelace was born in 1815. Give her name and her year of birth as JSON.",
        "--schema",
        json.dumps(PERSON),
    ]
    whole = lips.run("constrained", *asked)
    assert {name: type(value) for name, value in json.loads(whole).items()} == {"name": str, "born": int}
    assert lips.run("constrained", *asked, "--speculate") == whole


def test_the_command_says_so_when_an_answer_is_not_whole(lips):
    asked = ["Who are you?", "--schema", json.dumps(PERSON), "--speculate", "--max-tokens", "5"]
    done = lips.finish("constrained", *asked)
    assert done.returncode == 1
    assert done.stdout.startswith('{"name":"')
    assert done.stderr.endswith("constrained: the answer is not whole: it ended after 5 tokens\n")
