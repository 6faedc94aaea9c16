"""Continues one long text in many ways: the text is computed once, and each branch is a fork of it."""

from __future__ import annotations

import time

import anyio
from work import Answer, give, take, timed

import libsym as sym


async def branch(prefix: sym.KV, start: list[int], num_tokens: int, answers: list[Answer]) -> None:
    asked_s = time.monotonic()
    async with await sym.aio.kv_fork(prefix) as kv:
        generation = await sym.aio.generate(kv, start, max_tokens=num_tokens, stop_at_end=False)
        answers.append(await timed(generation, asked_s))


async def main() -> None:
    await sym.aio.connect()
    work = take()
    answers: list[Answer] = []
    async with await sym.aio.kv_create() as prefix:
        await sym.aio.kv_write(prefix, work["prefix"])
        async with anyio.create_task_group() as tasks:
            for start in work["starts"]:
                tasks.start_soon(branch, prefix, start, work["num_tokens"], answers)
    give(answers)


anyio.run(main)
