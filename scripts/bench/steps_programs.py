"""The programs of steps.py. This process forks one process for each member of a crew, and prints the members' results.

A line of JSON describes a crew: a list of members, each `{"way": NAME, ...}`. A member with a `uid` runs as that user.
Each member has its own connection, and all begin together when all have connected. The result of a member is the result
of its function, and the number of times that its threads slept.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio

import libsym as sym

Found = dict[str, Any]
OVER = mmap.mmap(-1, 1)
"""Flag that all members share. A member with prefills sets it at its end, and then endless members end."""


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


def by_generate(prompt: list[int], num_tokens: int, stop: list[str] | None = None, schema: str = "") -> Found:
    with sym.kv_create() as kv:
        if schema:
            grammar = sym.Grammar.json(schema, compact=True)
            return timed(sym.generate(kv, prompt, max_tokens=num_tokens, grammar=grammar))
        return timed(sym.generate(kv, prompt, max_tokens=num_tokens, stop=stop or (), stop_at_end=False))


def decode_until_over(prompt: list[int], limit_s: float) -> Found:
    """Decode until another member sets OVER, but no longer than `limit_s`."""
    came_s: list[float] = []
    until_s = time.monotonic() + limit_s
    while True:
        with sym.kv_create() as kv, sym.generate(kv, prompt, max_tokens=2000, stop_at_end=False) as generation:
            for _ in generation:
                came_s.append(time.monotonic())
                if OVER[0] or came_s[-1] > until_s:
                    return {"came_s": came_s}


def prefill(tokens: list[int], count: int, after_s: float) -> Found:
    """Prefill new files back to back, then set OVER."""
    time.sleep(after_s)
    came_s = []
    for number in range(count):
        with sym.kv_create() as kv:
            came_s.append(time.monotonic())
            sym.kv_write(kv, [tokens[number % len(tokens)], *tokens[1:]])
            came_s.append(time.monotonic())
    OVER[0] = 1
    return {"came_s": came_s}


def for_some_time(num_streams: int, seconds: float, one: Callable[[list[float], float], Awaitable[None]]) -> Found:
    """Run many concurrent streams, and start each stream again when it ends. Return the times of their answers."""
    came_s: list[float] = []

    async def stream(until_s: float) -> None:
        while time.monotonic() < until_s:
            await one(came_s, until_s)

    async def main() -> None:
        await sym.aio.connect()
        until_s = time.monotonic() + seconds
        async with anyio.create_task_group() as tasks:
            for _ in range(num_streams):
                tasks.start_soon(stream, until_s)

    sym.close()  # the loop has a connection of its own
    anyio.run(main)
    return {"came_s": came_s}


def decode_for(tokens: list[int], num_streams: int, seconds: float) -> Found:
    async def one(came_s: list[float], until_s: float) -> None:
        async with await sym.aio.kv_create() as kv:
            generation = await sym.aio.generate(kv, tokens, max_tokens=64, stop_at_end=False)
            async for _ in generation:
                came_s.append(time.monotonic())
                if came_s[-1] > until_s:
                    await generation.cancel()
                    return

    return for_some_time(num_streams, seconds, one)


def prefill_for(tokens: list[int], num_streams: int, seconds: float) -> Found:
    async def one(came_s: list[float], _until_s: float) -> None:
        async with await sym.aio.kv_create() as kv:
            await sym.aio.kv_write(kv, tokens)
            came_s.append(time.monotonic())

    return for_some_time(num_streams, seconds, one)


WAYS: dict[str, Callable[..., Found]] = {
    "pred": by_pred,
    "generate": by_generate,
    "decode_until_over": decode_until_over,
    "prefill": prefill,
    "decode_for": decode_for,
    "prefill_for": prefill_for,
}


def run_member(member: dict[str, Any], ready: int, go: int, output: int) -> None:
    """Run a member in a child process. The pipe `go` is closed when all members are ready."""
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
            finally:  # after any failure, the child must not run the parent's code
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
    """Import every module now, because members of other users may not be able to read the modules' files."""
    assert sym.aio.generate is not None


def main() -> None:
    anyio.run(nothing)
    for line in sys.stdin:
        print(json.dumps(run_crew(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
