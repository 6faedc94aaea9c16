"""POST /v1/completions: continues a text, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
from starlette.requests import Request
from starlette.routing import Route

import libsym as sym
from lips.gateway.asgi import Work
from lips.gateway.asked import Asked
from lips.gateway.constraints import bounded, response_format
from lips.gateway.engine import Piece
from lips.gateway.errors import ApiError
from lips.gateway.fields import Fields
from lips.gateway.gateway import Gateway
from lips.gateway.logprobs import Offsets, scored, text_form
from lips.gateway.openai import OpenAIWriter, with_extras
from lips.gateway.prompts import Prompt, truncated
from lips.gateway.reader import Received, received
from lips.gateway.said import Change, Said
from lips.gateway.sampling import MAX_N, Sampling, sampling, text_logprobs

MAX_PROMPTS = 64
_PROMPTS_AT_ONCE = 16
_DEFAULT_TOKENS = 16


async def completions(request: Request) -> Work:
    got = await received(request)
    fields, gateway = got.fields, got.gateway
    if fields.text("suffix"):
        raise ApiError(400, "suffix: this model does not fill in", param="suffix")
    generates = fields.body.get("max_tokens") != 0
    counted = fields if generates else Fields({**fields.body, "max_tokens": None})
    how = replace(sampling(counted, gateway.sampling), logprobs=text_logprobs(fields))
    if generates and how.max_tokens is None and not fields.has("n_predict"):
        how = replace(how, max_tokens=_DEFAULT_TOKENS)
    how, num_kept = _best_of(fields, how), how.n
    echo = fields.flag("echo")
    if not generates and not echo:
        raise ApiError(400, "max_tokens is 0: the answer would be empty without echo", param="max_tokens")
    if fields.has("conversation"):
        raise ApiError(
            400, "conversation: a text has no turns; /v1/chat/completions goes on with one", param="conversation"
        )
    how = bounded(fields, how, gateway.model, response_format(fields))
    how = how if generates else replace(how, max_tokens=0)
    asked = list[Asked]()
    for tokens in await _prompts(fields, gateway):
        one = got.asked(Prompt(tokens=truncated(fields, tokens, gateway.room(how))), how)
        text = await sym.aio.detokenize(one.prompt.tokens) if echo else None
        asked.append(replace(with_extras(fields, one), echo=text))
    return _TextWriter(got, asked, num_kept, wants_logprobs=fields.has("logprobs")).work()


def _best_of(fields: Fields, how: Sampling) -> Sampling:
    """Return settings for `best_of` answers, with log-probabilities to rank them."""
    best_of = fields.whole("best_of", 1, MAX_N, how.n) or how.n
    if best_of < how.n:
        raise ApiError(400, f"best_of is {best_of}: n is {how.n}", param="best_of")
    if best_of == how.n:
        return how
    if fields.flag("stream"):
        raise ApiError(400, "best_of: the likeliest answer is known only at the end: no stream", param="best_of")
    return replace(how, n=best_of, logprobs=how.logprobs or 0)


async def _prompts(fields: Fields, gateway: Gateway) -> list[list[int]]:
    """Return the tokens of each prompt. The field holds texts, or tokens of one or several prompts."""
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


class _TextWriter(OpenAIWriter):
    """Writer of texts: one or more texts for each of several prompts."""

    id_prefix = "cmpl"
    kinds = "text_completion", "text_completion"

    def __init__(self, received: Received, prompts: list[Asked], num_kept: int, *, wants_logprobs: bool) -> None:
        """`num_kept`: number of answers that the client gets for each prompt. The client gets the likeliest of
        `best_of` answers.
        """
        super().__init__(received, prompts[0])
        self._prompts, self._num_each = prompts, self.asked.sampling.n
        self._num_kept, self._wants_logprobs = num_kept, wants_logprobs
        self.said = [Said(self.asked, index) for index in range(len(prompts) * self._num_each)]
        self._echoed = [Piece("")] * len(prompts)
        self._offsets = [Offsets() for _ in self.said]
        self._about: dict[int, dict[str, Any]] = {}
        """Facts of the prompt by index of the choice. The first part of each choice has these facts."""

    async def answer(self) -> None:
        """Receive the answers to several prompts concurrently."""
        if len(self._prompts) == 1:
            await self._answer_prompt(0)
            return
        most = self.gateway.settings.max_running, self.tenant.limits.concurrent or MAX_PROMPTS
        limiter = anyio.CapacityLimiter(min(_PROMPTS_AT_ONCE, *most))

        async def answer_one(number: int) -> None:
            async with limiter:
                await self._answer_prompt(number)

        async with anyio.create_task_group() as tasks:
            for number in range(len(self._prompts)):
                tasks.start_soon(answer_one, number)

    async def _answer_prompt(self, number: int) -> None:
        asked, said = self._prompts[number], self._said_to(number)
        tokens, top = asked.prompt.tokens, asked.sampling.logprobs
        tops = [each for each in (None if asked.echo is None else top, asked.prompt_top) if each is not None]
        dists = await scored(self.gateway, self.tenant, tokens, max(tops)) if tops else []
        if asked.echo is not None:
            self._echoed[number] = Piece(asked.echo) if top is None else Piece(asked.echo, tokens, dists)
        for one in said:
            self._about[one.index] = self.facts(asked, tokens, dists)
            if self.outlet is not None and asked.echo is not None:
                self.put_choices([self._choice(one, self._echoed[number], ())])
        if asked.sampling.max_tokens != 0:
            await self.hear(asked, said)
            return
        for usage in (self.usage, self.tenant.usage):
            usage.num_prompt += len(tokens)
        for one in said:
            one.end("length")
            if self.outlet is not None:
                self.tell(one, ())

    def _said_to(self, number: int) -> list[Said]:
        return self.said[number * self._num_each : (number + 1) * self._num_each]

    def tell(self, said: Said, changes: Sequence[Change]) -> None:
        text = "".join(text for kind, _, text in changes if kind == "grows")
        if self.is_plain and not said.finish and said.index not in self._about:
            self.put_text(said, text)
            return
        piece = said.take()
        shown = None if said.finish else replace(piece, text=text)
        self.put_choices([self._choice(said, shown, piece.tokens)])

    def text_form(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _choice(self, said: Said, shown: Piece | None, tokens: Sequence[int]) -> dict[str, Any]:
        """Return a choice or its next part. `tokens` are the tokens of `shown` that the model drew."""
        top, logprobs, is_first = self.asked.sampling.logprobs, None, said.index in self._about
        if top is not None and shown is not None:
            logprobs = text_form(shown.tokens, shown.dists, self.gateway.vocabulary, top, self._offsets[said.index])
            if self.asked.echo is not None and is_first:
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None  # no token precedes the first token
        choice = {"index": said.index, "text": shown.text if shown else "", "logprobs": logprobs}
        told = {"token_ids": list(tokens)} if self.asked.wants_tokens else {}
        return {**choice, "finish_reason": said.finish, **self._about.pop(said.index, {}), **told}

    def choices(self) -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()
        for number, echoed in enumerate(self._echoed):
            said = self._said_to(number)
            if len(said) > self._num_kept:
                said = sorted(said, key=_mean_logprob, reverse=True)[: self._num_kept]
            for one in said:
                text, tokens, dists = echoed.text + one.text, [*echoed.tokens, *one.tokens], [*echoed.dists, *one.dists]
                choice = self._choice(one, Piece(text, tokens, dists), one.tokens)
                found.append({**choice, "index": len(found)})
        return found if self._wants_logprobs else [{**each, "logprobs": None} for each in found]


def _mean_logprob(said: Said) -> float:
    drawn = zip(said.tokens, said.dists, strict=True)
    return sum(dist.logprob(token) for token, dist in drawn if dist is not None) / max(1, len(said.tokens))


routes = [Route("/v1/completions", completions, methods=["POST"])]
