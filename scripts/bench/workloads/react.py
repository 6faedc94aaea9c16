"""ReAct: 64 agents that think 16 tokens, call a tool of 100 ms, read 16 tokens of it, 8 times, and answer in 16.

Each agent is a program of its own; what they all begin with (256 tokens) is shared.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kinds import Job, Words, scaled
from openai_client import Prompt, Server
from programs.work import Answer

SYSTEM_TOKENS, NUM_AGENTS, TASK_TOKENS = 256, 64, 64
NUM_CALLS, TOOL_S, OBSERVATION_TOKENS, NUM_TOKENS = 8, 0.1, 16, 16


def jobs(scale: float, words: Words) -> list[Job]:
    common = {"name": f"agents-{words.seed}.kv", "system": words.take(SYSTEM_TOKENS)}
    common |= {"tool_s": TOOL_S, "num_tokens": NUM_TOKENS}
    found = []
    for _ in range(scaled(NUM_AGENTS, scale)):
        observations = [words.take(OBSERVATION_TOKENS) for _ in range(NUM_CALLS)]
        own = {"task": words.take(TASK_TOKENS), "observations": observations}
        found.append(Job("react", common | own, (NUM_CALLS + 1) * NUM_TOKENS))
    return found


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    """Sends the whole context each time, as it must; the server finds most of it in its cache."""
    prompt: Prompt = [*work["system"], *work["task"]]
    answers = []
    for observation in [*work["observations"], None]:
        answer = await server.complete(prompt, work["num_tokens"])
        answers.append(answer)
        if observation is not None:
            await asyncio.sleep(work["tool_s"])
            prompt = [*prompt, *server.continuation(answer), *observation]
    return answers
