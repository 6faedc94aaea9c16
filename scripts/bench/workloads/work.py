"""Jobs of the workloads, their answers, and the lines that the benchmark exchanges with a program or a client.

A process prints a line when it is ready, reads a line with its jobs, and prints a line with its answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict


class Answer(TypedDict):
    """A sequence: its tokens, the time of the request, and the time of each token (CLOCK_MONOTONIC)."""

    tokens: list[int]
    asked_s: float
    came_s: list[float]
    text: NotRequired[str]
    """Text of the answer, from a server."""
    label: NotRequired[str]
    """Kind of the answer, if a workload has several kinds."""
    computed: NotRequired[int]
    """Number of tokens computed before the first token of the answer, if known."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work of one program, or of one task of a client. `kind` names a function of own_programs.py and clients.py."""

    kind: str
    work: dict[str, Any]
    num_tokens: int
    """Number of tokens in the answers of the job."""


class Words:
    """Random words for prompts. Each word is one token, so text and tokens are equivalent on any server.

    Every run has its own seed, so that caches of earlier runs do not help.
    """

    def __init__(self, tokens: Sequence[int], seed: str) -> None:
        self._tokens = tokens
        self._rng = random.Random(seed)
        self.seed = seed

    def take(self, count: int) -> list[int]:
        return self._rng.choices(self._tokens, k=count)


def take() -> Any:
    """Wait for the jobs, and return them. A process imports modules and connects before it calls this."""
    print("ready", flush=True)
    return json.loads(input())


def give(answers: Iterable[Answer]) -> None:
    print(json.dumps(list(answers)), flush=True)
