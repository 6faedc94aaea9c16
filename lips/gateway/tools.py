"""Calls of tools: parses them in a model's text as it comes, and forces a call by a grammar if a request demands it.

Models were trained on different forms of calls. The parser reads `<tool_call>{…}</tool_call>` of Hermes, Qwen and
SmolLM2 (with an object or a list of objects), and `[TOOL_CALLS][…]` of Mistral. The parser also reads Llama 3's bare
JSON object with `name` and `parameters`, with or without `<|python_tag|>` before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import libsym as sym
from libsym.calls.schema import closed
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields, parse_inner

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHERS = "[TOOL_CALLS]", "<|python_tag|>"
_MARKS = (_BEGIN, *_OTHERS)
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The beginning of a call up to its arguments, in the order that most models write."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The beginning of a call of a tool. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the last call's arguments, in JSON."""

    text: str


Part = str | ToolCall | ToolArguments
"""Part of an answer: a text outside calls, the beginning of a call, or a piece of its arguments."""


def _calls_of(source: str) -> list[tuple[str, str]] | None:
    """Return the names and arguments of the calls in a JSON object or list; None: the text holds anything else."""
    try:
        value = parse_inner(source)
    except ValueError:
        return None
    found = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
    calls = [each for each in found if each is not None]
    return calls if calls and len(calls) == len(found) else None


def _call_of(value: object) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_inner(arguments)
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that a request offers, and whether the answer must call one of them."""

    tools: Sequence[dict[str, Any]] = ()
    must_call: bool = False
    only: str | None = None
    at_most_one: bool = False

    @classmethod
    def of(cls, fields: Fields) -> ToolChoice:
        """Read `tools`, `tool_choice` and `parallel_tool_calls` in the form of OpenAI's chat."""
        tools = [_tool(each) for each in fields.children("tools")]
        choice = fields.body.get("tool_choice")
        if choice == "none":
            return cls()
        only = None
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            tools, choice = _allowed(tools, choice)
        elif isinstance(choice, dict):
            only = _chosen(choice)
        elif choice not in (None, "auto", "required"):
            raise fields.wrong("tool_choice", "none, auto, required or a function")
        must_call = choice == "required" or only is not None
        if only is not None and only not in {each["function"]["name"] for each in tools}:
            raise ApiError(400, f"tool_choice names {only}, which is none of the tools", param="tool_choice")
        if must_call and not tools:
            raise ApiError(400, "tool_choice wants a call, and there are no tools", param="tool_choice")
        return cls(tools, must_call, only, not fields.flag("parallel_tool_calls", True))

    def grammar(self) -> sym.Grammar | None:
        """Return the grammar that forces a call; None: the answer is free."""
        if not self.must_call:
            return None
        offered = [each["function"] for each in self.tools if self.only in (None, each["function"]["name"])]
        calls = [_call_schema(each, f"#/anyOf/{number}") for number, each in enumerate(offered)]
        schema = json.dumps({"anyOf": calls})
        return sym.Grammar.lark(f'start: "{_BEGIN}\\n" call "\\n{_END}"\ncall: %json {schema}\n')

    def named_grammar(self) -> tuple[str, sym.Grammar] | None:
        """Return the name of the field that demands a call, and the grammar that forces the call."""
        grammar = self.grammar()
        return None if grammar is None else ("tool_choice", grammar)

    def parser(self, *, is_json: bool) -> ToolParser | None:
        """Return a parser for the answer; None: no tools are offered. `is_json`: the answer is to be JSON."""
        return ToolParser(self, reads_bare=not is_json) if self.tools else None


NO_TOOLS = ToolChoice()


def _chosen(choice: dict[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, "tool_choice names no function", param="tool_choice")
    return name


def _allowed(tools: list[dict[str, Any]], choice: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the tools that may be called, and the mode: `auto`, or `required` if the answer must call a tool."""
    fields = Fields(choice, "tool_choice.")
    inner = fields.child("allowed_tools") or fields
    mode = inner.one_of("mode", ("auto", "required"), "auto")
    inner.required("tools")
    names = {_chosen(each.body) for each in inner.children("tools")}
    return [each for each in tools if each["function"]["name"] in names], mode


def _call_schema(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the schema of a call of a function. `where` is its path in the whole schema."""
    parameters = _moved(closed(function.get("parameters") or {"type": "object"}), f"{where}/properties/arguments")
    properties = {"name": {"const": function["name"]}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, where: str) -> Any:
    """Return a schema with its inner references adjusted to its new path in another schema."""
    if isinstance(schema, list):
        return [_moved(each, where) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, where) for name, value in schema.items()}
    match schema.get("$ref"):
        case str(ref) if ref.startswith("#"):
            moved["$ref"] = where + ref[1:]
    return moved


def _tool(fields: Fields) -> dict[str, Any]:
    """Return a tool with only the fields that templates expect."""
    function = fields.child("function")
    if fields.text("type", "function") != "function" or function is None:
        raise ApiError(400, f"{fields.name_of('type')}: tools are functions", param=fields.name_of("type"))
    name = function.name("name")
    parameters = function.child("parameters")
    told: dict[str, Any] = {"name": name, "description": function.text("description", "") or ""}
    if parameters is not None:
        parameters.one_of("type", ("object",), "object")
        told["parameters"] = parameters.body
    return {"type": "function", "function": told}


class ToolParser:
    """Incremental parser of an answer's text. The parser yields calls, and text that cannot belong to a call."""

    def __init__(self, choice: ToolChoice, *, reads_bare: bool = True) -> None:
        """`reads_bare`: a JSON object without a mark counts as a call if it names an offered tool."""
        self._choice = choice
        self._names = {each["function"]["name"] for each in choice.tools}
        self._reads_bare = reads_bare
        self._held = ""
        self._has_said = False
        """Whether the answer has text after its last call, or before the first call."""
        self._in_call = False
        self._arguments: _Object | None = None
        self.num_calls = 0

    def add(self, text: str) -> Iterator[Part]:
        self._held += text
        while self._held:
            before = len(self._held), self._in_call, self._arguments
            yield from self._in() if self._in_call else self._out()
            if before == (len(self._held), self._in_call, self._arguments):
                return

    def end(self) -> Iterator[Part]:
        """Yield the parts in the text that was held back."""
        held, self._held = self._held, ""
        if self._arguments is not None:
            return
        if self._in_call:
            yield from self._whole(held, "" if self._choice.must_call else f"{_BEGIN}{held}")
        elif self._choice.must_call:
            return  # the held text is the beginning of a mark
        elif held and self._is_first:
            yield from self._alone(held)
        else:
            yield from self._say(held)

    def _alone(self, held: str) -> Iterator[Part]:
        """Yield the parts of an answer whose whole text may be a call."""
        text = held.strip()
        for mark in _OTHERS:
            if text.startswith(mark):
                yield from self._whole(text.removeprefix(mark), held)
                return
        calls = _calls_of(text) if self._reads_bare else None
        if calls and all(name in self._names for name, _ in calls) and re.search('"(arguments|parameters)"', text):
            yield from self._whole(text, held)
        else:
            yield from self._say(held)

    @property
    def _is_first(self) -> bool:
        """Whether the answer so far is only white space."""
        return not self._has_said and not self.num_calls

    def _out(self) -> Iterator[Part]:
        """Yield the text before a possible call."""
        at = self._held.find(_BEGIN)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(_BEGIN) :]
            self._in_call = True
            yield from self._say(text)
            return
        begins = ("{", *_OTHERS) if self._reads_bare else _OTHERS
        if self._is_first and (self._held.lstrip().startswith(begins) or not self._held.strip()):
            return  # the whole answer may be a call: wait for its end
        num_sure = len(self._held) - _num_open(self._held)
        sure, self._held = self._held[:num_sure], self._held[num_sure:]
        yield from self._say(sure)

    def _in(self) -> Iterator[Part]:
        """Yield a call: its name, then its arguments as they arrive. A call in a rarer form is yielded at its end."""
        if self._arguments is None and (match := _HEAD.match(self._held)):
            with suppress(ValueError):
                name = json.loads(match[1])
                self._held, self._arguments = self._held[match.end() :], _Object()
                yield from self._begin(name)
        if self._arguments is not None and not self._arguments.is_over:
            text, self._held = self._arguments.take(self._held)
            yield from self._more(text)
        end, behind = self._held.find(_END), len(_END)
        following = self._held.find(_BEGIN) if self._arguments is not None else -1
        if following >= 0 and (end < 0 or following < end):
            end, behind = following, 0  # the next call begins, and this call has no end mark
        if end < 0:
            return
        source, self._held = self._held[:end], self._held[end + behind :]
        if self._arguments is None:
            yield from self._whole(source, f"{_BEGIN}{source}{_END}")
        self._in_call, self._arguments = False, None

    def _whole(self, source: str, said: str) -> Iterator[Part]:
        """Yield the calls in `source`; if `source` has no calls, the text `said`."""
        calls = _calls_of(source)
        if calls is None:
            yield from self._say(said)
        for name, arguments in calls or ():
            yield from self._begin(name)
            yield from self._more(arguments)

    def _begin(self, name: str) -> Iterator[Part]:
        self.num_calls, self._has_said = self.num_calls + 1, False
        if self._is_wanted:
            yield ToolCall(name)

    def _more(self, text: str) -> Iterator[Part]:
        if text and self._is_wanted:
            yield ToolArguments(text)

    @property
    def _is_wanted(self) -> bool:
        return self.num_calls == 1 or not self._choice.at_most_one

    def _say(self, text: str) -> Iterator[Part]:
        """Yield a text of the answer, without white space after a call."""
        if self.num_calls and not self._has_said:
            text = text.lstrip()
        if text.strip() or (text and self._has_said):
            self._has_said = True
            yield text


class _Object:
    """A JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False
        self.is_over = False

    def take(self, text: str) -> tuple[str, str]:
        """Split a text into the part that belongs to the object, and the rest after it."""
        for at, char in enumerate(text):
            if self._in_text:
                self._in_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return text[: at + 1], text[at + 1 :]
        return text, ""


def _num_open(text: str) -> int:
    """Return the number of characters at the end of the text that may begin a mark."""
    longest = max(map(len, _MARKS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in _MARKS):
            return length
    return 0
