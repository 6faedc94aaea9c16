"""The workloads of compare.py as jobs. `scale` multiplies the number of sequences, never their lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from work import Job, Words

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
"""Schema of answers. Its 40 items are more than 400 tokens, so no answer ends before its limit of tokens."""


def scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))


def prompts(words: Words, count: int, length: int, num_tokens: int, **more: Any) -> list[Job]:
    """Make one job that completes `count` prompts side by side. own_programs.py describes the other arguments."""
    work = {"prompts": [words.take(length) for _ in range(count)], "num_tokens": num_tokens}
    return [Job("prompts", work | more, count * num_tokens)]


def plain(scale: float, words: Words) -> list[Job]:
    """Make prompts of 64 tokens, with answers of 64 tokens."""
    return prompts(words, scaled(128, scale), 64, 64)


def shared(scale: float, words: Words) -> list[Job]:
    """Make questions of 32 tokens after a common prefix of 512 tokens, whose KV is a file."""
    return prompts(words, scaled(64, scale), 32, 64, prefix=words.take(512), name=f"system-{words.seed}.kv")


def branches(scale: float, words: Words) -> list[Job]:
    """Make branches of a text of 2,000 tokens, each with a prompt of 16 tokens and an answer of 64."""
    return prompts(words, scaled(32, scale), 16, 64, prefix=words.take(2000), name="")


def structured(scale: float, words: Words) -> list[Job]:
    """Make prompts whose answers are JSON by a schema, 64 tokens each."""
    return prompts(words, scaled(32, scale), 64, 64, schema=SCHEMA)


def react(scale: float, words: Words) -> list[Job]:
    """Make agents with a common system prompt. Each calls a tool eight times, and the tool takes 100 ms."""
    system = {"prefix": words.take(256), "name": f"agents-{words.seed}.kv", "num_tokens": 16}
    found = []
    for _ in range(scaled(64, scale)):
        turns = [{"say": words.take(length), "pause_s": 0.1} for length in (64, *[16] * 8)]
        found.append(Job("session", system | {"begin_s": 0.0, "typing_s": 0.0, "label": "", "turns": turns}, 9 * 16))
    return found


def mix(scale: float, words: Words) -> list[Job]:
    """Make a third of the jobs of every other workload, to run concurrently."""
    return [job for each in (plain, shared, branches, react, structured) for job in each(scale / 3, words)]


# Workloads that need more KV than memory holds


@dataclass(frozen=True, slots=True)
class Sessions:
    """A group of similar sessions, with pauses for a tool or a person."""

    label: str
    count: int
    start_tokens: int
    num_turns: int
    say_tokens: int
    num_tokens: int
    pauses_s: tuple[float, float]
    """Shortest and longest pause."""
    begin_within_s: float
    typing_s: float = 0.0
    """Time from the moment when the program knows of the next turn, since a person types, to the end of the pause."""


AGENTS = Sessions("agent", 8, 700, 6, 64, 24, (0.1, 0.6), 25.0)
PEOPLE = Sessions("person", 12, 1000, 4, 24, 32, (4.0, 12.0), 15.0, typing_s=1.5)
CROWD = Sessions("crowd", 64, 512, 5, 16, 16, (0.0, 0.1), 0.0)


def sessions(scale: float, groups: tuple[Sessions, ...], haste: float, words: Words) -> list[Job]:
    """Make sessions whose pauses are divided by `haste`."""
    rng = random.Random(words.seed)
    found = []
    for group in groups:
        for _ in range(scaled(group.count, scale)):
            sizes = [group.start_tokens, *[group.say_tokens] * (group.num_turns - 1)]
            turns = [{"say": words.take(size), "pause_s": rng.uniform(*group.pauses_s) / haste} for size in sizes]
            work = {"label": group.label, "turns": turns, "num_tokens": group.num_tokens, "prefix": [], "name": ""}
            work |= {"begin_s": rng.uniform(0.0, group.begin_within_s) / haste, "typing_s": group.typing_s / haste}
            found.append(Job("session", work, group.num_turns * group.num_tokens))
    return found


def kv_tokens(jobs: list[Job]) -> int:
    """Return the number of entries that all sessions have together at their ends."""
    return sum(job.num_tokens + sum(len(turn["say"]) for turn in job.work["turns"]) for job in jobs)


def corpus(scale: float, words: Words) -> list[list[int]]:
    return [words.take(1000) for _ in range(scaled(48, scale))]


def rag(scale: float, words: Words, documents: list[list[int]], name: str, index: float) -> list[Job]:
    """Make questions of 4 clients about documents. `name` is the name of the corpus, whose files outlive a run.

    The number of questions about the document of rank r is in proportion to r^(-1/index). An index of 3 is nearly flat,
    1 is Zipf's law, and with 0.5 the first of 48 documents gets six of ten questions. Warm-up questions run before
    those that count.
    """
    rng = random.Random(words.seed)
    ranks = range(len(documents))
    counts = {"warm": scaled(12, scale), "questions": scaled(40, scale)}
    work: dict[str, Any] = {"name": name, "documents": documents, "num_clients": 4, "num_tokens": 24}
    for label, count in counts.items():
        drawn = rng.choices(ranks, [(rank + 1) ** (-1 / index) for rank in ranks], k=count)
        work[label] = [{"document": number, "question": words.take(16)} for number in drawn]
    return [Job("rag", work, sum(counts.values()) * 24)]
