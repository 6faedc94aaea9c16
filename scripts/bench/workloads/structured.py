"""JSON of a schema: 32 prompts of 64 tokens, 64 tokens each; the array that is asked for is longer than that."""

from __future__ import annotations

import asyncio
from typing import Any

from kinds import Job, Words, scaled
from openai_client import Server
from programs.work import Answer

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 32, 64, 64
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["animal", "plant", "mineral"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "known": {"type": "boolean"},
    },
    "required": ["name", "kind", "size", "known"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 40, "maxItems": 60}
"""40 of these are more than 400 tokens, so that no answer is over before its count of tokens is."""


def jobs(scale: float, words: Words) -> list[Job]:
    prompts = [words.take(PROMPT_TOKENS) for _ in range(scaled(NUM_PROMPTS, scale))]
    work = {"prompts": prompts, "schema": SCHEMA, "num_tokens": NUM_TOKENS}
    return [Job("structured", work, len(prompts) * NUM_TOKENS)]


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    asked = [server.complete(prompt, work["num_tokens"], schema=work["schema"]) for prompt in work["prompts"]]
    return list(await asyncio.gather(*asked))
