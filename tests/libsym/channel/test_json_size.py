"""How large a text of JSON is: what a parser makes of it, before it makes anything."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from libsym.channel.json_size import JsonSize, json_size

VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False, allow_infinity=False) | some.text(),
    lambda inner: some.lists(inner, max_size=5) | some.dictionaries(some.text(), inner, max_size=5),
    max_leaves=30,
)


def num_values(value):
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_values, value.values()))
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 1


def depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@pytest.mark.slow
@given(VALUES, some.sampled_from([None, 1]), some.booleans())
def test_what_a_parser_makes_is_what_is_counted(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(errors="replace")
    assert json_size(text) == JsonSize(num_values(value), depth(value), None)


@given(some.text('[]{}",:\\ e1.-n\n'))
def test_of_any_text_no_more_is_made_than_was_counted(text):
    size = json_size(text.encode())
    try:
        found = json.loads(text)
    except ValueError:
        return
    assert size.depth == depth(found)
    assert size.num_values >= num_values(found)  # of equal names the last one stays


@pytest.mark.parametrize("number", ["1e999", "-1E+400", "1" * 400 + ".5", "12345e305"])
def test_a_number_that_no_double_holds_is_found(number):
    assert math.isinf(float(number))
    assert json_size(f'{{"a": [1.5, {number}, 1e999]}}'.encode()).too_large == 12
    assert json_size(json.dumps([number, 1e300]).encode()).too_large is None


def test_a_whole_number_may_be_as_long_as_it_likes_and_a_text_be_cut_off():
    assert json_size(b"1" * 5000) == JsonSize(1, 0, None)
    assert json_size(b'["\\') == JsonSize(2, 1, None)
    assert json_size(b"") == JsonSize(0, 0, None)
    assert json_size(b"]]]]") == JsonSize(0, 0, None)
