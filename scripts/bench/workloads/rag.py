"""RAG: a service answers 4 clients from a corpus of 48 documents of 1,000 tokens, of which memory has room for some.

Each question is 16 tokens under one document, and 24 tokens come. Who is asked for is by a Pareto index. Questions that
warm up go ahead of those that count.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from kinds import Job, Words, scaled
from openai_client import Server
from popularity import Popularity
from programs.work import Answer

NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, NUM_TOKENS = 48, 1000, 16, 24
NUM_CLIENTS, NUM_WARM, NUM_QUESTIONS = 4, 12, 40


def corpus(scale: float, words: Words) -> list[list[int]]:
    return [words.take(DOCUMENT_TOKENS) for _ in range(scaled(NUM_DOCUMENTS, scale))]


def jobs(scale: float, words: Words, documents: list[list[int]], name: str, index: float) -> list[Job]:
    """`name`: of the corpus, whose files are there from one run to the next."""
    rng = random.Random(words.seed)
    popularity = Popularity(len(documents), index)

    def questions(count: int) -> list[dict[str, Any]]:
        drawn = popularity.draw(rng, count)
        return [{"document": number, "question": words.take(QUESTION_TOKENS)} for number in drawn]

    warm, counted = questions(scaled(NUM_WARM, scale)), questions(scaled(NUM_QUESTIONS, scale))
    work = {"name": name, "documents": documents, "warm": warm, "questions": counted}
    work |= {"num_clients": NUM_CLIENTS, "num_tokens": NUM_TOKENS}
    return [Job("rag", work, (len(warm) + len(counted)) * NUM_TOKENS)]


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    answers: list[Answer] = []

    async def ask(questions: list[dict[str, Any]], label: str) -> None:
        for question in questions:
            prompt = [*work["documents"][question["document"]], *question["question"]]
            answers.append(await server.complete(prompt, work["num_tokens"]) | {"label": label})

    count = work["num_clients"]
    for label in ("warm", "questions"):
        await asyncio.gather(*(ask(work[label][number::count], label) for number in range(count)))
    return answers
