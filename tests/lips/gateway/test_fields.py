"""Bodies of requests: each is read, or refused in words."""

import gc
import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from lips.gateway.errors import ApiError
from lips.gateway.fields import MAX_VALUES, Fields, parse_inner, parse_json
from lips.gateway.names import conversation_of
from lips.gateway.prompts import messages_of
from lips.gateway.responses_form import choice_of, format_of, items_of, messages_of_items
from lips.gateway.sampling import chat_logprobs, sampling, text_logprobs
from lips.gateway.tools import ToolChoice

WORDS_OF_BODIES = (
    "messages role content type text tools function name arguments parameters stop n temperature top_p top_k "
    "logit_bias seed logprobs tool_choice input output format conversation id max_tokens tool_calls call_id 5 n"
)
NAMES = WORDS_OF_BODIES.split()
WORDS = ("user", "assistant", "tool", "function", "function_call", "message", "required", "text", "x", "")
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.sampled_from(WORDS),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from(NAMES), inner, max_size=4),
    max_leaves=15,
)
BODIES = some.dictionaries(some.sampled_from(NAMES), VALUES, max_size=6)
READERS = (
    *(messages_of, partial(sampling, defaults={}), chat_logprobs, text_logprobs, ToolChoice.of, conversation_of),
    *(choice_of, format_of, lambda fields: messages_of_items(items_of(fields), None)),
    lambda fields: ToolChoice.of(fields).grammar(),
)


def refused(call):
    """The status and the words of a refusal, if there is one."""
    try:
        call()
    except ApiError as error:
        return error.status, error.message
    return None, None


@pytest.mark.slow
@settings(deadline=None)
@given(BODIES)
def test_no_body_is_more_than_refused(body):
    for read in READERS:
        status, message = refused(lambda read=read: read(Fields(parse_json(json.dumps(body).encode()))))
        assert status in {None, 400}
        assert message != ""


@settings(deadline=None)
@given(some.binary(max_size=200))
def test_no_bytes_are_more_than_refused(body):
    assert refused(lambda: parse_json(body))[0] in {None, 400}


def test_a_million_values_pass_and_no_more():
    prompts = [[5] * 8192] * 64
    assert parse_json(json.dumps({"prompt": prompts}).encode()) == {"prompt": prompts}
    assert parse_json(b'{"a":[' + b"1," * (MAX_VALUES - 4) + b"1]}")
    with pytest.raises(ApiError, match="more than 1000000 values"):
        parse_json(b'{"a":[' + b"1," * (MAX_VALUES - 3) + b"1]}")
    with pytest.raises(ValueError, match="more than 1000000 values"):
        parse_inner("[" + "[]," * MAX_VALUES + "1]")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":' + "[" * 100 + "]" * 100 + "}", "deep"),
        ('{"a": -1e999}', "larger than any: -1e999"),
        ('{"a": NaN}', "NaN is no JSON number"),
    ],
)
def test_what_is_no_json_of_this_server_is_named(text, says):
    with pytest.raises(ApiError, match=says):
        parse_json(text.encode())


def test_brackets_in_texts_are_no_nesting_and_half_a_character_is_a_question_mark():
    assert parse_json(json.dumps({"text": "[" * 1000 + '"\\' * 5}).encode())
    whole, half = "\\ud83d\\ude00", "\\ud83d"
    assert parse_json(f'{{"a": "{whole}", "b": ["{half}"]}}'.encode()) == {"a": "\U0001f600", "b": ["?"]}


def test_a_field_that_is_wrong_is_named_with_its_value_and_what_is_expected():
    inner = Fields({"a": {"b": "x" * 100}}).child("a")
    assert inner is not None
    with pytest.raises(ApiError, match=r"a\.b is \"x{59}….*a number from 0 to 1 is expected") as refused:
        inner.number("b", 0, 1)
    assert refused.value.param == "a.b"
