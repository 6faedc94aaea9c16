"""Writes JSON that a schema describes."""

from __future__ import annotations

import time

import anyio
from work import Answer, give, take, timed

import libsym as sym


async def write(prompt: list[int], grammar: sym.Grammar, num_tokens: int, answers: list[Answer]) -> None:
    asked_s = time.monotonic()
    async with await sym.aio.kv_create() as kv:
        generation = await sym.aio.generate(kv, prompt, max_tokens=num_tokens, grammar=grammar)
        answers.append(await timed(generation, asked_s))


async def main() -> None:
    await sym.aio.connect()
    work = take()
    grammar = sym.Grammar.json(work["schema"], compact=True)
    answers: list[Answer] = []
    async with anyio.create_task_group() as tasks:
        for prompt in work["prompts"]:
            tasks.start_soon(write, prompt, grammar, work["num_tokens"], answers)
    give(answers)


anyio.run(main)
