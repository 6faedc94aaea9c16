"""Items of /v1/responses, translated to and from the messages that templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lips.gateway.fields import Fields
from lips.gateway.prompts import ChatMessage, arguments_of, call_of, no_message, text_of
from lips.gateway.said import Block
from lips.gateway.tools import ToolChoice
from lips.gateway.usage import Usage

Item = dict[str, Any]


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """Return the items, each with an id. Items from a client may have none."""
    name = response_id.removeprefix("resp_")
    return [{"id": f"item_{name}_{place}", **item} for place, item in enumerate(items)]


def items_of(fields: Fields) -> list[Item]:
    """Return the items of `input`. A text is a message of the user."""
    given = fields.required("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [each.body for each in fields.children("input")]


def messages_of_items(items: Sequence[Item], instructions: str | None) -> list[ChatMessage]:
    """Return messages in OpenAI's chat form, without items of unknown types: the client Codex sends such items."""
    found: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        fields = Fields(item, f"input[{index}].")
        match item.get("type", "message"):
            case "message":
                role = fields.one_of("role", ("user", "assistant", "system", "developer"), "user")
                found.append({"role": "system" if role == "developer" else role, "content": text_of(fields, "content")})
            case "function_call":
                _add_call(found, fields)
            case "function_call_output":
                found.append(
                    {"role": "tool", "tool_call_id": fields.text("call_id"), "content": text_of(fields, "output")}
                )
    if not any(message["role"] != "system" for message in found):
        raise no_message("input")
    return _with_one_system(found)


def _with_one_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Join the leading system messages into one, since many templates accept only one."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:leading])
    return [{"role": "system", "content": text}, *messages[leading:]]


def _add_call(messages: list[ChatMessage], fields: Fields) -> None:
    """Add a call. Consecutive calls belong to one message of the assistant."""
    call = call_of(fields.text("call_id", ""), fields.name("name"), arguments_of(fields))
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def choice_of(fields: Fields) -> ToolChoice:
    """Return the functions among the tools, in the chat's form, without tools of other types."""
    tools = []
    for each in fields.children("tools"):
        if each.text("type") == "function":
            names = ("name", "description", "parameters")
            tools.append({"type": "function", "function": {name: each.body.get(name) for name in names}})
    wanted = fields.body.get("tool_choice")
    if not tools:
        wanted = None
    parallel = fields.flag("parallel_tool_calls", True)
    return ToolChoice.of(Fields({"tools": tools, "tool_choice": wanted, "parallel_tool_calls": parallel}))


def format_of(fields: Fields) -> Fields:
    """Return `text.format` in the form of the chat's `response_format`."""
    text = fields.child("text")
    wanted = None if text is None else text.child("format")
    if wanted is None:
        return Fields({})
    body = wanted.body
    if wanted.text("type") == "json_schema":
        body = {"type": "json_schema", "json_schema": {"schema": body.get("schema")}}
    return Fields({"response_format": body}, fields.where)


def id_of(block: Block) -> str:
    return f"{'msg' if block.call is None else 'fc'}_{block.id}"


def item_of(block: Block, *, begins: bool = False) -> Item:
    """Return the item for a block. `begins`: return it without its content, for the first event."""
    status = "in_progress" if begins else block.status
    if block.call is None:
        content = [] if begins else [text_part(block.text)]
        kind = {"type": "message", "status": status, "role": "assistant", "content": content}
    else:
        call = {"call_id": f"call_{block.id}", "name": block.call, "arguments": "" if begins else block.text}
        kind = {"type": "function_call", "status": status, **call}
    return {"id": id_of(block), **kind}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage(found: Usage) -> dict[str, Any]:
    return {
        "input_tokens": found.num_prompt,
        "input_tokens_details": {"cached_tokens": found.num_cached},
        "output_tokens": found.num_completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found.num_prompt + found.num_completion,
    }
