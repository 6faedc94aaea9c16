"""Constrained answers have the form that was asked for, and speculation changes the steps alone."""

from __future__ import annotations

import json
import re

import pytest

import libsym as sym

pytestmark = pytest.mark.slow
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}, "profession": {"type": "string"}},
    "required": ["name", "born", "profession"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}
ABOUT = "Ada Lovelace was an English mathematician, born in 1815. Charles Babbage was an engineer, born in 1791. "
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
REASON = 'start: ("yes" | "no") ", because " /[a-z ]{4,60}/ "."'
FORMS = {
    "schema": (
        ABOUT + "Give their names, years of birth and professions as JSON.",
        sym.Grammar.json(PEOPLE, compact=True),
    ),
    "regex": ("When did the Second World War end?", sym.Grammar.regex(DATE)),
    "lark": ("Is the sky blue?", sym.Grammar.lark(REASON)),
}


def has_the_form(form: str, text: str) -> bool:
    if form == "schema":
        kinds = [(list(each), [type(value) for value in each.values()]) for each in json.loads(text)]
        return kinds == [(["name", "born", "profession"], [str, int, str])] * 2
    return re.fullmatch({"regex": DATE, "lark": "(yes|no), because [a-z ]{4,60}[.]"}[form], text) is not None


@pytest.mark.parametrize("form", FORMS)
def test_the_answer_has_the_form_and_speculation_only_saves_steps(lips, form):
    question, grammar = FORMS[form]
    answers, steps = [], []
    for draft in (None, "ngram"):
        before = sym.getrusage().steps
        answer = sym.Chat(sym.kv_create()).ask(question, grammar=grammar, draft=draft, max_tokens=100)
        assert has_the_form(form, answer.full_text())
        assert answer.finish == "grammar"
        answers.append(answer.tokens)
        steps.append(sym.getrusage().steps - before)
    assert answers[0] == answers[1]
    assert max(steps) <= len(answers[0]) + 1, "a loop takes so many"
    if form == "schema":  # the others repeat nothing; what is forced saves steps where the grammar is soon enough
        assert steps[1] < steps[0]


def test_what_the_grammar_leaves_no_choice_in_takes_no_steps(lips):
    const = {"name": "Ada Lovelace", "born": 1815}
    before = sym.getrusage().steps
    answer = sym.Chat(sym.kv_create()).ask("Who?", grammar=sym.Grammar.json({"const": const}, compact=True))
    assert json.loads(answer.full_text()) == const
    assert len(answer.tokens) > 10
    assert sym.getrusage().steps - before <= 2


def test_the_command_says_so_when_an_answer_is_not_whole(lips):
    done = lips.finish(
        "constrained", "Who are you?", "--schema", json.dumps(PERSON), "--speculate", "--max-tokens", "5"
    )
    assert done.returncode == 1
    assert done.stdout.startswith('{"name":"')
    assert done.stderr.endswith("constrained: the answer is not whole: it ended after 5 tokens\n")


def test_the_command_takes_each_form(lips):
    assert has_the_form("regex", lips.run("constrained", FORMS["regex"][0], "--regex", DATE).rstrip("\n"))
    assert has_the_form("lark", lips.run("constrained", FORMS["lark"][0], "--lark", REASON).rstrip("\n"))
