"""Programs of Symphony that run the jobs of workloads. `own_programs.py KIND` runs one job of that kind."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from work import Answer, give, take

import libsym as sym


async def timed(generation: AsyncIterator[int], asked_s: float) -> Answer:
    tokens, came_s = [], []
    async for token in generation:
        tokens.append(token)
        came_s.append(time.monotonic())
    return Answer(tokens=tokens, asked_s=asked_s, came_s=came_s)


async def beginning(prefix: list[int], name: str) -> tuple[sym.KV, int]:
    """Return a file of the prefix, and the number of tokens computed for it. With a name, programs share the file."""
    num_computed = 0

    async def compute(kv: sym.KV) -> None:
        nonlocal num_computed
        num_computed = await sym.aio.kv_write(kv, prefix) if prefix else 0

    if name:
        return await sym.aio.kv_open_or_compute(name, compute), num_computed
    kv = await sym.aio.kv_create()
    await compute(kv)
    return kv, num_computed


async def prompts(work: dict[str, Any]) -> list[Answer]:
    """Complete all prompts concurrently, each in a fork of the prefix. With a schema, answers follow its grammar."""
    grammar = sym.Grammar.json(work["schema"], compact=True) if "schema" in work else None
    answers: list[Answer] = []

    async def complete(prompt: list[int]) -> None:
        asked_s, length = time.monotonic(), work["num_tokens"]
        async with await sym.aio.kv_fork(base) as kv:
            if grammar:
                generation = await sym.aio.generate(kv, prompt, max_tokens=length, grammar=grammar)
            else:
                generation = await sym.aio.generate(kv, prompt, max_tokens=length, stop_at_end=False)
            answers.append(await timed(generation, asked_s))

    base, _ = await beginning(work.get("prefix", []), work.get("name", ""))
    async with base, anyio.create_task_group() as tasks:
        for prompt in work["prompts"]:
            tasks.start_soon(complete, prompt)
    return answers


async def session(work: dict[str, Any]) -> list[Answer]:
    """Run a session in one file, with pauses between turns. The daemon decides which pages stay in memory."""
    answers: list[Answer] = []
    await anyio.sleep(work["begin_s"])
    base, _ = await beginning(work["prefix"], work["name"])
    async with base, await sym.aio.kv_fork(base) as kv:
        pending: list[int] = []
        for number, turn in enumerate(work["turns"]):
            tokens, asked_s = [*pending, *turn["say"]], time.monotonic()
            generation = await sym.aio.generate(kv, tokens, max_tokens=work["num_tokens"], stop_at_end=False)
            label = work["label"] if number or not work["label"] else f"{work['label']} begins"
            answer = await timed(generation, asked_s)
            answers.append(answer | {"label": label})
            pending = generation.pending
            await anyio.sleep(turn["pause_s"] - work["typing_s"])
            if work["typing_s"]:  # the person types: the next turn will need the context
                await sym.aio.kv_advise(kv, sym.WILLNEED)
                await anyio.sleep(work["typing_s"])
    return answers


async def rag(work: dict[str, Any]) -> list[Answer]:
    """Answer questions about documents. With `keeps`, each document is computed once. Otherwise each question computes
    its document again.
    """
    answers: list[Answer] = []

    async def client(questions: list[dict[str, Any]], label: str) -> None:
        for question in questions:
            asked_s, tokens = time.monotonic(), question["question"]
            base, num_computed = await beginning(*documents[question["document"]])
            async with base:
                kv = await sym.aio.kv_fork(base)
            async with kv:
                generation = await sym.aio.generate(kv, tokens, max_tokens=work["num_tokens"], stop_at_end=False)
                answer = await timed(generation, asked_s)
            answers.append(answer | {"label": label, "computed": num_computed + len(tokens)})

    keeps, name = work["keeps"], work["name"]
    documents = [(each, f"{name}-{number}.kv" if keeps else "") for number, each in enumerate(work["documents"])]
    if keeps:  # computes all documents first, as an indexer would
        for each in documents:
            (await beginning(*each))[0].close()
    count = work["num_clients"]
    for label in ("warm", "questions"):
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(client, work[label][number::count], label)
    return answers


async def main() -> None:
    await sym.aio.connect()
    give(await {"prompts": prompts, "session": session, "rag": rag}[sys.argv[1]](take()))


anyio.run(main)
