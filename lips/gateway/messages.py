"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface, translated from and to the same prompts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lips.gateway.asgi import Emit, Json, Streamed, Whole, Work, event
from lips.gateway.constraints import bounds, output_format
from lips.gateway.engine import Answer, Answers, Wanted
from lips.gateway.errors import ApiError, anthropic_form
from lips.gateway.fields import Fields, parse_inner
from lips.gateway.gateway import Gateway
from lips.gateway.names import conversation_of, session_for
from lips.gateway.prompts import Message, variables_of
from lips.gateway.sampling import sampling
from lips.gateway.spoken import hear
from lips.gateway.tenants import Tenant
from lips.gateway.tools import Arguments, Call, Choice, Part

_BILLING = "x-anthropic-billing-header"
"""A block that Claude Code puts in front, with a number that changes: with it no prompt would begin as another."""
_SILENT = {"thinking", "redacted_thinking"}


@dataclass(slots=True)
class Asked:
    """A request, checked."""

    gateway: Gateway
    tenant: Tenant
    wanted: Wanted
    choice: Choice
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


async def messages(request: Request) -> Work:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
    fields.required("max_tokens")
    choice, turns = _choice(fields), _turns(fields)
    conversation = conversation_of(fields)
    how = sampling(_with_stops(fields), gateway.sampling)
    bound = bounds(fields, how, gateway.model, choice.named_grammar() or output_format(fields))
    prompt = await gateway.prompts.prompt(
        fields, turns, choice.tools, is_turn=conversation is not None, room=gateway.room(how)
    )
    wanted = Wanted(
        tokens=prompt.tokens,
        turn=prompt.turn,
        tools=prompt.tools,
        begin=prompt.begin,
        sampling=bound.sampling,
        grammar=bound.grammar,
        is_format=bound.is_format,
        session=session_for(tenant, request, fields),
        deadline_s=gateway.settings.answer_s,
        is_streamed=fields.flag("stream"),
    )
    asked = Asked(gateway, tenant, wanted, choice)
    if fields.flag("stream"):
        return Streamed(partial(_events, asked), anthropic_form, _failed)
    return Whole(lambda: _message(asked), anthropic_form)


async def count_tokens(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
    tokens = await gateway.prompts.tokens(_turns(fields), _choice(fields).tools, variables_of(fields))
    return Json({"input_tokens": len(tokens)})


def _with_stops(fields: Fields) -> Fields:
    """The same, by the names that the other interfaces have."""
    stops, more = fields.list("stop_sequences"), fields.body.get("stop")
    if stops is None:
        return fields
    more = [more] if isinstance(more, str) else more or []
    return Fields({**fields.body, "stop": [*stops, *more] if isinstance(more, list) else more}, fields.where)


def _turns(fields: Fields) -> list[Message]:
    """The messages, in OpenAI's form, which is the one that templates know."""
    fields.required("messages")
    found: list[Message] = []
    if system := _texts(fields, "system", skip=_BILLING):
        found.append({"role": "system", "content": system})
    for each in fields.children("messages"):
        role = each.one_of("role", ("user", "assistant", "system"), "")
        each.required("content")
        found += _message_of(each, role)
    if not any(message["role"] != "system" for message in found):
        raise ApiError(400, "messages is empty: a message at least is expected", param="messages")
    return found


def _message_of(fields: Fields, role: str) -> list[Message]:
    """One message may be several: what came of calls stands apart."""
    if isinstance(fields.body["content"], str):
        return [{"role": role, "content": fields.body["content"]}]
    texts, calls, results = list[str](), list[dict[str, Any]](), list[Message]()
    for block in fields.children("content"):
        match kind := block.text("type"):
            case "text":
                texts.append(block.text("text", "") or "")
            case "tool_use":
                given = block.child("input")
                function = {"name": block.name("name"), "arguments": {} if given is None else given.body}
                calls.append({"id": block.text("id", ""), "type": "function", "function": function})
            case "tool_result":
                said = _texts(block, "content") if block.has("content") else ""
                results.append({"role": "tool", "tool_call_id": block.text("tool_use_id", ""), "content": said})
            case _ if kind in _SILENT:
                pass
            case _:
                where = block.name_of("type")
                raise ApiError(400, f"{where} is {kind!r}: this model takes text", param=where)
    message: Message = {"role": role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


def _texts(fields: Fields, name: str, skip: str | None = None) -> str:
    """A text, or those of a list of blocks."""
    if isinstance(fields.body.get(name), str) or not fields.has(name):
        return fields.text(name, "") or ""
    texts = list[str]()
    for block in fields.children(name):
        if block.text("type", "text") != "text":
            where = block.name_of("type")
            raise ApiError(400, f"{where} is {block.text('type')!r}: this model takes text", param=where)
        text = block.text("text", "") or ""
        texts += [] if skip is not None and text.startswith(skip) else [text]
    return "\n".join(texts)


def _choice(fields: Fields) -> Choice:
    """The tools, by OpenAI's names. Those that the server itself would have to be, such as a search, are left out."""
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
        return Choice.of(Fields({"tools": tools}))
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "auto")
    wanted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(kind) or {"name": choice.name("name")}
    at_most_one = choice.flag("disable_parallel_tool_use")
    return Choice.of(Fields({"tools": tools, "tool_choice": wanted, "parallel_tool_calls": not at_most_one}))


def _usage(answers: Answers, num_output: int) -> dict[str, int]:
    return {
        "input_tokens": answers.num_prompt - answers.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answers.num_cached,
        "output_tokens": num_output,
    }


def _stop_reason(answer: Answer, num_calls: int) -> str:
    if answer.finish == "length":
        return "max_tokens"
    if answer.stop_text is not None:
        return "stop_sequence"
    return "tool_use" if num_calls else "end_turn"


def _head(asked: Asked) -> dict[str, Any]:
    return {"id": asked.id, "type": "message", "role": "assistant", "model": asked.gateway.model.name}


async def _message(asked: Asked) -> dict[str, Any]:
    content = list[dict[str, Any]]()

    async def take(part: Part) -> None:
        match part:
            case Call():
                content.append(_tool_use(part, ""))
            case Arguments(text):
                content[-1]["input"] += text
            case str() if content and content[-1]["type"] == "text":
                content[-1]["text"] += part
            case str():
                content.append({"type": "text", "text": part})

    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        await hear(answers, asked.choice.parser(is_json=asked.wanted.is_format), take)
        answer, uses = answers.answers[0], [block for block in content if block["type"] == "tool_use"]
        for block in uses:
            block["input"] = _object(block["input"])
        return {
            **_head(asked),
            "content": content,
            "stop_reason": _stop_reason(answer, len(uses)),
            "stop_sequence": answer.stop_text,
            "usage": _usage(answers, answers.num_completion),
        }


def _tool_use(call: Call, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name, "input": given}


def _object(text: str) -> Any:
    """What a call was given; it may have been cut off."""
    try:
        return parse_inner(text)
    except ValueError:
        return {}


def _event(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


class _Blocks:
    """The blocks of a stream, as they come."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._index = 0
        self._in: type[str | Call] | None = None
        self.num_calls = 0

    async def take(self, part: Part) -> None:
        match part:
            case Call():
                self.num_calls += 1
                await self._begin(Call, _tool_use(part, {}))
            case Arguments(text):
                await self._delta({"type": "input_json_delta", "partial_json": text})
            case str():
                if self._in is not str:
                    await self._begin(str, {"type": "text", "text": ""})
                await self._delta({"type": "text_delta", "text": part})

    async def end(self) -> None:
        """Of the block that there is."""
        if self._in is not None:
            await self._emit(_event("content_block_stop", index=self._index))
            self._index, self._in = self._index + 1, None

    async def _begin(self, kind: type[str | Call], block: dict[str, Any]) -> None:
        await self.end()
        self._in = kind
        await self._emit(_event("content_block_start", index=self._index, content_block=block))

    async def _delta(self, delta: dict[str, Any]) -> None:
        await self._emit(_event("content_block_delta", index=self._index, delta=delta))


async def _events(asked: Asked, emit: Emit) -> None:
    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        begun = {**_head(asked), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answers, 1)}
        await emit(_event("message_start", message=begun))
        await emit(_event("ping"))
        blocks = _Blocks(emit)
        await hear(answers, asked.choice.parser(is_json=asked.wanted.is_format), blocks.take)
        await blocks.end()
        answer = answers.answers[0]
        ended = {"stop_reason": _stop_reason(answer, blocks.num_calls), "stop_sequence": answer.stop_text}
        await emit(_event("message_delta", delta=ended, usage=_usage(answers, answers.num_completion)))
    await emit(_event("message_stop"))  # the conversation's file has all of the answer by now


def _failed(error: ApiError) -> bytes:
    return event(anthropic_form(error), "error")


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
