"""A shared system prompt: 64 questions of 32 tokens under 512 tokens that are the same, 64 tokens each."""

from __future__ import annotations

from typing import Any

from kinds import Job, Words, scaled
from openai_client import Server
from programs.work import Answer

SYSTEM_TOKENS, NUM_QUESTIONS, QUESTION_TOKENS, NUM_TOKENS = 512, 64, 32, 64


def jobs(scale: float, words: Words) -> list[Job]:
    questions = [words.take(QUESTION_TOKENS) for _ in range(scaled(NUM_QUESTIONS, scale))]
    work = {"name": f"system-{words.seed}.kv", "system": words.take(SYSTEM_TOKENS), "questions": questions}
    return [Job("shared", work | {"num_tokens": NUM_TOKENS}, len(questions) * NUM_TOKENS)]


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    return await server.complete_all(work["system"], work["questions"], work["num_tokens"])
