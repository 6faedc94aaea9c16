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
from lips.gateway.chat import failed
from lips.gateway.constraints import bounds, response_format
from lips.gateway.engine import Answers, Wanted
from lips.gateway.errors import ApiError, openai_form
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.logprobs import Offsets, text_form
from lips.gateway.names import session_for
from lips.gateway.prompts import truncated
from lips.gateway.sampling import MAX_N, Sampling, prompt_top, sampling, text_logprobs
from lips.gateway.scored import prompt_form, scored
from lips.gateway.tenants import Tenant

MAX_PROMPTS = 64
_PROMPTS_AT_ONCE = 16
_DEFAULT_TOKENS = 16


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
    wants_logprobs: bool
    wants_tokens: bool
    prompt_top: int | None
    """So many of the likeliest tokens beside each of a prompt."""
    num_kept: int
    """Answers to a prompt that the client gets: the likeliest of `best_of`."""
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.gateway.model.name}


@dataclass(slots=True)
class _Said:
    """One choice: where its text is now."""

    offsets: Offsets = field(default_factory=Offsets)
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """News of a choice."""

    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    tokens: Sequence[int] = ()
    total: float = 0.0
    """The log-probability of the tokens, where it was asked for."""
    prompt: dict[str, Any] = field(default_factory=dict)
    """Facts of the prompt, in the choice's first part."""


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
    if generates and how.max_tokens is None and not fields.has("n_predict"):
        how = replace(how, max_tokens=_DEFAULT_TOKENS)
    how, num_kept = _best_of(fields, how), how.n
    echo = fields.flag("echo")
    if not generates and not echo:
        raise ApiError(400, "max_tokens is 0: that gives something with echo alone", param="max_tokens")
    if fields.has("conversation"):
        raise ApiError(
            400, "conversation: a text has no turns; /v1/chat/completions goes on with one", param="conversation"
        )
    bound, options = bounds(fields, how, gateway.model, response_format(fields)), fields.child("stream_options")
    wanted = [
        Wanted(
            tokens=truncated(fields, tokens, gateway.room(how)),
            sampling=bound.sampling,
            grammar=bound.grammar,
            session=session_for(tenant, request, fields),
            deadline_s=gateway.settings.answer_s,
            is_streamed=fields.flag("stream"),
        )
        for tokens in await _prompts(fields, gateway)
    ]
    wants_usage = options is not None and options.flag("include_usage")
    wants_tokens, top = fields.flag("return_token_ids"), prompt_top(fields)
    wants_logprobs = fields.has("logprobs")
    asked = Asked(gateway, tenant, wanted, echo, generates, wants_usage, wants_logprobs, wants_tokens, top, num_kept)
    if fields.flag("stream"):
        return Streamed(partial(_events, asked), openai_form, failed)
    return Whole(lambda: _completion(asked), openai_form)


def _best_of(fields: Fields, how: Sampling) -> Sampling:
    """More answers than are wanted, with what tells the likeliest."""
    best_of = fields.whole("best_of", 1, MAX_N, how.n) or how.n
    if best_of < how.n:
        raise ApiError(400, f"best_of is {best_of}: n is {how.n}", param="best_of")
    if best_of == how.n:
        return how
    if fields.flag("stream"):
        raise ApiError(400, "best_of: which answer is the likeliest is known in the end: no stream", param="best_of")
    return replace(how, n=best_of, logprobs=how.logprobs or 0)


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


Take = Callable[[int, Part], Awaitable[None]]
"""Is told the choice's index, and what is new of it."""


async def _answer(asked: Asked, counted: _Counted, take: Take) -> None:
    """Tells what comes, of some prompts at once."""
    if len(asked.wanted) == 1:  # a lock for each token would cost 32 clients a tenth of their throughput
        await _answer_prompt(asked, 0, counted, take)
        return
    places = min(_PROMPTS_AT_ONCE, asked.gateway.settings.max_running, asked.tenant.limits.concurrent or MAX_PROMPTS)
    limiter, taking = anyio.CapacityLimiter(places), anyio.Lock(fast_acquire=True)

    async def take_one(index: int, part: Part) -> None:
        async with taking:
            await take(index, part)

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

    def part(said: _Said, text: str, tokens: Sequence[int], dists: Sequence[sym.ReducedDist | None]) -> Part:
        form = None if top is None else text_form(tokens, dists, vocabulary, top, said.offsets)
        if form is not None and asked.echo and not said.has_begun:
            form["token_logprobs"][0] = form["top_logprobs"][0] = None  # nothing is before it
        is_first, said.has_begun = not said.has_begun, True
        total = sum(dist.logprob(token) for token, dist in zip(tokens, dists, strict=False) if dist is not None)
        return Part(text, form, tokens=tokens, total=total, prompt=about if is_first else {})

    about: dict[str, Any] = {"prompt_token_ids": list(wanted.tokens)} if asked.wants_tokens else {}
    tops = [each for each in (top if asked.echo else None, asked.prompt_top) if each is not None]
    dists = await scored(asked.gateway, asked.tenant, wanted.tokens, max(tops)) if tops else []
    if asked.prompt_top is not None:
        about["prompt_logprobs"] = prompt_form(wanted.tokens, dists, vocabulary, asked.prompt_top)
    if asked.echo:
        text, shown = await sym.aio.detokenize(wanted.tokens), wanted.tokens if top is not None else ()
        for index, one in enumerate(said):
            told = part(one, text, shown, dists if shown else [])
            await take(first + index, replace(told, tokens=(), total=0.0))
    if not asked.generates:
        counted.num_prompt += len(wanted.tokens)
        asked.tenant.num_prompt_tokens += len(wanted.tokens)
        for index in range(len(said)):
            await take(first + index, Part(finish="length"))
        return
    async with asked.gateway.answered(asked.tenant, wanted) as answers:
        async with aclosing(answers.pieces()) as pieces:
            async for answer, piece in pieces:
                index = first + answer.index
                if piece is None:
                    await take(index, Part(finish=answer.finish))
                else:
                    await take(index, part(said[answer.index], piece.text, piece.tokens, piece.dists))
        counted.add(answers)


@dataclass(slots=True)
class _Choice:
    """A whole one."""

    form: dict[str, Any]
    num_tokens: int = 0
    total: float = 0.0

    def add(self, part: Part, *, wants_tokens: bool) -> None:
        form = self.form
        form["text"] += part.text
        form["finish_reason"] = part.finish
        if part.logprobs is not None and form["logprobs"] is not None:
            for name, values in part.logprobs.items():
                form["logprobs"][name] += values
        else:
            form["logprobs"] = part.logprobs or form["logprobs"]
        form |= part.prompt
        if wants_tokens:
            form.setdefault("token_ids", []).extend(part.tokens)
        self.num_tokens += len(part.tokens)
        self.total += part.total

    @property
    def mean_logprob(self) -> float:
        return self.total / max(1, self.num_tokens)


async def _completion(asked: Asked) -> dict[str, Any]:
    counted = _Counted()
    choices: dict[int, _Choice] = {}

    async def take(index: int, part: Part) -> None:
        begun = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        choices.setdefault(index, _Choice(begun)).add(part, wants_tokens=asked.wants_tokens)

    await _answer(asked, counted, take)
    forms = list[dict[str, Any]]()
    num_each = asked.wanted[0].sampling.n
    for number in range(len(asked.wanted)):
        each = [choices[index] for index in range(number * num_each, (number + 1) * num_each)]
        if num_each > asked.num_kept:
            each = sorted(each, key=lambda choice: -choice.mean_logprob)[: asked.num_kept]
        forms += [{**choice.form, "index": number * asked.num_kept + at} for at, choice in enumerate(each)]
    if not asked.wants_logprobs:
        forms = [{**form, "logprobs": None} for form in forms]
    return {**asked.head(), "choices": forms, "usage": counted.usage()}


async def _events(asked: Asked, emit: Emit) -> None:
    counted, head = _Counted(), asked.head()
    more = {"usage": None} if asked.wants_usage else {}

    async def take(index: int, part: Part) -> None:
        choice = {"index": index, "text": part.text, "logprobs": part.logprobs, "finish_reason": part.finish}
        tokens = {"token_ids": list(part.tokens)} if asked.wants_tokens else {}
        await emit(event({**head, "choices": [{**choice, **part.prompt, **tokens}], **more}))

    await _answer(asked, counted, take)
    if asked.wants_usage:
        await emit(event({**head, "choices": [], "usage": counted.usage()}))
    await emit(event("[DONE]"))


routes = [Route("/v1/completions", completions, methods=["POST"])]
