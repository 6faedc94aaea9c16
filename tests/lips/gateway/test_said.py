"""Blocks of an answer, text and calls, which every interface tells in its own form."""

import pytest

from lips.gateway.asked import Asked
from lips.gateway.engine import Piece
from lips.gateway.fields import Fields
from lips.gateway.prompts import Prompt
from lips.gateway.said import Said
from lips.gateway.sampling import sampling
from lips.gateway.tools import ToolChoice

TOOLS = [{"type": "function", "function": {"name": "time"}}]
CALL = '<tool_call>{"name": "time", "arguments": {"zone": 1}}</tool_call>'


def said_by(*texts, finish="stop", tools=TOOLS):
    """Return the record of an answer in these pieces, and its changes."""
    said = Said(Asked(prompt=Prompt(), sampling=sampling(Fields({}), {}), choice=ToolChoice(tools)))
    changes = [change for number, text in enumerate(texts) for change in said.hear(Piece(text, [number]))]
    return said, [(kind, block.index, text) for kind, block, text in changes + said.end(finish)]


def test_text_and_calls_are_blocks_in_their_order():
    said, changes = said_by("Look: ", CALL, " Well", "?")
    assert [(block.call, block.text) for block in said.blocks] == [
        (None, "Look: "),
        ("time", '{"zone": 1}'),
        (None, "Well?"),
    ]
    assert [block.arguments for block in said.calls] == [{"zone": 1}]
    assert said.text == "Look: Well?"
    assert [kind for kind, _, _ in changes if kind != "grows"] == ["begins", "ends"] * 3
    for index, block in enumerate(said.blocks):
        assert "".join(text for kind, at, text in changes if (kind, at) == ("grows", index)) == block.text


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_the_last_block_is_as_whole_as_the_answer(finish, status):
    said, changes = said_by("<tool_call>", '{"name": "time", "arguments": {"zo', finish=finish)
    assert [(block.status, block.arguments) for block in said.blocks] == [(status, {})]
    assert changes[-1] == ("ends", 0, "")
    assert said.close("incomplete") == []


def test_tokens_are_taken_once():
    said, _ = said_by("a", "", "b", tools=())
    assert (said.text, said.take().tokens, said.take().tokens) == ("ab", [0, 1, 2], [])
