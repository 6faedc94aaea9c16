"""The programs of branching.py: streams in one process that branch (fork, `pred()`, close) or loop over `pred()`.

The argument is one JSON object with the fields of `Asked`. The process prints that it is ready and reads the time to
begin. In the end it prints its measurements from `warm_s` to `warm_s + seconds` after that time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import libsym as sym

COUNTERS = ("num_steps", "num_calls_in_steps", "step_s")
BEAM = 4
ROOM = 256
"""Tokens after which a plain loop starts again from the context, so that fast and slow streams read similar lengths."""


@dataclass(frozen=True, slots=True)
class Asked:
    way: str
    num_streams: int
    context: int
    warm_s: float
    seconds: float


@dataclass(slots=True)
class Stream:
    """The calls that one thread or task makes, with their durations."""

    asked: Asked
    since_s: float
    number: int
    num: int = 0
    took_s: dict[str, list[float]] = field(default_factory=lambda: {"fork": [], "pred": [], "close": []})

    @property
    def until_s(self) -> float:
        return self.since_s + self.asked.warm_s + self.asked.seconds

    def count(self, num: int, **took_s: float) -> None:
        if not self.asked.warm_s <= time.monotonic() - self.since_s < self.asked.warm_s + self.asked.seconds:
            return
        self.num += num
        for name, each_s in took_s.items():
            self.took_s[name].append(each_s)


class Found(NamedTuple):
    streams: list[Stream]
    spent_s: float
    """Processor time of this process in the measured window."""
    grown: dict[str, float]
    """Growth of the daemon's counters in the measured window."""


def plain(stream: Stream, base: sym.KV) -> None:
    """Loop over `pred()`."""
    while time.monotonic() < stream.until_s:
        with sym.kv_fork(base) as kv:
            token = 1 + stream.number
            for _ in range(ROOM):
                began_s = time.monotonic()
                token = sym.pred(kv, [token]).argmax()
                ended_s = time.monotonic()
                stream.count(1, pred=ended_s - began_s)
                if ended_s > stream.until_s:
                    return


def branch(stream: Stream, base: sym.KV) -> None:
    token = 1 + stream.number
    while (began_s := time.monotonic()) < stream.until_s:
        kv = sym.kv_fork(base)
        forked_s = time.monotonic()
        token = sym.pred(kv, [token]).argmax()
        answered_s = time.monotonic()
        kv.close()
        ended_s = time.monotonic()
        stream.count(1, fork=forked_s - began_s, pred=answered_s - forked_s, close=ended_s - answered_s)


def beam(stream: Stream, base: sym.KV, *, top_k: int | None = None) -> None:
    """Extend four branches by one token in one call. With `top_k` the call returns a few numbers instead of rows."""
    token = 1 + stream.number
    while (began_s := time.monotonic()) < stream.until_s:
        files = [sym.kv_fork(base) for _ in range(BEAM)]
        forked_s = time.monotonic()
        dists = sym.pred_batch([sym.Pred(kv, [(token + number) % 200], top_k=top_k) for number, kv in enumerate(files)])
        token = dists[0].argmax()
        answered_s = time.monotonic()
        for kv in files:
            kv.close()
        ended_s = time.monotonic()
        stream.count(BEAM, fork=forked_s - began_s, pred=answered_s - forked_s, close=ended_s - answered_s)


async def task_plain(stream: Stream, base: sym.KV) -> None:
    while time.monotonic() < stream.until_s:
        async with await sym.aio.kv_fork(base) as kv:
            token = 1 + stream.number
            for _ in range(ROOM):
                began_s = time.monotonic()
                token = (await sym.aio.pred(kv, [token])).argmax()
                ended_s = time.monotonic()
                stream.count(1, pred=ended_s - began_s)
                if ended_s > stream.until_s:
                    return


async def task_branch(stream: Stream, base: sym.KV) -> None:
    token = 1 + stream.number
    while (began_s := time.monotonic()) < stream.until_s:
        async with await sym.aio.kv_fork(base) as kv:  # nothing waits for the close
            forked_s = time.monotonic()
            token = (await sym.aio.pred(kv, [token])).argmax()
            answered_s = time.monotonic()
        stream.count(1, fork=forked_s - began_s, pred=answered_s - forked_s)


THREADS: dict[str, Callable[[Stream, sym.KV], None]] = {
    "plain": plain,
    "branch": branch,
    "beam": beam,
    "beam, numbers": partial(beam, top_k=8),
}
TASKS = {"task_plain": task_plain, "task_branch": task_branch}


def begin() -> float:
    """Print that this process has connected, and return the time at which all processes begin."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def window(asked: Asked, since_s: float) -> tuple[float, float]:
    """Return the two times at which the daemon's counters are read. All streams run at both times."""
    return since_s + asked.warm_s, since_s + asked.warm_s + 0.9 * asked.seconds


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in COUNTERS}


def by_threads(asked: Asked) -> Found:
    with sym.kv_create() as base:
        sym.kv_write(base, [1 + number % 200 for number in range(asked.context)])
        since_s = begin()
        streams = [Stream(asked, since_s, number) for number in range(asked.num_streams)]
        threads = [threading.Thread(target=THREADS[asked.way], args=(stream, base)) for stream in streams]
        first_s, last_s = window(asked, since_s)
        time.sleep(max(0.0, since_s - time.monotonic()))
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, first_s - time.monotonic()))
        before, spent_s = sym.daemon_stat(), time.process_time()
        time.sleep(max(0.0, last_s - time.monotonic()))
        after, spent_s = sym.daemon_stat(), time.process_time() - spent_s
        for thread in threads:
            thread.join()
    return Found(streams, spent_s, grown(before, after))


async def by_tasks(asked: Asked) -> Found:
    async with await sym.aio.kv_create() as base:
        await sym.aio.kv_write(base, [1 + number % 200 for number in range(asked.context)])
        since_s = begin()
        streams = [Stream(asked, since_s, number) for number in range(asked.num_streams)]
        tasks = [asyncio.create_task(TASKS[asked.way](stream, base)) for stream in streams]
        first_s, last_s = window(asked, since_s)
        await asyncio.sleep(max(0.0, first_s - time.monotonic()))
        before, spent_s = await sym.aio.daemon_stat(), time.process_time()
        await asyncio.sleep(max(0.0, last_s - time.monotonic()))
        after, spent_s = await sym.aio.daemon_stat(), time.process_time() - spent_s
        await asyncio.gather(*tasks)
    return Found(streams, spent_s, grown(before, after))


def main() -> None:
    asked = Asked(**json.loads(sys.argv[1]))
    found = asyncio.run(by_tasks(asked)) if asked.way in TASKS else by_threads(asked)
    took_s = {
        name: [each for stream in found.streams for each in stream.took_s[name]] for name in found.streams[0].took_s
    }
    median_s = {name: statistics.median(each) for name, each in took_s.items() if each}
    num = sum(stream.num for stream in found.streams)
    print(json.dumps({"num": num, "median_s": median_s, "processor_s": found.spent_s, "grown": found.grown}))


if __name__ == "__main__":
    main()
