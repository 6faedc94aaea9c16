"""An editor that completes. Files of 600 tokens are typed in, edited in the middle, undone, left, opened, deleted.

After each change some tokens are completed at the end of the file, and thrown away. `events()` is what the user does;
it knows what the text is after each of them, and so both sides complete the same texts.
"""

from __future__ import annotations

import random
from typing import Any

from kinds import Job, Words, scaled
from openai_client import Server
from programs.work import Answer

NUM_FILES, FILE_TOKENS, NUM_EVENTS, TYPED_TOKENS, NUM_TOKENS = 24, 600, 120, 12, 8
BLOCK_TOKENS = 32
SHARES = {"type": 45, "edit": 12, "undo": 20, "switch": 17, "delete": 6}


def events(scale: float, words: Words) -> list[dict[str, Any]]:
    """Each: what is done, to which file, and its text then; none where it is deleted."""
    rng = random.Random(words.seed)
    names = iter(range(1 << 30))
    states: dict[int, list[list[int]]] = {}

    def new() -> int:
        name = next(names)
        states[name] = [words.take(FILE_TOKENS)]
        return name

    for _ in range(scaled(NUM_FILES, scale) + 1):
        new()
    current = 0
    found = [{"what": "open", "file": current, "text": states[current][-1]}]
    for _ in range(scaled(NUM_EVENTS, scale)):
        what = rng.choices(list(SHARES), list(SHARES.values()))[0]
        text = states[current][-1]
        if what == "undo" and len(states[current]) < 2:
            what = "type"
        if what == "type":
            states[current].append([*text, *words.take(TYPED_TOKENS)])
        elif what == "edit":
            at = rng.randrange(len(text) // 2, len(text))
            states[current].append([*text[:at], *words.take(TYPED_TOKENS), *text[at + TYPED_TOKENS :]])
        elif what == "undo":
            states[current].pop()
        else:
            if what == "delete":
                del states[current]
                found.append({"what": "delete", "file": current, "text": None})
                new()
            what, current = "switch", rng.choice([name for name in states if name != current])
        found.append({"what": what, "file": current, "text": states[current][-1]})
    return found


def jobs(scale: float, words: Words) -> list[Job]:
    done = events(scale, words)
    num_completions = sum(event["text"] is not None for event in done)
    return [Job("editor", {"events": done, "num_tokens": NUM_TOKENS}, num_completions * NUM_TOKENS)]


async def client(server: Server, work: dict[str, Any]) -> list[Answer]:
    """Sends the whole text each time; that a file was deleted, or is left, there is no way to say.

    `held` is what a server that forgets nothing would have: blocks of 32 tokens with all that was before them.
    """
    answers: list[Answer] = []
    blocks: set[tuple[int, ...]] = set()
    for event in work["events"]:
        if event["text"] is None:
            continue
        answer = await server.complete(event["text"], work["num_tokens"])
        text = event["text"]
        blocks |= {tuple(text[:end]) for end in range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS)}
        answers.append(answer | {"label": event["what"], "held": len(blocks) * BLOCK_TOKENS})
    return answers
