"""Branches: a text of 2,000 tokens goes on in 32 ways, 16 tokens that are given and 64 that come."""

from __future__ import annotations

from typing import Any

from kinds import Job, Words, scaled
from openai_client import Server
from programs.work import Answer

PREFIX_TOKENS, NUM_BRANCHES, START_TOKENS, NUM_TOKENS = 2000, 32, 16, 64


def jobs(scale: float, words: Words) -> list[Job]:
    starts = [words.take(START_TOKENS) for _ in range(scaled(NUM_BRANCHES, scale))]
    work = {"prefix": words.take(PREFIX_TOKENS), "starts": starts, "num_tokens": NUM_TOKENS}
    return [Job("branches", work, len(starts) * NUM_TOKENS)]


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    return await server.complete_all(work["prefix"], work["starts"], work["num_tokens"])
