"""Plain completion: 128 prompts of 64 tokens, 64 tokens each, all at once."""

from __future__ import annotations

import asyncio
from typing import Any

from kinds import Job, Words, scaled
from openai_client import Server
from programs.work import Answer

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 128, 64, 64


def jobs(scale: float, words: Words) -> list[Job]:
    prompts = [words.take(PROMPT_TOKENS) for _ in range(scaled(NUM_PROMPTS, scale))]
    return [Job("plain", {"prompts": prompts, "num_tokens": NUM_TOKENS}, len(prompts) * NUM_TOKENS)]


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    asked = [server.complete(prompt, work["num_tokens"]) for prompt in work["prompts"]]
    return list(await asyncio.gather(*asked))
