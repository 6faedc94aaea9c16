"""The body of a request: parses JSON within limits, and checks the type and range of each field.

`request_fields` lists the fields that a request may have.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from libsym.channel.json_size import json_size
from lips.gateway.errors import ApiError

Kind = TypeVar("Kind")
MAX_DEPTH = 64
_JSON = json.JSONEncoder(ensure_ascii=False)
MAX_VALUES = 1_000_000
"""Maximum number of values and names. A body at this maximum blocks the event loop for 0.2 s. Sixty-four prompts
of 8,192 tokens have half as many values."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. ApiError: it is not JSON, not an object, too large or nested too deeply."""
    if (wrong := _too_much(body)) is not None:
        raise ApiError(400, f"the body {wrong}")
    try:
        found = _loaded(body.decode("utf-8-sig"))
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if _SURROGATE.search(body):  # some clients cut texts inside a character: replace the halves
        found = _loaded(json.dumps(found, ensure_ascii=False).encode(errors="replace").decode())
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is a JSON {_kind(found)}: an object is expected")
    return found


def parse_inner(text: str) -> Any:
    """Parse a JSON text within a body, such as the arguments of a call. ValueError: the text is not JSON."""
    if (wrong := _too_much(text.encode(errors="replace"))) is not None:
        raise ValueError(f"it {wrong}")
    return _loaded(text)


def _too_much(text: bytes) -> str | None:
    """Return the limit that a JSON text exceeds, in words, or None."""
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
    """Parse a text with the garbage collector off. Its repeated scans would take longer than the parser."""
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
    """A JSON object of a body. `where` is the prefix of its fields in error messages, such as `messages[0].`."""

    def __init__(self, body: dict[str, Any], where: str = "") -> None:
        self.body = body
        self.where = where

    def name_of(self, name: str) -> str:
        return f"{self.where}{name}"

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self.body.get(name) is not None

    def wrong(self, name: str, expected: str) -> ApiError:
        pieces = _JSON.iterencode(self.body.get(name))  # a long list is encoded only as far as shown
        value = "".join(islice(pieces, 61))
        shown = value if len(value) <= 60 else f"{value[:60]}…"
        full = self.name_of(name)
        return ApiError(400, f"{full} is {shown}: {expected} is expected", param=full, code="invalid_value")

    def required(self, name: str) -> Any:
        if not self.has(name):
            full = self.name_of(name)
            raise ApiError(400, f"{full} is missing", param=full, code="missing_required_parameter")
        return self.body[name]

    def _of(self, kind: type[Kind], name: str, expected: str) -> Kind | None:
        """Return the field's value if it has the JSON kind `kind`; None: the field is missing."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, expected)
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._of(str, name, "a text")
        return default if value is None else value

    def name(self, name: str) -> str:
        """Return a required text that is not empty."""
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
        value = self._of(bool, name, "true or false")
        return default if value is None else value

    def one_of(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self.text(name) or default
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def list(self, name: str) -> list[Any] | None:
        return self._of(list, name, "a list")

    def child(self, name: str) -> Fields | None:
        """Return the object in a field, or None."""
        value = self._of(dict, name, "an object")
        return None if value is None else Fields(value, f"{self.name_of(name)}.")

    def children(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a field's list. A missing field yields nothing."""
        for index, value in enumerate(self.list(name) or ()):
            if not isinstance(value, dict):
                where = f"{self.name_of(name)}[{index}]"
                raise ApiError(400, f"{where} is a {_kind(value)}: an object is expected", param=where)
            yield Fields(value, f"{self.name_of(name)}[{index}].")
