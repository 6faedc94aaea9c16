"""The programs of steps.py: a process that forks others, each with its own connection, and hands their findings over.

A line of JSON is a crew: a list of members, each `{"way": NAME, ...}`, with a uid if it is to be another user's. When
all have connected they begin together. Each gives what its function returns, and how often its threads slept.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import anyio

import libsym as sym

Found = dict[str, Any]
OVER = mmap.mmap(-1, 1)
"""Shared by all members: set when those that the crew is about have ended."""
_STREAM_TOKENS = 64


def is_over() -> bool:
    return OVER[0] != 0


def timed(tokens: Iterable[int]) -> Found:
    found, came_s = [], []
    for token in tokens:
        found.append(token)
        came_s.append(time.monotonic())
    return {"tokens": found, "came_s": came_s}


def by_pred(prompt: list[int], num_tokens: int) -> Found:
    def loop() -> Iterable[int]:
        with sym.kv_create() as kv:
            tokens = prompt
            for _ in range(num_tokens):
                tokens = [sym.pred(kv, tokens).argmax()]
                yield tokens[0]

    return timed(loop())


def by_generate(prompt: list[int], num_tokens: int, stop: list[str] | None = None) -> Found:
    with sym.kv_create() as kv:
        return timed(sym.generate(kv, prompt, max_tokens=num_tokens, stop=stop or (), stop_at_end=False))


def by_grammar(prompt: list[int], num_tokens: int, schema: str) -> Found:
    with sym.kv_create() as kv:
        grammar = sym.Grammar.json(schema, compact=True)
        return timed(sym.generate(kv, prompt, max_tokens=num_tokens, grammar=grammar))


def decode_until_over(prompt: list[int], limit_s: float) -> Found:
    """Decodes as long as others do what it is about, or so many seconds."""
    came_s: list[float] = []
    until_s = time.monotonic() + limit_s
    while True:
        with sym.kv_create() as kv, sym.generate(kv, prompt, max_tokens=2000, stop_at_end=False) as generation:
            for _ in generation:
                came_s.append(time.monotonic())
                if is_over() or came_s[-1] > until_s:
                    return {"came_s": came_s}


def prefill(tokens: list[int], count: int, after_s: float) -> Found:
    """Back to back, each into a new file; then all is over."""
    time.sleep(after_s)
    spans_s = []
    for number in range(count):
        with sym.kv_create() as kv:
            began_s = time.monotonic()
            sym.kv_write(kv, [tokens[number % len(tokens)], *tokens[1:]])
            spans_s.append((began_s, time.monotonic()))
    OVER[0] = 1
    return {"spans_s": spans_s}


def agent(prompt: list[int], num_calls: int, tool_s: float, num_tokens: int) -> Found:
    """Thinks, calls a tool, thinks on."""
    came_s: list[float] = []
    with sym.kv_create() as kv:
        tokens = prompt
        for _ in range(num_calls + 1):
            generation = sym.generate(kv, tokens, max_tokens=num_tokens, stop_at_end=False)
            came_s += timed(generation)["came_s"]
            time.sleep(tool_s)
            tokens = [*generation.pending, *prompt[:16]]
    return {"came_s": came_s}


def masked(prompt: list[int], num_tokens: int) -> Found:
    """A loop over pred() that does not see the second half of its prompt."""
    came_s = []
    hidden = range(len(prompt) // 2, len(prompt))
    with sym.kv_create() as kv:
        tokens, length = prompt, 0
        for _ in range(num_tokens):
            length += len(tokens)
            rows = [
                [index not in hidden or index == row for index in range(length)] for row in own_rows(tokens, length)
            ]
            tokens = [sym.pred(kv, tokens, mask=rows).argmax()]
            came_s.append(time.monotonic())
    return {"came_s": came_s}


def own_rows(tokens: list[int], length: int) -> range:
    return range(length - len(tokens), length)


def decode_for(prompt: list[int], num_streams: int, seconds: float) -> Found:
    """Many generations at once, each begun anew when it ends; when their tokens came, coarsely."""
    came_s: list[float] = []

    async def stream(until_s: float) -> None:
        while time.monotonic() < until_s:
            async with await sym.aio.kv_create() as kv:
                generation = await sym.aio.generate(kv, prompt, max_tokens=_STREAM_TOKENS, stop_at_end=False)
                async for _ in generation:
                    came_s.append(time.monotonic())
                    if came_s[-1] > until_s:
                        await generation.cancel()
                        return

    async def main() -> None:
        await sym.aio.connect()
        until_s = time.monotonic() + seconds
        async with anyio.create_task_group() as tasks:
            for _ in range(num_streams):
                tasks.start_soon(stream, until_s)

    sym.close()  # the loop has a connection of its own
    anyio.run(main)
    return {"came_s": came_s}


def prefill_for(tokens: list[int], num_streams: int, seconds: float) -> Found:
    """Prefills of so many tokens, so many at once."""
    ended_s: list[float] = []

    async def stream(until_s: float) -> None:
        while time.monotonic() < until_s:
            async with await sym.aio.kv_create() as kv:
                await sym.aio.kv_write(kv, tokens)
                ended_s.append(time.monotonic())

    async def main() -> None:
        await sym.aio.connect()
        until_s = time.monotonic() + seconds
        async with anyio.create_task_group() as tasks:
            for _ in range(num_streams):
                tasks.start_soon(stream, until_s)

    sym.close()
    anyio.run(main)
    return {"ended_s": ended_s}


WAYS: dict[str, Callable[..., Found]] = {
    "pred": by_pred,
    "generate": by_generate,
    "grammar": by_grammar,
    "decode_until_over": decode_until_over,
    "prefill": prefill,
    "agent": agent,
    "masked": masked,
    "decode_for": decode_for,
    "prefill_for": prefill_for,
}


def run_member(member: dict[str, Any], ready: int, go: int, output: int) -> None:
    """In a child. `go` is at its end when all are ready."""
    uid = member.pop("uid", 0)
    if uid:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    sym.connect()
    os.write(ready, b".")
    os.close(ready)
    os.read(go, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    found = WAYS[member.pop("way")](**member)
    found["wakeups"] = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    with os.fdopen(output, "w") as file:
        json.dump(found, file)


def run_crew(members: list[dict[str, Any]]) -> dict[str, Any]:
    OVER[0] = 0
    ready, ready_end = os.pipe()
    go, go_end = os.pipe()
    outputs = []
    for member in members:
        output, output_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(go_end)
                run_member(member, ready_end, go, output_end)
                os._exit(0)
            finally:  # whatever failed: this process goes no further than its part
                traceback.print_exc()
                os._exit(1)
        os.close(output_end)
        outputs.append((pid, output))
    os.close(ready_end)
    os.close(go)
    num_ready = 0
    while num_ready < len(members):
        dots = os.read(ready, 4096)
        if not dots:
            raise SystemExit("a member of the crew did not start")
        num_ready += len(dots)
    began_s = time.monotonic()
    os.close(go_end)
    found = []
    for pid, output in outputs:
        with os.fdopen(output) as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"a member of the crew failed with status {status}")
        found.append(json.loads(text))
    os.close(ready)
    return {"began_s": began_s, "members": found}


async def nothing() -> None:
    """Brings every module in: another user may not be able to read where they are."""
    assert sym.aio.generate


def main() -> None:
    anyio.run(nothing)
    for line in sys.stdin:
        print(json.dumps(run_crew(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
