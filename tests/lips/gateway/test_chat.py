"""Edge cases of answers: text that looks like a call, schemas with references, unusual forms of limits."""

import json

import pytest

from tests.lips.gateway.wire import CHAT, COMPLETIONS, MESSAGES, post, user

CITY_OF_500 = {"properties": {"city": {"type": "string", "minLength": 500}}, "required": ["city"]}
NO_SPACE = {str(byte): -100 for byte in b"\t\n\r "}
"""The tiny model, whose tokens are bytes, would else fill an answer in JSON with spaces."""

pytestmark = pytest.mark.slow


def tool(name="weather", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def ask(http, text="Hi.", **more):
    return post(http, CHAT, {"messages": user(text), "max_tokens": 60, **more})["choices"][0]


def test_an_answer_in_json_is_no_call(http):
    properties = {"name": {"type": "string", "maxLength": 12}, "arguments": {"type": "object", "maxProperties": 0}}
    person = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": person}}
    choice = ask(http, "Who are you?", tools=[tool()], response_format=form, temperature=0)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert json.loads(choice["message"]["content"])["arguments"] == {}


def test_a_tools_schema_may_refer_to_its_own_parts(http):
    town, alone = {"type": "string", "enum": ["Rome", "Oslo"]}, {"additionalProperties": False}
    parts = {"properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"], "$defs": {"City": town}}
    one = tool("one", **parts, **alone)
    older = {"properties": {"to": {"$ref": "#/definitions/City"}}, "required": ["to"]}
    two = tool("two", **older, definitions={"City": {"const": 5}}, **alone)
    for name, field, values in (("one", "city", ("Rome", "Oslo")), ("two", "to", (5,))):
        for tools in ([one, two], [two, one]):
            forced = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
            (call,) = ask(http, **forced, logit_bias=NO_SPACE, temperature=0)["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])[field] in values
    (call,) = ask(http, tools=[one, two], tool_choice="required", logit_bias=NO_SPACE)["message"]["tool_calls"]
    assert call["function"]["name"] in {"one", "two"}


def test_those_that_are_allowed_are_called_and_arguments_are_objects(http):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    given = {"type": "allowed_tools", "allowed_tools": allowed}
    (call,) = ask(http, tools=[tool("a"), tool("b")], tool_choice=given)["message"]["tool_calls"]
    assert call["function"]["name"] == "b"
    refused = post(http, CHAT, {"messages": user("Hi."), "tools": [tool(type="string")]}, status=400)
    assert refused["error"]["param"] == "tools[0].function.parameters.type"


def test_a_forced_call_that_is_cut_off_is_no_text(http):
    schema = {"type": "object", **CITY_OF_500}
    for most in (2, 40):
        assert not ask(http, tools=[tool(**CITY_OF_500)], tool_choice="required", max_tokens=most)["message"]["content"]
        tools = {"tools": [{"name": "weather", "input_schema": schema}], "tool_choice": {"type": "any"}}
        answer = post(http, MESSAGES, {"messages": user("Hi."), "max_tokens": most, **tools})
        assert "text" not in [block["type"] for block in answer["content"]], most


def test_top_p_of_nothing_is_the_likeliest_token(http):
    drawn = [{"temperature": 2, "top_p": 0}] * 2 + [{"temperature": 0}]
    assert len({ask(http, "Tell me of Paris.", max_tokens=12, **how)["message"]["content"] for how in drawn}) == 1


def test_a_text_is_scored_without_going_on_and_tokens_say_where_they_begin(http):
    body = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = post(http, COMPLETIONS, body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(each < 0 for each in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    post(http, COMPLETIONS, body, echo=False, status=400)
    body |= {"prompt": "Hello é 日本 and more", "max_tokens": 4, "temperature": 0}
    (choice,) = post(http, COMPLETIONS, body)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
