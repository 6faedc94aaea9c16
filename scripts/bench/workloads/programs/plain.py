"""Completes prompts, all at once: for each a file, and a generation in it."""

from __future__ import annotations

import time

import anyio
from work import Answer, give, take, timed

import libsym as sym


async def complete(prompt: list[int], num_tokens: int, answers: list[Answer]) -> None:
    asked_s = time.monotonic()
    async with await sym.aio.kv_create() as kv:
        generation = await sym.aio.generate(kv, prompt, max_tokens=num_tokens, stop_at_end=False)
        answers.append(await timed(generation, asked_s))


async def main() -> None:
    await sym.aio.connect()
    work = take()
    answers: list[Answer] = []
    async with anyio.create_task_group() as tasks:
        for prompt in work["prompts"]:
            tasks.start_soon(complete, prompt, work["num_tokens"], answers)
    give(answers)


anyio.run(main)
