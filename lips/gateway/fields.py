"""The body of a request: JSON that is parsed within limits, and fields that are read with their type and range checked.

`request_fields` says which fields a request may have.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from libsym.channel.json_size import json_size
from lips.gateway.errors import ApiError

MAX_DEPTH = 64
_JSON = json.JSONEncoder(ensure_ascii=False)
MAX_VALUES = 1_000_000
"""Names, too. Nothing else runs while they are parsed: 0.2 s. Sixty-four prompts of 8,192 tokens are half of it."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that a body is. What is no JSON, no object, too large or nested too deeply is refused."""
    if (wrong := _too_much(body)) is not None:
        raise ApiError(400, f"the body {wrong}")
    try:
        found = _loaded(body.decode("utf-8-sig"))
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if _SURROGATE.search(body):  # clients cut texts in the middle of a character
        found = _loaded(json.dumps(found, ensure_ascii=False).encode(errors="replace").decode())
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is a JSON {_kind(found)}: an object is expected")
    return found


def parse_inner(text: str) -> Any:
    """The value of a JSON text that a body has in it, such as a call's arguments; ValueError: it is none."""
    if (wrong := _too_much(text.encode(errors="replace"))) is not None:
        raise ValueError(f"it {wrong}")
    return _loaded(text)


def _too_much(text: bytes) -> str | None:
    """Why a text of JSON is not parsed."""
    size = json_size(text)
    if size.depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} deep"
    if size.num_values > MAX_VALUES:
        return f"has more than {MAX_VALUES} values"
    if size.too_large is not None:
        number = text[size.too_large : size.too_large + 40].decode(errors="replace")
        return f"has a number that is larger than any: {number}"
    return None


def _loaded(text: str) -> Any:
    """The value of a text. The collector would look through it again and again, which takes longer than the parser."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text, parse_constant=_no_number)
    finally:
        if was_enabled:
            gc.enable()


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: object) -> str:
    kinds = {bool: "true or false", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return kinds.get(type(value), "null")


class Fields:
    """An object of a body. `where` is what messages call the place of its fields: `messages[0].`."""

    def __init__(self, body: dict[str, Any], where: str = "") -> None:
        self.body = body
        self.where = where

    def name_of(self, name: str) -> str:
        return f"{self.where}{name}"

    def has(self, name: str) -> bool:
        """Whether it is there, and not null."""
        return self.body.get(name) is not None

    def wrong(self, name: str, expected: str) -> ApiError:
        pieces = _JSON.iterencode(self.body.get(name))  # of a long list only the first are written
        value = "".join(islice(pieces, 61))
        shown = value if len(value) <= 60 else f"{value[:60]}…"
        full = self.name_of(name)
        return ApiError(400, f"{full} is {shown}: {expected} is expected", param=full, code="invalid_value")

    def required(self, name: str) -> Any:
        if not self.has(name):
            full = self.name_of(name)
            raise ApiError(400, f"{full} is missing", param=full, code="missing_required_parameter")
        return self.body[name]

    def text(self, name: str, default: str | None = None) -> str | None:
        if not self.has(name):
            return default
        value = self.body[name]
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def name(self, name: str) -> str:
        """A text that has to be there, and not empty."""
        self.required(name)
        value = self.text(name)
        if not value:
            raise self.wrong(name, "a text that is not empty")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float | None:
        if not self.has(name):
            return default
        value = self.body[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        if not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        if not self.has(name):
            return default
        value = self.body[name]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        if not self.has(name):
            return default
        value = self.body[name]
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def one_of(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self.text(name) or default
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def list(self, name: str) -> list[Any] | None:
        if not self.has(name):
            return None
        value = self.body[name]
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def child(self, name: str) -> Fields | None:
        """The object in a field."""
        if not self.has(name):
            return None
        value = self.body[name]
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.name_of(name)}.")

    def children(self, name: str) -> Iterator[Fields]:
        """The objects of a list; none if the field is not there."""
        for index, value in enumerate(self.list(name) or ()):
            if not isinstance(value, dict):
                where = f"{self.name_of(name)}[{index}]"
                raise ApiError(400, f"{where} is a {_kind(value)}: an object is expected", param=where)
            yield Fields(value, f"{self.name_of(name)}[{index}].")
