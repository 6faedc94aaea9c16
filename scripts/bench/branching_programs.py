"""The programs of branching.py: streams of one process that fork a context, call `pred()` and close, or go on plainly.

Arguments are one JSON object, the fields of `Asked`. The process says that it is ready, reads when to begin, and prints
what it found between `warm_s` and `warm_s + seconds` after that.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libsym as sym

COUNTERS = ("num_steps", "num_calls_in_steps", "step_s")
ROOM = 256
"""A plain loop goes back to the context after so many tokens: streams of all rates read contexts of one length."""


@dataclass(frozen=True, slots=True)
class Asked:
    way: str
    num_streams: int
    context: int
    warm_s: float
    seconds: float
    think_s: float = 0.0


@dataclass(slots=True)
class Stream:
    """A thread or a task: its calls, and how long they took."""

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
    """Processor time of this process, in the window."""
    grown: dict[str, float]
    """Counts of the daemon, in the window."""


def plain(stream: Stream, base: sym.KV) -> None:
    """A loop over `pred()`, that thinks between two calls if it was asked to."""
    rng = random.Random(stream.number)
    while time.monotonic() < stream.until_s:
        with sym.kv_fork(base) as kv:
            token = 1 + stream.number
            for _ in range(ROOM):
                began_s = time.monotonic()
                token = sym.pred(kv, [token]).argmax()
                ended_s = time.monotonic()
                stream.count(1, pred=ended_s - began_s)
                if stream.asked.think_s:
                    time.sleep(stream.asked.think_s * rng.uniform(0.5, 1.5))
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


def ahead(stream: Stream, base: sym.KV) -> None:
    """Sixteen forks, and then a `pred()` on each of them; only these count."""
    while time.monotonic() < stream.until_s:
        files = [sym.kv_fork(base) for _ in range(16)]
        for number, kv in enumerate(files):
            began_s = time.monotonic()
            sym.pred(kv, [1 + number]).argmax()
            stream.count(1, pred=time.monotonic() - began_s)
        for kv in files:
            kv.close()


def streamed(stream: Stream, base: sym.KV) -> None:
    """Generations, of which the daemon chooses the tokens."""
    while time.monotonic() < stream.until_s:
        with sym.kv_fork(base) as kv, sym.generate(kv, [1 + stream.number], stop_at_end=False, max_tokens=ROOM) as come:
            for _ in come:
                stream.count(1)
                if time.monotonic() > stream.until_s:
                    return


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
        async with await sym.aio.kv_fork(base) as kv:  # whose close is not waited for
            forked_s = time.monotonic()
            token = (await sym.aio.pred(kv, [token])).argmax()
            answered_s = time.monotonic()
        stream.count(1, fork=forked_s - began_s, pred=answered_s - forked_s)


THREADS: dict[str, Callable[[Stream, sym.KV], None]] = {
    "plain": plain,
    "branch": branch,
    "ahead": ahead,
    "streamed": streamed,
}
TASKS = {"task_plain": task_plain, "task_branch": task_branch}


def begin() -> float:
    """Say that this process has connected, and return when all begin."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def window(asked: Asked, since_s: float) -> tuple[float, float]:
    """When the counts of the daemon are looked at, both while all streams run."""
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
