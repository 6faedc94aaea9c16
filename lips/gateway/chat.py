"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import Emit, Streamed, Whole, Work, event
from lips.gateway.engine import Answer, Answers, Piece, Wanted
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.logprobs import chat_form
from lips.gateway.names import conversation_of, session_for
from lips.gateway.prompts import messages_of
from lips.gateway.sampling import chat_logprobs, sampling
from lips.gateway.tenants import Tenant
from lips.gateway.tools import Arguments, Call, Choice, Part


@dataclass(slots=True)
class Asked:
    """A request, checked."""

    gateway: Gateway
    tenant: Tenant
    wanted: Wanted
    choice: Choice
    wants_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.gateway.model.name}


async def chat_completions(request: Request) -> Work:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
    options = fields.child("stream_options")
    asked = Asked(
        gateway,
        tenant,
        await _wanted(gateway, tenant, request, fields),
        Choice.of(fields),
        options is not None and options.flag("include_usage"),
    )
    if fields.flag("stream"):
        return Streamed(partial(_events, asked), openai_form, failed)
    return Whole(lambda: _completion(asked), openai_form)


def failed(error: ApiError) -> bytes:
    """What fails when the answer has begun."""
    return event(openai_form(error)) + event("[DONE]")


async def _wanted(gateway: Gateway, tenant: Tenant, request: Request, fields: Fields) -> Wanted:
    messages, choice = messages_of(fields), Choice.of(fields)
    conversation = conversation_of(fields)
    how = sampling(fields, gateway.sampling).with_logprobs(chat_logprobs(fields))
    turns, told = await gateway.prompts.turns(messages, choice.tools)
    if conversation is not None and how.n > 1:
        raise ApiError(400, "n is more than 1: a conversation goes on with one answer", param="n")
    return Wanted(
        tokens=() if conversation is not None else await sym.aio.chat_tokens(turns, told),
        turn=turns if conversation is not None else None,
        tools=told,
        sampling=how,
        grammar=choice.grammar() or response_grammar(fields),
        session=session_for(tenant, request, fields),
        deadline_s=gateway.settings.answer_s,
        is_streamed=fields.flag("stream"),
    )


def response_grammar(fields: Fields) -> sym.Grammar | None:
    """What `response_format` wants."""
    wanted = fields.child("response_format")
    if wanted is None:
        return None
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return sym.Grammar.json({"type": "object"}, compact=True)
    described = wanted.child("json_schema")
    schema = None if described is None else described.child("schema")
    if schema is None:
        raise ApiError(400, "response_format.json_schema.schema is missing", param="response_format")
    return sym.Grammar.json(schema.body, compact=True)


def usage(answers: Answers) -> dict[str, Any]:
    """As OpenAI's interfaces count."""
    return {
        "prompt_tokens": answers.num_prompt,
        "completion_tokens": answers.num_completion,
        "total_tokens": answers.num_prompt + answers.num_completion,
        "prompt_tokens_details": {"cached_tokens": answers.num_cached},
    }


class _Said:
    """One answer so far, as a message and as the deltas of a stream."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._parser = asked.choice.parser(is_json=asked.wanted.grammar is not None)
        self._text: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """The deltas that a piece is."""
        top = self._asked.wanted.sampling.logprobs
        if top is not None:
            self._logprobs += chat_form(piece, self._asked.gateway.vocabulary, top)
        if self._parser is None:
            return self._deltas([piece.text])
        return self._deltas(list(self._parser.add(piece.text)))

    def end(self) -> list[dict[str, Any]]:
        return self._deltas([] if self._parser is None else list(self._parser.end()))

    def take_logprobs(self) -> list[dict[str, Any]] | None:
        """Of the tokens since the last time."""
        if self._asked.wanted.sampling.logprobs is None:
            return None
        found, self._logprobs = self._logprobs, []
        return found

    def _deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()
        for part in parts:
            match part:
                case Call(name, id_):
                    index = len(self._calls)
                    self._calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
                    function = {"name": name, "arguments": ""}
                    delta = {"index": index, "id": id_, "type": "function", "function": function}
                    found.append({"tool_calls": [delta]})
                case Arguments(text):
                    self._calls[-1]["function"]["arguments"] += text
                    delta = {"index": len(self._calls) - 1, "function": {"arguments": text}}
                    found.append({"tool_calls": [delta]})
                case str():
                    self._text.append(part)
                    found += [{"content": part}] if part else []
        return found

    def finish(self, answer: Answer) -> str:
        return "tool_calls" if self._calls and answer.finish == "stop" else answer.finish

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Of the whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        logprobs = self.take_logprobs()
        return {
            "index": answer.index,
            "message": message,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": self.finish(answer),
        }


async def _completion(asked: Asked) -> dict[str, Any]:
    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        said = [_Said(asked) for _ in answers.answers]
        async with aclosing(answers.pieces()) as pieces:
            async for answer, piece in pieces:
                if piece is None:
                    said[answer.index].end()
                else:
                    said[answer.index].add(piece)
        choices = [said[each.index].choice(each) for each in answers.answers]
        return {**asked.head("chat.completion"), "choices": choices, "usage": usage(answers)}


async def _events(asked: Asked, emit: Emit) -> None:
    head = asked.head("chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> bytes:
        told = None if logprobs is None else {"content": logprobs, "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}
        return event({**head, "choices": [choice], **({"usage": None} if asked.wants_usage else {})})

    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        said = [_Said(asked) for _ in answers.answers]
        for each in answers.answers:
            await emit(chunk(each.index, {"role": "assistant", "content": "", "refusal": None}))
        async with aclosing(answers.pieces()) as pieces:
            async for answer, piece in pieces:
                one = said[answer.index]
                for delta in one.end() if piece is None else one.add(piece):
                    await emit(chunk(answer.index, delta, one.take_logprobs()))
                if piece is None:
                    await emit(chunk(answer.index, {}, one.take_logprobs() or None, one.finish(answer)))
    # The conversation's file has all of the answer by now.
    if asked.wants_usage:
        await emit(event({**head, "choices": [], "usage": usage(answers)}))
    await emit(event("[DONE]"))


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
