"""Answers questions under one system prompt: it is computed once, and each answer begins with a fork of it."""

from __future__ import annotations

import time

import anyio
from work import Answer, give, take, timed

import libsym as sym


async def answer(system: sym.KV, question: list[int], num_tokens: int, answers: list[Answer]) -> None:
    asked_s = time.monotonic()
    async with await sym.aio.kv_fork(system) as kv:
        generation = await sym.aio.generate(kv, question, max_tokens=num_tokens, stop_at_end=False)
        answers.append(await timed(generation, asked_s))


async def main() -> None:
    await sym.aio.connect()
    work = take()
    answers: list[Answer] = []
    system = await sym.aio.kv_open_or_compute(work["name"], work["system"])
    async with system, anyio.create_task_group() as tasks:
        for question in work["questions"]:
            tasks.start_soon(answer, system, question, work["num_tokens"], answers)
    give(answers)


anyio.run(main)
