"""Programs that branch, done by a client of a server: kinds of work that branching_peers.py hands out.

A fork over HTTP is a prompt that begins as an earlier one did: the server's prefix cache has what both share. Tokens go
out and come back as numbers, and log-probabilities with them. Servers differ in how:

vLLM          /v1/completions; `logprob_token_ids` asks for chosen tokens
llama.cpp     /completion; chosen tokens are what a bias and `top_k` leave, so their log-probabilities are among them
others        /v1/completions; 20 likeliest tokens, by text: a token that is not among them counts as the last of these

Rolls of a search and rounds of a beam are the client's: no server has a request for them that gives the same result.
Each answer's tokens come with their log-probabilities, so best_of_n needs no second pass, which the program makes.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

from openai_client import Server
from programs.work import Answer

ROOM = 256
"""As in branching_programs.py: a plain loop goes back to the context after so many tokens."""
TOP = 20
"""Tokens of a distribution: the most that vLLM tells without an option of its start."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: for each token its log-probability, and the distribution from which it was taken, as far as told."""

    tokens: list[int]
    text: str
    logprobs: list[float]
    dists: list[dict[int, float]]


class Model:
    """A server's model. `ids`: tokens by text, for a server that tells texts alone."""

    def __init__(self, server: Server, ids: Mapping[str, int]) -> None:
        self._server, self._ids = server, ids
        self._is_llamacpp = server.owner == "llamacpp"
        self.generated: list[int] = []

    def _request(self, prompt: object, num_tokens: int, **options: Any) -> tuple[str, dict[str, Any]]:
        same = {"model": self._server.model, "prompt": prompt, "temperature": 0, **options}
        if self._is_llamacpp:
            fields = ["index", "content", "tokens", "completion_probabilities"]
            how = {"top_k": 0, "top_p": 1, "min_p": 0, "return_tokens": True, "response_fields": fields}
            return "/completion", {"n_predict": num_tokens, **how, **same}
        return "/v1/completions", {"max_tokens": num_tokens, "return_token_ids": True, **same}

    async def ask(
        self,
        prompts: list[list[int]],
        num_tokens: int = 1,
        *,
        n: int = 1,
        top: int = TOP,
        among: Iterable[int] = (),
        **how: Any,
    ) -> list[Said]:
        """Complete all prompts with one request, each `n` times. `among`: tokens whose log-probabilities are wanted."""
        chosen = list(among)
        options: dict[str, Any]
        if self._is_llamacpp:
            options = {"n_cmpl": n, "n_probs": top}
            if chosen:
                bias = [[token, 100] for token in chosen]
                options |= {"logit_bias": bias, "top_k": len(chosen), "temperature": 1, "post_sampling_probs": True}
        else:
            options = {"n": n, "logprobs": top}
            if self._server.owner == "vllm":
                options |= {"return_tokens_as_token_ids": True} | ({"logprob_token_ids": chosen} if chosen else {})
        prompt = prompts if len(prompts) > 1 else prompts[0]
        found = await self._server.post(*self._request(prompt, num_tokens, **options, **how))
        if self._is_llamacpp:
            found = sorted(found if isinstance(found, list) else [found], key=lambda each: each["index"])
            said = [_llamacpp_form(each) for each in found]
        else:
            said = [self._openai_form(each) for each in found["choices"]]
        self.generated += [token for each in said for token in each.tokens]
        return said

    def _openai_form(self, choice: dict[str, Any]) -> Said:
        told = choice["logprobs"]
        dists = [{self._token(key): logprob for key, logprob in dist.items()} for dist in told["top_logprobs"]]
        return Said(choice["token_ids"], choice["text"], told["token_logprobs"], dists)

    def _token(self, key: str) -> int:
        number = key.removeprefix("token_id:")
        return self._ids[key] if self._ids else int(number)

    async def stream(self, prompt: list[int], num_tokens: int) -> AsyncIterator[int]:
        """Yield tokens as they come, beyond an end of text."""
        path, request = self._request(prompt, num_tokens, stream=True, ignore_eos=True)
        async with aclosing(self._server.stream(path, request)) as events:
            async for event in events:
                for token in event["tokens"] if self._is_llamacpp else event["choices"][0]["token_ids"] or ():
                    yield token


def _llamacpp_form(found: dict[str, Any]) -> Said:
    """`prob` and `top_probs` stand for what a bias has changed."""
    logprobs, dists = [], []
    for each in found.get("completion_probabilities", ()):  # none if the stop text came at once
        if "top_probs" in each:
            dists.append({one["id"]: math.log(one["prob"]) for one in each["top_probs"]})
            logprobs.append(math.log(each["prob"]))
        else:
            dists.append({one["id"]: one["logprob"] for one in each["top_logprobs"]})
            logprobs.append(each["logprob"])
    return Said(found["tokens"], found["content"], logprobs, dists)


def logprob(dist: Mapping[int, float], token: int) -> float:
    return dist.get(token, min(dist.values()))


async def likeliest(model: Model, prompt: list[int]) -> int:
    [said] = await model.ask([prompt], ignore_eos=True)
    if not said.dists:
        return said.tokens[0]  # part of a character: llama.cpp tells no distribution
    return max(said.dists[0].items(), key=lambda each: each[1])[0]


async def branch(model: Model, context: list[int], token: int) -> AsyncIterator[int]:
    while True:
        token = await likeliest(model, [*context, token])
        yield token


async def plain(model: Model, context: list[int], token: int) -> AsyncIterator[int]:
    while True:
        tokens = [*context, token]
        for _ in range(ROOM):
            tokens.append(await likeliest(model, tokens))
            yield tokens[-1]


async def streamed(model: Model, context: list[int], token: int) -> AsyncIterator[int]:
    while True:
        async with aclosing(model.stream([*context, token], ROOM)) as tokens:
            async for each in tokens:
                yield each


WAYS = {each.__name__: each for each in (branch, plain, streamed)}


async def rates(server: Server, work: dict[str, Any]) -> list[Answer]:
    """Return each stream's tokens between `warm_s` and `warm_s + seconds` after all streams had an answer."""
    model, context = Model(server, work["ids"]), work["context"]
    firsts = [1 + number for number in range(work["num_streams"])]
    await asyncio.gather(*(likeliest(model, [*context, token]) for token in firsts))  # llama.cpp: into each slot
    from_s = time.monotonic() + work["warm_s"]

    async def stream(token: int) -> Answer:
        found = Answer(tokens=[], asked_s=from_s, came_s=[])
        async with aclosing(WAYS[work["way"]](model, context, token)) as tokens:
            async for each in tokens:
                came_s = time.monotonic()
                if came_s >= from_s + work["seconds"]:
                    break
                if came_s >= from_s:
                    found["tokens"].append(each)
                    found["came_s"].append(came_s)
        return found

    return list(await asyncio.gather(*map(stream, firsts)))


async def beam(model: Model, work: dict[str, Any]) -> str:
    """Rounds of one request, whose prompts are the hypotheses."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(work["max_tokens"]):
        over = [each for each in beams if each[1] and each[1][-1] in work["end"]]
        live = [each for each in beams if each not in over]
        if max(beams) in over:
            break
        said = await model.ask([[*work["prompt"], *tokens] for _, tokens in live], top=work["width"])
        grown = [
            (total + each, [*tokens, token])
            for (total, tokens), one in zip(live, said, strict=True)
            for token, each in one.dists[0].items()
        ]
        beams = sorted(over + grown, reverse=True)[: work["width"]]
    return str(beams[0])


async def best_of_n(model: Model, work: dict[str, Any]) -> str:
    """A request for all answers."""
    how = {"n": work["n"], "temperature": 0.8, "seed": 0, "top": 1}
    answers = await model.ask([work["prompt"]], work["max_tokens"], **how)
    return max((fmean(each.logprobs), each.text) for each in answers)[1]


async def tree_of_thought(model: Model, work: dict[str, Any]) -> str:
    """For each level a request for each thought that is kept, and one request for all judgements."""
    frontier, seeds, (yes, no) = [(0.0, "", work["prompt"])], count(), work["verdicts"]
    for step in work["steps"]:
        bases = [[*prompt, *step] for *_, prompt in frontier]
        how = {"n": work["breadth"], "temperature": 0.8, "stop": ["\n"]}
        drawn = await asyncio.gather(
            *(model.ask([base], work["max_tokens"], top=1, seed=next(seeds), **how) for base in bases)
        )
        thoughts = [
            (each.text, [*base, *each.tokens]) for base, many in zip(bases, drawn, strict=True) for each in many
        ]
        judged = await model.ask([[*prompt, *work["judge"]] for _, prompt in thoughts], among=(yes, no))
        scores = [1 / (1 + math.exp(logprob(each.dists[0], no) - logprob(each.dists[0], yes))) for each in judged]
        ranked = zip(scores, *zip(*thoughts, strict=True), strict=True)
        frontier = sorted(ranked, reverse=True)[: work["keep"]]
    return "\n".join(f"{score:.2f} {text}" for score, text, _ in frontier)


@dataclass(slots=True)
class Node:
    """An expression as far as it goes, and the prompt that ends with it."""

    prompt: list[int]
    text: str = ""
    prior: float = 1.0
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    best: float = 0.0

    def worth(self) -> float:
        assert self.parent is not None
        return self.best + 2 * self.prior * math.sqrt(self.parent.visits) / (1 + self.visits)


async def mcts(model: Model, work: dict[str, Any]) -> str:
    """A request for each distribution: what is asked next depends on it."""
    root, draws, found = Node(work["prompt"]), random.Random(0), (-math.inf, "")

    async def moves(prompt: list[int], text: str) -> list[tuple[str, int, float]]:
        allowed = work["signs" if len(text) % 2 else "digits"]
        [said] = await model.ask([prompt], among=allowed.values())
        priors = {move: math.exp(logprob(said.dists[0], move[1])) for move in allowed.items()}
        likely = sorted(priors, key=priors.__getitem__, reverse=True)
        return [(*move, priors[move] / sum(priors.values())) for move in likely]

    while len(model.generated) < work["tokens"] and found[0] < 1:
        node = root
        while node.children:
            node = max(node.children, key=Node.worth)
        if node.visits and len(node.text) < work["length"]:
            for text, token, prior in await moves(node.prompt, node.text):
                node.children.append(Node([*node.prompt, token], node.text + text, prior, node))
            node = max(node.children, key=Node.worth)
        text, prompt = node.text, node.prompt
        while len(text) < work["length"]:
            come = await moves(prompt, text)
            [(more, token, _)] = draws.choices(come, [prior for *_, prior in come])
            text, prompt = text + more, [*prompt, token]
        value = 1 / (1 + abs(int(eval(text)) - work["target"]) / 10)
        found = max(found, (value, text))
        line: Node | None = node
        while line:
            line.visits, line.best, line = line.visits + 1, max(line.best, value), line.parent
    return found[1]


PROGRAMS = {each.__name__: each for each in (beam, best_of_n, tree_of_thought, mcts)}


async def program(server: Server, work: dict[str, Any]) -> list[Answer]:
    """Return all tokens that were generated, and the result as text."""
    model, asked_s = Model(server, work["ids"]), time.monotonic()
    text = await PROGRAMS[work["name"]](model, work)
    return [Answer(tokens=model.generated, asked_s=asked_s, came_s=[time.monotonic()], text=text)]
