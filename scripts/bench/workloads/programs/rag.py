"""A service that answers questions under documents, for several clients at once; and who decides which KV stays.

`keeps`: "none": a document is computed for each question. "daemon": documents are files, computed once, and the daemon
decides where they are. "pinned": the same, but those that are asked for most are pinned in memory. "own": without
files, the program keeps what is asked for most, as far as memory goes, and computes the rest for each question.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import anyio
from work import Answer, give, take, timed

import libsym as sym

PAGE_TOKENS = 32
"""The last page of a file may be nearly empty."""


class Library:
    """The documents and their KV."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._name: str = work["name"]
        self._documents: list[list[int]] = work["documents"]
        self._keeps: str = work["keeps"]
        self.has_files = self._keeps in ("daemon", "pinned")
        each = max(map(len, self._documents)) + PAGE_TOKENS
        self._num_kept: int = work["pin_tokens" if self._keeps == "pinned" else "room_tokens"] // each
        self._num_asked = Counter[int]()
        self._kept: dict[int, sym.KV] = {}
        self._pinned: set[int] = set()
        self._pinning = anyio.Lock()
        self._locks = [anyio.Lock() for _ in self._documents]

    async def fork(self, number: int) -> tuple[sym.KV, int]:
        """A file that begins with the document, for one question; and how many tokens were computed for it."""
        self._num_asked[number] += 1
        if self.has_files:
            base, num_computed = await self.open(number)
            async with base:
                kv = await sym.aio.kv_fork(base)
            if self._keeps == "pinned":
                await self._pin()
            return kv, num_computed
        if self._keeps == "own" and number in self._favourites():
            return await self._fork_kept(number)
        return await self._computed(number), len(self._documents[number])

    async def open(self, number: int) -> tuple[sym.KV, int]:
        num_computed = 0

        async def compute(kv: sym.KV) -> None:
            nonlocal num_computed
            num_computed = await sym.aio.kv_write(kv, self._documents[number])

        return await sym.aio.kv_open_or_compute(self._path(number), compute), num_computed

    def _path(self, number: int) -> str:
        return f"{self._name}-{number}.kv"

    async def _computed(self, number: int) -> sym.KV:
        kv = await sym.aio.kv_create()
        await sym.aio.kv_write(kv, self._documents[number])
        return kv

    def _favourites(self) -> set[int]:
        """What is asked for most; a document that was asked for once is none yet."""
        return {number for number, count in self._num_asked.most_common(self._num_kept) if count > 1}

    async def _fork_kept(self, number: int) -> tuple[sym.KV, int]:
        """A favourite's KV stays. It takes the place of what is none any more."""
        async with self._locks[number]:
            num_computed = 0
            if number not in self._kept:
                for other in self._kept.keys() - self._favourites():
                    self._kept.pop(other).close()
                self._kept[number] = await self._computed(number)
                num_computed = len(self._documents[number])
            return await sym.aio.kv_fork(self._kept[number]), num_computed

    async def _pin(self) -> None:
        """What falls out first, for no more than some may be pinned."""
        async with self._pinning:
            before, self._pinned = self._pinned, self._favourites()
            for number in before - self._pinned:
                await sym.aio.kv_advise(self._path(number), sym.UNPIN, sym.COLD)
            for number in self._pinned - before:
                await sym.aio.kv_advise(self._path(number), sym.PIN)

    async def close(self) -> None:
        for number in self._pinned:
            await sym.aio.kv_advise(self._path(number), sym.UNPIN)


async def main() -> None:
    await sym.aio.connect()
    work = take()
    library = Library(work)
    answers: list[Answer] = []

    async def client(questions: list[dict[str, Any]], label: str) -> None:
        for question in questions:
            asked_s = time.monotonic()
            kv, num_computed = await library.fork(question["document"])
            async with kv:
                tokens = question["question"]
                generation = await sym.aio.generate(kv, tokens, max_tokens=work["num_tokens"], stop_at_end=False)
                answer = await timed(generation, asked_s)
            answers.append(answer | {"label": label, "computed": num_computed + len(tokens)})

    if library.has_files:  # as when a corpus is indexed
        for number in range(len(work["documents"])):
            (await library.open(number))[0].close()
    count = work["num_clients"]
    for label in ("warm", "questions"):
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(client, work[label][number::count], label)
    await library.close()
    give(answers)


anyio.run(main)
