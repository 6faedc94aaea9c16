"""POST /v1/completions: text that goes on, without a template."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
from starlette.requests import Request
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import Emit, Streamed, Whole, Work, event
from lips.gateway.chat import failed, response_grammar
from lips.gateway.engine import Answers, Wanted
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.logprobs import Offsets, text_form
from lips.gateway.names import session_for
from lips.gateway.sampling import sampling, text_logprobs
from lips.gateway.tenants import Tenant

Take = Callable[[int, str, dict[str, Any] | None, str | None], Awaitable[None]]
"""Is told the choice's index, its new text, log-probabilities, and in the end why it ended."""
MAX_PROMPTS = 64
_PROMPTS_AT_ONCE = 16
_DEFAULT_TOKENS = 16
_CHUNK_TOKENS = 128


@dataclass(slots=True)
class Asked:
    """A request, checked."""

    gateway: Gateway
    tenant: Tenant
    wanted: list[Wanted]
    """For each prompt."""
    echo: bool
    generates: bool
    wants_usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.gateway.model.name}


@dataclass(slots=True)
class _Said:
    """One choice: where its text is now."""

    offsets: Offsets = field(default_factory=Offsets)
    has_begun: bool = False


@dataclass(slots=True)
class _Counted:
    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0

    def add(self, answers: Answers) -> None:
        self.num_prompt += answers.num_prompt
        self.num_cached += answers.num_cached
        self.num_completion += answers.num_completion

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


async def completions(request: Request) -> Work:
    gateway: Gateway = request.app.state.gateway
    tenant = await gateway.tenant_of(request)
    fields = await gateway.fields_of(request, tenant)
    if fields.text("suffix"):
        raise ApiError(400, "suffix: this model does not fill in", param="suffix")
    generates = fields.body.get("max_tokens") != 0
    counted = fields if generates else Fields({**fields.body, "max_tokens": None})
    how = sampling(counted, gateway.sampling).with_logprobs(text_logprobs(fields))
    if generates and how.max_tokens is None:
        how = replace(how, max_tokens=_DEFAULT_TOKENS)
    echo = fields.flag("echo")
    if not generates and not echo:
        raise ApiError(400, "max_tokens is 0: that gives something with echo alone", param="max_tokens")
    if fields.has("conversation"):
        raise ApiError(
            400, "conversation: a text has no turns; /v1/chat/completions goes on with one", param="conversation"
        )
    grammar, options = response_grammar(fields), fields.child("stream_options")
    wanted = [
        Wanted(
            tokens=tokens,
            sampling=how,
            grammar=grammar,
            session=session_for(tenant, request, fields),
            deadline_s=gateway.settings.answer_s,
            is_streamed=fields.flag("stream"),
        )
        for tokens in await _prompts(fields, gateway)
    ]
    wants_usage = options is not None and options.flag("include_usage")
    asked = Asked(gateway, tenant, wanted, echo, generates, wants_usage)
    if fields.flag("stream"):
        return Streamed(partial(_events, asked), openai_form, failed)
    return Whole(lambda: _completion(asked), openai_form)


async def _prompts(fields: Fields, gateway: Gateway) -> list[list[int]]:
    """A text, a list of texts, tokens, or a list of lists of tokens."""
    given = fields.required("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and _is_token(given[0])):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_PROMPTS:
        raise fields.wrong("prompt", f"a text, tokens, or a list of at most {MAX_PROMPTS} of them")
    found = []
    for each in given:
        if isinstance(each, str):
            tokens = await sym.aio.tokenize(each)
        elif isinstance(each, list) and all(_is_token(token, gateway.model.vocab_size) for token in each):
            tokens = each
        else:
            raise fields.wrong("prompt", f"texts, or tokens from 0 to {gateway.model.vocab_size - 1}")
        if not tokens:
            raise ApiError(400, "prompt is empty: a token at least is expected", param="prompt")
        found.append(tokens)
    return found


def _is_token(value: object, below: int = 1 << 31) -> bool:
    return type(value) is int and 0 <= value < below


async def _answer(asked: Asked, counted: _Counted, take: Take) -> None:
    """Tells what comes, of some prompts at once."""
    if len(asked.wanted) == 1:  # a lock for each token would cost 32 clients a tenth of their throughput
        await _answer_prompt(asked, 0, counted, take)
        return
    places = min(_PROMPTS_AT_ONCE, asked.gateway.settings.max_running, asked.tenant.limits.concurrent or MAX_PROMPTS)
    limiter, taking = anyio.CapacityLimiter(places), anyio.Lock(fast_acquire=True)

    async def take_one(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> None:
        async with taking:
            await take(index, text, logprobs, finish)

    async def answer(number: int) -> None:
        async with limiter:
            await _answer_prompt(asked, number, counted, take_one)

    async with anyio.create_task_group() as tasks:
        for number in range(len(asked.wanted)):
            tasks.start_soon(answer, number)


async def _answer_prompt(asked: Asked, number: int, counted: _Counted, take: Take) -> None:
    wanted = asked.wanted[number]
    top, vocabulary = wanted.sampling.logprobs, asked.gateway.vocabulary
    first, said = number * wanted.sampling.n, [_Said() for _ in range(wanted.sampling.n)]

    def part(said: _Said, text: str, tokens: Sequence[int], dists: Sequence[Any]) -> tuple[str, Any]:
        form = None if top is None else text_form(tokens, dists, vocabulary, top, said.offsets)
        if form is not None and asked.echo and not said.has_begun:
            form["token_logprobs"][0] = form["top_logprobs"][0] = None  # nothing is before it
        said.has_begun = True
        return text, form

    if asked.echo:
        text, scored = await _prompt_part(asked, wanted, top)
        for index, one in enumerate(said):
            await take(first + index, *part(one, text, wanted.tokens if top is not None else (), scored), None)
    if not asked.generates:
        counted.num_prompt += len(wanted.tokens)
        asked.tenant.num_prompt_tokens += len(wanted.tokens)
        for index in range(len(said)):
            await take(first + index, "", None, "length")
        return
    async with asked.gateway.answered(asked.tenant, wanted) as answers:
        async with aclosing(answers.pieces()) as pieces:
            async for answer, piece in pieces:
                index = first + answer.index
                if piece is None:
                    await take(index, "", None, answer.finish)
                else:
                    await take(index, *part(said[answer.index], piece.text, piece.tokens, piece.dists), None)
        counted.add(answers)


async def _prompt_part(asked: Asked, wanted: Wanted, top: int | None) -> tuple[str, list[sym.ReducedDist | None]]:
    """The prompt's text, and if it is asked for how likely each of its tokens was. The first has nothing before it."""
    text = await sym.aio.detokenize(wanted.tokens)
    if top is None:
        return text, []
    asked.gateway.check_length(len(wanted.tokens))
    found: list[sym.ReducedDist | None] = [None]
    async with asked.gateway.admission.enter(asked.tenant.name, asked.tenant.limits):
        with asked.tenant.use():
            async with await sym.aio.kv_create() as kv:
                tokens = list(wanted.tokens)
                for start in range(0, len(tokens), _CHUNK_TOKENS):
                    chunk, following = (
                        tokens[start : start + _CHUNK_TOKENS],
                        tokens[start + 1 : start + _CHUNK_TOKENS + 1],
                    )
                    asked.gateway.admission.charge(asked.tenant.name, len(chunk))  # whatever comes of it
                    rows = await sym.aio.pred(
                        kv, chunk, rows="all", top_k=max(top, 1), logprobs=sorted({*following, 0})
                    )
                    found += [rows[index] for index in range(len(following))]
    return text, found


async def _completion(asked: Asked) -> dict[str, Any]:
    counted = _Counted()
    choices: dict[int, dict[str, Any]] = {}

    async def take(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> None:
        choice = choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "finish_reason": None})
        choice["text"] += text
        choice["finish_reason"] = finish
        if logprobs is not None and choice["logprobs"] is not None:
            for name, values in logprobs.items():
                choice["logprobs"][name] += values
        else:
            choice["logprobs"] = logprobs or choice["logprobs"]

    await _answer(asked, counted, take)
    return {**asked.head(), "choices": [choices[index] for index in sorted(choices)], "usage": counted.usage()}


async def _events(asked: Asked, emit: Emit) -> None:
    counted, head = _Counted(), asked.head()
    more = {"usage": None} if asked.wants_usage else {}

    async def take(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> None:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        await emit(event({**head, "choices": [choice], **more}))

    await _answer(asked, counted, take)
    if asked.wants_usage:
        await emit(event({**head, "choices": [], "usage": counted.usage()}))
    await emit(event("[DONE]"))


routes = [Route("/v1/completions", completions, methods=["POST"])]
