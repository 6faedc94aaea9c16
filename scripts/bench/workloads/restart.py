"""A conversation of 7,000 tokens after a restart, from disk, beside computing it again. Each says what it computed.

Symphony is started again on its state, or is told to put the file on disk; llama.cpp restores a slot that it saved to a
file; vLLM, whose cache is gone with it, gets a text that it has not seen.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from kinds import Words
from openai_client import Prompt, Server
from policies import Daemon, policed
from programs.work import Answer

import libsym as sym

ROOT = Path(__file__).resolve().parents[3]
NUM_TOKENS = 7000
NAME = "history.kv"
TIER = b"user.kv.tier"


def first_token(kv: sym.KV, tokens: list[int], asked_s: float) -> Answer:
    generation = sym.generate(kv, tokens, max_tokens=2, stop_at_end=False)
    came = [(token, time.monotonic()) for token in generation]
    return Answer(tokens=[token for token, _ in came], asked_s=asked_s, came_s=[at for _, at in came])


def computed_by(daemon: Daemon, answer: Answer, before: int) -> Answer:
    """The daemon's own count, without the tokens that were generated and computed in turn."""
    since = daemon.statistics()["num_tokens"] - before
    return answer | {"computed": since - (len(answer["tokens"]) - 1)}


def symphony(
    model: str, precision: str, options: tuple[str, ...], words: Words, num_tokens: int, rounds: int
) -> Iterator[tuple[str, Answer]]:
    """By way. It asserts what was computed: all tokens, or the one that is new."""
    history, more = words.take(num_tokens), words.take(1)
    with TemporaryDirectory() as directory:
        options = (*options, "--state", f"{directory}/state")
        with policed(model, ROOT, precision, *options), sym.kv_create(NAME) as kv:
            sym.kv_write(kv, history)
            sym.kv_sync(kv)
        for _ in range(rounds):
            with policed(model, ROOT, precision, *options) as daemon:
                yield "after a restart", reopened(daemon, more)
                path = daemon.attacked.mount / NAME
                if TIER.decode() in os.listxattr(path):
                    os.setxattr(path, TIER, b"disk")
                    assert os.getxattr(path, TIER) == b"disk", f"{path} is on no disk"
                    yield "put on disk", reopened(daemon, more)
                before, asked_s = daemon.statistics()["num_tokens"], time.monotonic()
                with sym.kv_create() as kv:
                    answer = computed_by(daemon, first_token(kv, words.take(num_tokens), asked_s), before)
                assert answer["computed"] == num_tokens, f"{answer['computed']} of {num_tokens} tokens were computed"
                yield "computed again", answer


def reopened(daemon: Daemon, more: list[int]) -> Answer:
    before, asked_s = daemon.statistics()["num_tokens"], time.monotonic()
    with sym.kv_open(NAME) as base, sym.kv_fork(base) as kv:
        answer = computed_by(daemon, first_token(kv, more, asked_s), before)
    assert answer["computed"] == len(more), f"{answer['computed']} tokens were computed, of which {len(more)} are new"
    return answer


async def served(url: str, words: Words, num_tokens: int, slots: Path | None) -> dict[str, Answer]:
    """By way. `slots`: where llama.cpp saves them, if it does."""
    server = Server(url, {"id_slot": 0} if slots else None)
    await server.prepare()
    history: Prompt = [*words.take(num_tokens)]
    found = {"computed again": await server.complete(history, 2)}
    if slots is not None:
        await server.post("/slots/0?action=save", {"filename": NAME})
        await server.post("/slots/0?action=erase", {})
        await server.complete([*words.take(8)], 2)  # another one was in the slot
        forget_pages(slots / NAME)
        asked_s = time.monotonic()
        await server.post("/slots/0?action=restore", {"filename": NAME})
        answer = await server.complete([*history, *words.take(1)], 2)
        found["slot restored"] = answer | {"asked_s": asked_s}
    return found


def forget_pages(path: Path) -> None:
    """It is read from the disk the next time, as after a restart of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def serve(url: str, words: Words, num_tokens: int, slots: Path | None) -> dict[str, Answer]:
    return asyncio.run(served(url, words, num_tokens, slots))
