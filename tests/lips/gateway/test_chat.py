"""Edge cases of answers: text that looks like a call, schemas with references, unusual forms of limits."""

import json

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "arguments": {"type": "object", "maxProperties": 0}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}

NO_SPACE = {str(byte): -100 for byte in b"\t\n\r "}
"""The tiny model, whose tokens are bytes, would else fill an answer in JSON with spaces."""

pytestmark = pytest.mark.slow


def tool(name="weather", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def ask(http, text="Hi.", **more):
    answer = http.post(CHAT, json={"messages": [{"role": "user", "content": text}], "max_tokens": 60, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_an_answer_in_json_is_no_call(http):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    choice = ask(http, "Who are you?", tools=[tool()], response_format=form, temperature=0)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert json.loads(choice["message"]["content"])["arguments"] == {}


def test_a_tools_schema_may_refer_to_its_own_parts(http):
    town = {"type": "string", "enum": ["Rome", "Oslo"]}
    one = tool(
        "one",
        properties={"city": {"$ref": "#/$defs/City"}},
        required=["city"],
        **{"$defs": {"City": town}, "additionalProperties": False},
    )
    two = tool(
        "two",
        properties={"to": {"$ref": "#/definitions/City"}},
        required=["to"],
        definitions={"City": {"const": 5}},
        additionalProperties=False,
    )
    for name, field, values in (("one", "city", ("Rome", "Oslo")), ("two", "to", (5,))):
        choice = {"type": "function", "function": {"name": name}}
        for tools in ([one, two], [two, one]):
            (call,) = ask(http, tools=tools, tool_choice=choice, logit_bias=NO_SPACE, temperature=0)["message"][
                "tool_calls"
            ]
            assert json.loads(call["function"]["arguments"])[field] in values
    (call,) = ask(http, tools=[one, two], tool_choice="required", logit_bias=NO_SPACE)["message"]["tool_calls"]
    assert call["function"]["name"] in {"one", "two"}


def test_those_that_are_allowed_are_called(http):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    given = {"type": "allowed_tools", "allowed_tools": allowed}
    (call,) = ask(http, tools=[tool("a"), tool("b")], tool_choice=given)["message"]["tool_calls"]
    assert call["function"]["name"] == "b"


def test_arguments_are_objects(http):
    body = {"messages": [{"role": "user", "content": "Hi."}], "tools": [tool()]}
    body["tools"][0]["function"]["parameters"]["type"] = "string"
    refused = http.post(CHAT, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[0].function.parameters.type"


def test_a_forced_call_that_is_cut_off_is_no_text(http):
    long = {"properties": {"city": {"type": "string", "minLength": 500}}, "required": ["city"]}
    for max_tokens in (2, 8, 40):
        choice = ask(http, tools=[tool(**long)], tool_choice="required", max_tokens=max_tokens)
        assert not choice["message"]["content"], max_tokens
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": max_tokens}
        body |= {
            "tools": [{"name": "weather", "input_schema": {"type": "object", **long}}],
            "tool_choice": {"type": "any"},
        }
        answer = http.post("/v1/messages", json=body).json()
        assert not [block for block in answer["content"] if block["type"] == "text"], max_tokens


def test_top_p_of_nothing_is_the_likeliest_token(http):
    said = {
        ask(http, "Tell me of Paris.", temperature=2, top_p=0, max_tokens=12)["message"]["content"] for _ in range(3)
    }
    assert said == {ask(http, "Tell me of Paris.", temperature=0, max_tokens=12)["message"]["content"]}


def test_a_text_is_scored_without_going_on(http):
    body = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = http.post(COMPLETIONS, json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(each < 0 for each in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    assert http.post(COMPLETIONS, json={**body, "echo": False}).status_code == 400


def test_tokens_say_where_in_the_text_they_begin(http):
    text = "Hello é 日本 and more"
    body = {"prompt": text, "max_tokens": 4, "echo": True, "logprobs": 0, "temperature": 0}
    (choice,) = http.post(COMPLETIONS, json=body).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    tokens = choice["logprobs"]["tokens"]
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
