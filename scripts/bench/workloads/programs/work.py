"""How the bench and a program talk: a line says that it is ready, a line brings its work, a line is its answer.

Nothing here is Symphony's. Without the bench a program is run by hand:

    echo '{"prompts": [[1, 2, 3]], "num_tokens": 8}' | symphony run scripts/bench/workloads/programs/plain.py
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, NotRequired, TypedDict


class Answer(TypedDict):
    """One sequence: its tokens, when it was asked for, and when each token came (CLOCK_MONOTONIC)."""

    tokens: list[int]
    asked_s: float
    came_s: list[float]
    text: NotRequired[str]
    """Where a server gives text alone."""
    label: NotRequired[str]
    """Which of a workload's answers it is, where they are not alike."""
    computed: NotRequired[int]
    """Tokens before the first one that came that were computed for it, where that is known."""
    held: NotRequired[int]
    """Tokens whose KV was held when it had come."""


def take() -> dict[str, Any]:
    """The work, when the bench says so. Whatever takes time at a start (imports, the connection) is before this."""
    print("ready", flush=True)
    work: dict[str, Any] = json.loads(input())
    return work


def give(answers: Iterable[Answer]) -> None:
    print(json.dumps(list(answers)), flush=True)


async def timed(generation: AsyncIterator[int], asked_s: float) -> Answer:
    tokens, came_s = [], []
    async for token in generation:
        tokens.append(token)
        came_s.append(time.monotonic())
    return Answer(tokens=tokens, asked_s=asked_s, came_s=came_s)
