"""Calls of tools in what a model says: read as they come, and forced by a grammar where a request wants one.

Models were trained on different forms. These are read: `<tool_call>{…}</tool_call>` of Hermes, Qwen and SmolLM2 (an
object or a list of them), `[TOOL_CALLS][…]` of Mistral, and Llama 3's JSON object with `name` and `parameters` alone,
perhaps behind `<|python_tag|>`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import libsym as sym
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHERS = "[TOOL_CALLS]", "<|python_tag|>"
_MARKS = (_BEGIN, *_OTHERS)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model makes."""

    name: str
    arguments: str
    """A JSON object."""
    id: str

    @classmethod
    def of(cls, value: object) -> Call | None:
        """None: it is no call."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        return cls(value["name"], json.dumps(arguments, ensure_ascii=False), f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools a request offers, and whether one has to be called."""

    tools: Sequence[dict[str, Any]] = ()
    must_call: bool = False
    only: str | None = None
    at_most_one: bool = False

    @classmethod
    def of(cls, fields: Fields) -> Choice:
        """As OpenAI's chat has it: `tools`, `tool_choice`, `parallel_tool_calls`."""
        tools = [_tool(each) for each in fields.children("tools")]
        choice = fields.body.get("tool_choice")
        if choice == "none":
            return cls()
        only = None
        if isinstance(choice, dict):
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
        """What the answer has to be; None: anything."""
        if not self.must_call:
            return None
        offered = [each["function"] for each in self.tools if self.only in (None, each["function"]["name"])]
        calls = [_call_schema(each["name"], each.get("parameters") or {"type": "object"}) for each in offered]
        schema = json.dumps({"anyOf": calls} if len(calls) > 1 else calls[0])
        return sym.Grammar.lark(f'start: "{_BEGIN}\\n" call "\\n{_END}"\ncall: %json {schema}\n')


def _chosen(choice: dict[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, "tool_choice names no function", param="tool_choice")
    return name


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": name}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _tool(fields: Fields) -> dict[str, Any]:
    """A tool as templates want it, with nothing else in it."""
    function = fields.child("function")
    if fields.text("type", "function") != "function" or function is None:
        raise ApiError(400, f"{fields.name_of('type')}: tools are functions", param=fields.name_of("type"))
    name = function.required("name")
    if not isinstance(name, str) or not name:
        raise function.wrong("name", "a text")
    parameters = function.child("parameters")
    told: dict[str, Any] = {"name": name, "description": function.text("description", "") or ""}
    if parameters is not None:
        told["parameters"] = parameters.body
    return {"type": "function", "function": told}


class ToolParser:
    """Takes an answer's text as it comes; gives text that is certain to be no call, and calls that are whole."""

    def __init__(self, at_most_one: bool = False) -> None:
        self._held = ""
        self._has_said = False
        self._in_call = False
        self._at_most_one = at_most_one
        self.num_calls = 0

    def add(self, text: str) -> Iterator[str | Call]:
        self._held += text
        while self._held:
            if self._in_call:
                end = self._held.find(_END)
                if end < 0:
                    return
                source, self._held = self._held[:end], self._held[end + len(_END) :]
                self._in_call = False
                yield from self._calls(source, f"{_BEGIN}{source}{_END}")
                continue
            at = self._held.find(_BEGIN)
            if at >= 0:
                yield from self._say(self._held[:at].rstrip("\n") if self._has_said else self._held[:at].strip())
                self._held, self._in_call = self._held[at + len(_BEGIN) :], True
                continue
            if not self._has_said and (self._held.lstrip().startswith(("{", *_OTHERS)) or not self._held.strip()):
                return  # it may be a call as a whole: the end tells
            num_sure = len(self._held) - _num_open(self._held)
            sure, self._held = self._held[:num_sure], self._held[num_sure:]
            yield from self._say(sure)
            return

    def end(self) -> Iterator[str | Call]:
        """What was held back."""
        held, self._held = self._held, ""
        if self._in_call:
            yield from self._calls(held, f"{_BEGIN}{held}")
        elif held and not self._has_said:
            text = held.strip()
            for mark in _OTHERS:
                text = text.removeprefix(mark)
            yield from self._calls(text, held)
        else:
            yield from self._say(held)

    def _say(self, text: str) -> Iterator[str]:
        if text and not (self.num_calls and not text.strip()):
            self._has_said = True
            yield text

    def _calls(self, source: str, whole: str) -> Iterator[str | Call]:
        """The calls in a text; where it is none, the text itself."""
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            value = None
        calls = [Call.of(each) for each in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            yield from self._say(whole)
            return
        for call in calls:
            if call is not None and not (self._at_most_one and self.num_calls):
                self.num_calls += 1
                yield call


def _num_open(text: str) -> int:
    """Characters at the end that a mark begins with."""
    longest = max(map(len, _MARKS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in _MARKS):
            return length
    return 0
