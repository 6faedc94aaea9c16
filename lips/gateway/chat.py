"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from lips.gateway.asgi import Emit, Streamed, Whole, Work, event
from lips.gateway.constraints import bounds, response_format
from lips.gateway.engine import Answer, Answers, Piece, Wanted
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.logprobs import chat_form
from lips.gateway.names import conversation_of, session_for
from lips.gateway.prompts import Message, messages_of
from lips.gateway.sampling import chat_logprobs, prompt_top, sampling
from lips.gateway.scored import prompt_form, scored
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
    first_text: str
    """Text before the answer: `echo` of a message that the answer goes on with."""
    wants_tokens: bool
    prompt_top: int | None
    """So many of the likeliest tokens beside each of the prompt."""
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.gateway.model.name}


async def chat_completions(request: Request) -> Work:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
    options, messages = fields.child("stream_options"), messages_of(fields)
    asked = Asked(
        gateway,
        tenant,
        await _wanted(gateway, tenant, request, fields, messages),
        Choice.of(fields),
        options is not None and options.flag("include_usage"),
        _echoed(fields, messages),
        fields.flag("return_token_ids"),
        prompt_top(fields),
    )
    if asked.prompt_top is not None and asked.wanted.turn is not None:
        raise ApiError(400, "prompt_logprobs: a conversation has its tokens already", param="prompt_logprobs")
    if fields.flag("stream"):
        return Streamed(partial(_events, asked), openai_form, failed)
    return Whole(lambda: _completion(asked), openai_form)


def failed(error: ApiError) -> bytes:
    """What fails when the answer has begun."""
    return event(openai_form(error)) + event("[DONE]")


def _echoed(fields: Fields, messages: Sequence[Message]) -> str:
    """The last message, where `echo` wants it and the answer is of the same role."""
    return messages[-1]["content"] if fields.flag("echo") and messages[-1]["role"] == "assistant" else ""


async def _wanted(
    gateway: Gateway, tenant: Tenant, request: Request, fields: Fields, messages: Sequence[Message]
) -> Wanted:
    choice, conversation = Choice.of(fields), conversation_of(fields)
    how = sampling(fields, gateway.sampling).with_logprobs(chat_logprobs(fields))
    bound = bounds(fields, how, gateway.model, choice.named_grammar() or response_format(fields))
    prompt = await gateway.prompts.prompt(
        fields, messages, choice.tools, is_turn=conversation is not None, room=gateway.room(how)
    )
    if conversation is not None and how.n > 1:
        raise ApiError(400, "n is more than 1: a conversation goes on with one answer", param="n")
    return Wanted(
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
        self._parser = asked.choice.parser(is_json=asked.wanted.is_format)
        self._text: list[str] = [asked.first_text] if asked.first_text else []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._tokens: list[int] = []

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """The deltas that a piece is."""
        top = self._asked.wanted.sampling.logprobs
        self._tokens += piece.tokens
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

    def take_tokens(self) -> dict[str, Any]:
        """Return the tokens since the last time, where a client wants them."""
        if not self._asked.wants_tokens:
            return {}
        found, self._tokens = self._tokens, []
        return {"token_ids": found}

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
            **self.take_tokens(),
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
        more = _prompt_tokens(asked, answers)
    if asked.prompt_top is not None:
        dists = await scored(asked.gateway, asked.tenant, asked.wanted.tokens, asked.prompt_top)
        vocabulary = asked.gateway.vocabulary
        more["prompt_logprobs"] = prompt_form(asked.wanted.tokens, dists, vocabulary, asked.prompt_top)
    return {**asked.head("chat.completion"), "choices": choices, "usage": usage(answers), **more}


def _prompt_tokens(asked: Asked, answers: Answers) -> dict[str, Any]:
    """Return the prompt's tokens, where a client wants them; in a conversation, the turn's."""
    if not asked.wants_tokens:
        return {}
    return {"prompt_token_ids": list(asked.wanted.tokens or answers.answers[0].generation.given)}


async def _events(asked: Asked, emit: Emit) -> None:
    head = asked.head("chat.completion.chunk")

    def chunk(
        index: int, delta: dict[str, Any], said: _Said | None = None, finish: str | None = None, **more: Any
    ) -> bytes:
        logprobs = None if said is None else said.take_logprobs()
        told = None if logprobs is None or (finish and not logprobs) else {"content": logprobs, "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}
        if said is not None:
            choice |= said.take_tokens()
        return event({**head, "choices": [choice], **({"usage": None} if asked.wants_usage else {}), **more})

    async with asked.gateway.answered(asked.tenant, asked.wanted) as answers:
        said, more = [_Said(asked) for _ in answers.answers], _prompt_tokens(asked, answers)
        for each in answers.answers:
            begun = {"role": "assistant", "content": asked.first_text, "refusal": None}
            await emit(chunk(each.index, begun, **more))
        async with aclosing(answers.pieces()) as pieces:
            async for answer, piece in pieces:
                one = said[answer.index]
                for delta in one.end() if piece is None else one.add(piece):
                    await emit(chunk(answer.index, delta, one))
                if piece is None:
                    await emit(chunk(answer.index, {}, one, one.finish(answer)))
    # The conversation's file has all of the answer by now.
    if asked.wants_usage:
        await emit(event({**head, "choices": [], "usage": usage(answers)}))
    await emit(event("[DONE]"))


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
