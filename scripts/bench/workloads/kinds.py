"""What a workload is made of, for both sides: jobs. Each is a program of Symphony's, and a function of the client's."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openai_client import Server
from programs.work import Answer

Client = Callable[[Server, dict[str, Any]], Awaitable[list[Answer]]]
"""Does one job against a server."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one program does: `programs/KIND.py`, or the client of that kind."""

    kind: str
    work: dict[str, Any]
    num_tokens: int
    """That come back, of all its sequences."""


class Words:
    """Prompts: words by chance, each of which is one token, so that text and tokens say the same on any server.

    Every run has its own: nothing that an earlier one left in a cache helps.
    """

    def __init__(self, tokens: Sequence[int], seed: str) -> None:
        self._tokens = tokens
        self._rng = random.Random(seed)
        self.seed = seed

    def take(self, count: int) -> list[int]:
        return self._rng.choices(self._tokens, k=count)


def scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))
