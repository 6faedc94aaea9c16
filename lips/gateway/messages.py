"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface, translated to and from the common record."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lips.gateway.asgi import Json, Work, event
from lips.gateway.asked import Asked
from lips.gateway.constraints import output_format
from lips.gateway.errors import ApiError, anthropic_form
from lips.gateway.fields import Fields
from lips.gateway.prompts import ChatMessage, call_of, no_message, no_text, text_of, variables_of
from lips.gateway.reader import Received, received
from lips.gateway.said import Block, Change, Said
from lips.gateway.sampling import sampling
from lips.gateway.tools import ToolChoice
from lips.gateway.writer import Writer

_BILLING = "x-anthropic-billing-header"
"""Beginning of a block that Claude Code puts first. A changing number in it would keep prompts from sharing pages."""
_SILENT = {"thinking", "redacted_thinking"}


async def messages(request: Request) -> Work:
    got = await received(request)
    fields = got.fields
    fields.required("max_tokens")
    choice, turns = _choice(fields), _turns(fields)
    how = sampling(_with_stops(fields), got.gateway.sampling)
    own_format = choice.named_grammar() or output_format(fields)
    return _MessageWriter(got, await got.spoken(turns, choice, how, own_format)).work()


async def count_tokens(request: Request) -> Response:
    got = await received(request)
    turns, tools = _turns(got.fields), _choice(got.fields).tools
    return Json({"input_tokens": len(await got.gateway.prompts.tokens(turns, tools, variables_of(got.fields)))})


def _with_stops(fields: Fields) -> Fields:
    """Return the fields with `stop_sequences` moved to `stop`, its name in the other interfaces."""
    stops, more = fields.list("stop_sequences"), fields.body.get("stop")
    if stops is None:
        return fields
    more = [more] if isinstance(more, str) else more or []
    return Fields({**fields.body, "stop": [*stops, *more] if isinstance(more, list) else more}, fields.where)


def _turns(fields: Fields) -> list[ChatMessage]:
    """Return the messages in OpenAI's form, which templates expect."""
    fields.required("messages")
    found: list[ChatMessage] = []
    if system := text_of(fields, "system", ("text",), _BILLING):
        found.append({"role": "system", "content": system})
    for each in fields.children("messages"):
        role = each.one_of("role", ("user", "assistant", "system"), "")
        each.required("content")
        found += _message_of(each, role)
    if not any(message["role"] != "system" for message in found):
        raise no_message("messages")
    return found


def _message_of(fields: Fields, role: str) -> list[ChatMessage]:
    """Return a message in the template's form. Results of calls become separate messages."""
    if isinstance(fields.body["content"], str):
        return [{"role": role, "content": fields.body["content"]}]
    texts, calls, results = list[str](), list[dict[str, Any]](), list[ChatMessage]()
    for block in fields.children("content"):
        match kind := block.text("type"):
            case "text":
                texts.append(block.text("text", "") or "")
            case "tool_use":
                given = block.child("input")
                calls.append(call_of(block.text("id", ""), block.name("name"), {} if given is None else given.body))
            case "tool_result":
                said = text_of(block, "content", ("text",))
                results.append({"role": "tool", "tool_call_id": block.text("tool_use_id", ""), "content": said})
            case _ if kind in _SILENT:
                pass
            case _:
                raise no_text(block)
    message: ChatMessage = {"role": role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


def _choice(fields: Fields) -> ToolChoice:
    """Return the tools in OpenAI's form, without tools that the server would have to provide, such as a search."""
    tools = []
    for each in fields.children("tools"):
        if each.text("type", "custom") == "custom":
            function = {"name": each.name("name"), "description": each.text("description", "") or ""}
            schema = each.child("input_schema")
            if schema is not None:
                schema.one_of("type", ("object",), "object")
            parameters = None if schema is None else schema.body
            tools.append({"type": "function", "function": {**function, "parameters": parameters}})
    choice = fields.child("tool_choice")
    if choice is None:
        return ToolChoice.of(Fields({"tools": tools}))
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "auto")
    wanted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(kind) or {"name": choice.name("name")}
    at_most_one = choice.flag("disable_parallel_tool_use")
    return ToolChoice.of(Fields({"tools": tools, "tool_choice": wanted, "parallel_tool_calls": not at_most_one}))


class _MessageWriter(Writer):
    """Writer of a message and its blocks."""

    def __init__(self, received: Received, asked: Asked) -> None:
        super().__init__(received, asked)
        self._id = f"msg_{secrets.token_hex(12)}"

    def failed(self, error: ApiError) -> bytes:
        return event(anthropic_form(error), "error")

    def _tell(self, kind: str, **more: Any) -> None:
        self.put(event({"type": kind, **more}, kind))

    def begin(self) -> None:
        self._tell("message_start", message=self._message([], None, None, 1))
        self._tell("ping")

    def tell(self, _said: Said, changes: Sequence[Change]) -> None:
        for kind, block, text in changes:
            match kind:
                case "begins":
                    self._tell("content_block_start", index=block.index, content_block=_form(block, "", {}))
                case "grows" if block.call is None:
                    delta = {"type": "text_delta", "text": text}
                    self._tell("content_block_delta", index=block.index, delta=delta)
                case "grows":
                    delta = {"type": "input_json_delta", "partial_json": text}
                    self._tell("content_block_delta", index=block.index, delta=delta)
                case "ends":
                    self._tell("content_block_stop", index=block.index)

    async def end(self) -> None:
        [said] = self.said
        ended = {"stop_reason": _stop_reason(said), "stop_sequence": said.stop_text}
        self._tell("message_delta", delta=ended, usage=self._usage(self.usage.num_completion))
        self._tell("message_stop")

    async def whole(self) -> dict[str, Any]:
        [said] = self.said
        content = [_form(block, block.text, block.arguments) for block in said.blocks]
        return self._message(content, _stop_reason(said), said.stop_text, self.usage.num_completion)

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_text: str | None, num_output: int
    ) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.gateway.model.name}
        ended = {"stop_reason": stop_reason, "stop_sequence": stop_text, "usage": self._usage(num_output)}
        return {**head, "content": content, **ended}

    def _usage(self, num_output: int) -> dict[str, int]:
        return {
            "input_tokens": self.usage.num_prompt - self.usage.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.usage.num_cached,
            "output_tokens": num_output,
        }


def _form(block: Block, text: str, given: Any) -> dict[str, Any]:
    if block.call is None:
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.call, "input": given}


def _stop_reason(said: Said) -> str:
    if said.finish == "length":
        return "max_tokens"
    if said.stop_text is not None:
        return "stop_sequence"
    return "tool_use" if said.calls else "end_turn"


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
