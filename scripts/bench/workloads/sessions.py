"""Sessions that pause: agents wait for tools, people for themselves; and a crowd of which memory holds a tenth.

Each session is a program of its own: it appends some tokens, generates, and pauses, some turns long. A client sends the
whole context each time.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from kinds import Job, Words, scaled
from openai_client import Prompt, Server
from programs.work import Answer


@dataclass(frozen=True, slots=True)
class Sessions:
    """Some that are alike."""

    label: str
    count: int
    start_tokens: int
    num_turns: int
    say_tokens: int
    num_tokens: int
    pauses_s: tuple[float, float]
    """The least and the most."""
    begin_within_s: float
    """They begin one after the other, over so long."""
    typing_s: float = 0.0
    """So long before the end of a pause it shows, as when a person types."""


AGENTS = Sessions("agent", 8, 700, 6, 64, 24, (0.1, 0.6), 25.0)
PEOPLE = Sessions("person", 12, 1000, 4, 24, 32, (4.0, 12.0), 15.0, typing_s=1.5)
REGULAR = Sessions("regular", 16, 480, 7, 16, 16, (4.0, 5.0), 12.0)
CROWD = Sessions("crowd", 64, 512, 5, 16, 16, (0.0, 0.1), 0.0)


def jobs(scale: float, words: Words, *kinds: Sessions, haste: float = 1.0) -> list[Job]:
    """`haste`: pauses are shorter by that factor."""
    rng = random.Random(words.seed)
    found = []
    for kind in kinds:
        for _ in range(scaled(kind.count, scale)):
            sizes = [kind.start_tokens, *[kind.say_tokens] * (kind.num_turns - 1)]
            turns = [{"say": words.take(size), "pause_s": rng.uniform(*kind.pauses_s) / haste} for size in sizes]
            begin_s = rng.uniform(0.0, kind.begin_within_s) / haste
            work = {"label": kind.label, "begin_s": begin_s, "turns": turns, "num_tokens": kind.num_tokens}
            work["typing_s"] = kind.typing_s / haste
            found.append(Job("sessions", work, kind.num_turns * kind.num_tokens))
    return found


def kv_tokens(jobs: list[Job]) -> int:
    """That all sessions have in the end."""
    return sum(job.num_tokens + sum(len(turn["say"]) for turn in job.work["turns"]) for job in jobs)


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    await asyncio.sleep(work["begin_s"])
    prompt: Prompt = []
    answers: list[Answer] = []
    for number, turn in enumerate(work["turns"]):
        prompt = [*prompt, *turn["say"]]
        answer = await server.complete(prompt, work["num_tokens"])
        answers.append(answer | {"label": work["label"] if number else f"{work['label']} begins"})
        prompt = [*prompt, *server.continuation(answer)]
        await asyncio.sleep(turn["pause_s"])
    return answers
