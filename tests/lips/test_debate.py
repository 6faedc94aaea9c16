"""Agents read each other's answers, vote, and a tie is told."""

import pytest

import libsym as sym
from lips import debate
from tests.lips.scripted import scripted

pytestmark = pytest.mark.slow


def test_each_agent_reads_what_the_others_said_and_the_question_is_computed_once(tiny, capsys, monkeypatch):
    arguments = ["debate", "How many?", "--agents", "3", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    first, second = ["One.", "Two.", "Two!"], ["Three.", "Two.", "Two!"]
    asked = []
    with scripted([*first, *second, "three", "Two.", "two"]) as left, monkeypatch.context() as patch:
        given = sym.Chat.ask

        def ask(chat, content, **how):
            asked.append(content)
            return given(chat, content, **how)

        patch.setattr(sym.Chat, "ask", ask)
        debate.main(sym.Arguments(debate.__doc__))
    assert not left
    assert asked[3] == debate.READ.format(others="Two.\n\nTwo!")
    assert asked[5] == debate.READ.format(others="One.\n\nTwo.")
    shown = capsys.readouterr().out
    assert shown.endswith("2 of 3: two\n1 of 3: three\n")
    assert "[round 2, agent 1] Three.\n" in shown


def test_a_debate_without_answers_is_no_tie(tiny, monkeypatch):
    monkeypatch.setattr("sys.argv", ["debate", "How many?", "--agents", "2", "--rounds", "1"])
    with scripted(["One.", "Two.", " ", "."]), pytest.raises(sym.Invalid, match="no agent says an answer"):
        debate.main(sym.Arguments(debate.__doc__))


def test_a_tie_ends_with_status_1(lips):
    done = lips.finish("debate", "Say a number.", "--agents", "2", "--rounds", "1", "--max-tokens", "4", "--quiet")
    votes = [line for line in done.stdout.splitlines() if " of 2: " in line]
    assert len(votes) == len(done.stdout.splitlines())
    assert done.returncode == (0 if len(votes) == 1 else 1)
    assert ("tie" in done.stderr) == (len(votes) != 1)
