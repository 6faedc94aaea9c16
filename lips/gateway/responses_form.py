"""The items of /v1/responses, from and to the messages that templates know."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from lips.gateway.engine import Answers
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields, parse_inner
from lips.gateway.prompts import Message
from lips.gateway.tools import Call, Choice

Item = dict[str, Any]
_TEXTS = {"input_text", "output_text", "text", "summary_text", "refusal"}


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """The same, each with an id, which those that a client made have not."""
    name = response_id.removeprefix("resp_")
    return [{"id": f"item_{name}_{place}", **item} for place, item in enumerate(items)]


def items_of(fields: Fields) -> list[Item]:
    """What `input` is: a text is a message of the user."""
    given = fields.required("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [each.body for each in fields.children("input")]


def messages_of_items(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """Messages in OpenAI's chat form. Items of kinds that this server does not know are left out, as codex wants it."""
    found: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        fields = Fields(item, f"input[{index}].")
        match item.get("type", "message"):
            case "message":
                role = fields.one_of("role", ("user", "assistant", "system", "developer"), "user")
                found.append({"role": "system" if role == "developer" else role, "content": _text(fields, "content")})
            case "function_call":
                _add_call(found, fields)
            case "function_call_output":
                found.append(
                    {"role": "tool", "tool_call_id": fields.text("call_id"), "content": _text(fields, "output")}
                )
    if not any(message["role"] != "system" for message in found):
        raise ApiError(400, "input is empty: a message at least is expected", param="input")
    return _with_one_system(found)


def _with_one_system(messages: list[Message]) -> list[Message]:
    """What leads the conversation is one message, for many templates take no second."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:leading])
    return [{"role": "system", "content": text}, *messages[leading:]]


def _add_call(messages: list[Message], fields: Fields) -> None:
    """Calls that follow one another are one message's."""
    text = fields.text("arguments", "{}") or "{}"
    try:
        arguments = parse_inner(text)
    except ValueError:
        arguments = text
    function = {"name": fields.name("name"), "arguments": arguments}
    call = {"id": fields.text("call_id", ""), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(fields: Fields, name: str) -> str:
    if isinstance(fields.body.get(name), str) or not fields.has(name):
        return fields.text(name, "") or ""
    texts = []
    for part in fields.children(name):
        kind = part.text("type", "input_text")
        if kind not in _TEXTS:
            where = part.name_of("type")
            raise ApiError(400, f"{where} is {kind!r}: this model takes text", param=where)
        texts.append(part.text("text", part.text("refusal", "")) or "")
    return "\n".join(texts)


def choice_of(fields: Fields) -> Choice:
    """The functions among the tools, in the chat's form; tools of other kinds are left out."""
    tools = []
    for each in fields.children("tools"):
        if each.text("type") == "function":
            names = ("name", "description", "parameters")
            tools.append({"type": "function", "function": {name: each.body.get(name) for name in names}})
    wanted = fields.body.get("tool_choice")
    if not tools:
        wanted = None
    parallel = fields.flag("parallel_tool_calls", True)
    return Choice.of(Fields({"tools": tools, "tool_choice": wanted, "parallel_tool_calls": parallel}))


def format_of(fields: Fields) -> Fields:
    """`text.format` as the chat's `response_format`."""
    text = fields.child("text")
    wanted = None if text is None else text.child("format")
    if wanted is None:
        return Fields({})
    body = wanted.body
    if wanted.text("type") == "json_schema":
        body = {"type": "json_schema", "json_schema": {"schema": body.get("schema")}}
    return Fields({"response_format": body}, fields.where)


def message_item() -> Item:
    """One that begins."""
    kind = {"id": f"msg_{secrets.token_hex(12)}", "type": "message"}
    return {**kind, "status": "in_progress", "role": "assistant", "content": []}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: Call) -> Item:
    """One that begins."""
    kind = {"id": f"fc_{call.id.removeprefix('call_')}", "type": "function_call", "status": "in_progress"}
    return {**kind, "call_id": call.id, "name": call.name, "arguments": ""}


def usage(answers: Answers) -> dict[str, Any]:
    return {
        "input_tokens": answers.num_prompt,
        "input_tokens_details": {"cached_tokens": answers.num_cached},
        "output_tokens": answers.num_completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answers.num_prompt + answers.num_completion,
    }
