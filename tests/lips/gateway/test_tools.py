"""Calls in what a model says, in whatever pieces it comes."""

import json
from typing import Any

import pytest

from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields
from lips.gateway.tools import ToolArguments, ToolCall, ToolChoice, ToolParser

WEATHER = '{"name": "weather", "arguments": {"city": "Pa\\"r}is", "days": [1, {"a": 2}]}}'
TIME = '{"name": "time", "arguments": {}}'


OFFERED = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]


def heard(text, size, **options):
    """Texts joined, and calls as (name, arguments), of a text that comes in pieces of a size."""
    parser = ToolParser(ToolChoice(OFFERED, **options))
    parts = [part for at in range(0, len(text), size) for part in parser.add(text[at : at + size])]
    parts += parser.end()
    found: list[Any] = []
    for part in parts:
        match part:
            case ToolCall(name):
                found.append((name, ""))
            case ToolArguments(more):
                found[-1] = (found[-1][0], found[-1][1] + more)
            case str() if found and isinstance(found[-1], str):
                found[-1] += part
            case str():
                found.append(part)
    return [each if isinstance(each, str) else (each[0], json.loads(each[1] or "null")) for each in found]


WEATHER_CALL = ("weather", {"city": 'Pa"r}is', "days": [1, {"a": 2}]})
TIME_CALL: tuple[str, dict[str, object]] = ("time", {})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Nothing to call.", ["Nothing to call."]),
        ("a < b <tool and <tool_cal", ["a < b <tool and <tool_cal"]),
        (f"<tool_call>\n{WEATHER}\n</tool_call>", [WEATHER_CALL]),
        (f"I look.\n<tool_call>{WEATHER}</tool_call>", ["I look.\n", WEATHER_CALL]),
        (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{TIME}</tool_call>", [WEATHER_CALL, TIME_CALL]),
        (f"<tool_call>[{WEATHER}, {TIME}]</tool_call>", [WEATHER_CALL, TIME_CALL]),
        (f"<tool_call>{WEATHER}</tool_call> Well?", [WEATHER_CALL, "Well?"]),
        (f"[TOOL_CALLS][{WEATHER}]", [WEATHER_CALL]),
        (f"<|python_tag|>{TIME.replace('arguments', 'parameters')}", [TIME_CALL]),
        (TIME, [TIME_CALL]),
        ('{"a": 1}', ['{"a": 1}']),
        ("<tool_call>no JSON</tool_call>", ["<tool_call>no JSON</tool_call>"]),
        ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
        ('<tool_call>{"arguments": {}, "name": "time"}</tool_call>', [TIME_CALL]),
        ('<tool_call>{"name": "time", "arguments": "{}"}</tool_call>', [TIME_CALL]),
        ("<tool_call>", ["<tool_call>"]),
        (f"<tool_call>{WEATHER}<tool_call>{TIME}</tool_call>", [WEATHER_CALL, TIME_CALL]),
        (f"<tool_call>{TIME}</tool_call>\nNow \n\nwe see", [TIME_CALL, "Now \n\nwe see"]),
        ('{"name": "Bob", "arguments": {}}', ['{"name": "Bob", "arguments": {}}']),
        ('{"name": "time"}', ['{"name": "time"}']),
    ],
)
def test_calls_are_told_from_text_however_it_is_cut(text, size, expected):
    assert heard(text, size) == expected


def test_text_is_not_held_back_longer_than_it_may_be_a_call():
    parser = ToolParser(ToolChoice(OFFERED))
    assert list(parser.add("Hello <b>")) == ["Hello <b>"]
    assert list(parser.add(" <tool")) == [" "]
    assert list(parser.add("box>")) == ["<toolbox>"]


def test_arguments_come_as_they_are_written():
    parser = ToolParser(ToolChoice(OFFERED))
    began = list(parser.add('<tool_call>{"name": "weather", "arguments": {"city": "Pa'))
    assert [type(part) for part in began] == [ToolCall, ToolArguments]
    assert isinstance(began[1], ToolArguments)
    assert began[1].text == '{"city": "Pa'
    assert list(parser.add('ris"}')) == [ToolArguments('ris"}')]
    assert list(parser.add("}</tool_call>")) == []


def test_calls_beyond_the_one_that_is_wanted_are_left_out():
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{TIME}</tool_call>"
    assert heard(text, 4, at_most_one=True) == [WEATHER_CALL]


def of(**body):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    return ToolChoice.of(Fields({"tools": [tool], **body}))


def test_a_choice_says_what_has_to_be_called():
    assert of().grammar() is None
    assert of(tool_choice="auto").grammar() is None
    assert of(tool_choice="none").tools == ()
    assert '"weather"' in of(tool_choice="required").grammar().source
    assert of(tool_choice={"type": "function", "function": {"name": "weather"}}).only == "weather"
    for wrong in ("any", {"type": "function"}, {"function": {"name": "time"}}, 5):
        with pytest.raises(ApiError):
            of(tool_choice=wrong)
    with pytest.raises(ApiError, match="no tools"):
        of(tools=[], tool_choice="required")
