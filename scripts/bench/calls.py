#!/usr/bin/env python3
"""Measure the cost of system calls: empty calls, calls of a branch, and the time that `pred()` and `generate()` add to
a loop over the decoder.

    .venv/bin/python scripts/bench/calls.py [--only empty,branches,decoding] [--model smollm2] [--precision bf16]
        [--rounds 40] [--tokens 30] [--quick] [--json]

The calls are made to a whole daemon. *busy* means that another program generates all the time. The three ways to decode
(`pred()`, `generate()`, the loop) take turns, and a ratio compares turns of one round, because the machine's speed
drifts by more than the differences.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from harness import (
    Daemon,
    Row,
    arguments,
    beside,
    chosen,
    connected,
    in_turns,
    processor,
    processor_s,
    quantile,
    show_rows,
)
from plain_loop import PlainLoop

import libsym as sym
from libsym.abi import Op
from libsym.channel.process import process
from libsym.channel.scripts import Call

PROMPT = [11, 12, 13, 14]
BUSY = """
import libsym as sym
while True:
    with sym.kv_create() as kv:
        list(sym.generate(kv, [1, 2, 3], stop_at_end=False, max_tokens=2000))
"""


# Empty calls


def pings(num_threads: int, num_calls: int) -> tuple[float, float, float]:
    """Return the median and the p99 of a call in microseconds, and calls a second."""
    times_us: list[float] = []

    def ping(count: int) -> None:
        channel, own = process.channel(), []
        call = Call(Op.PING)
        for _ in range(count):
            began = time.perf_counter_ns()
            channel.perform(call)
            own.append((time.perf_counter_ns() - began) / 1000)
        times_us.extend(own)

    threads = [threading.Thread(target=ping, args=(num_calls // num_threads,)) for _ in range(num_threads)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - began_s
    return quantile(times_us, 0.5), quantile(times_us, 0.99), len(times_us) / elapsed_s


def empty_calls(daemon: Daemon, num_calls: int) -> list[Row]:
    rows = []
    for load in ("idle", "busy"):
        with beside(daemon.program(BUSY)) if load == "busy" else nullcontext():
            time.sleep(1.0 if load == "busy" else 0.0)  # the program begins
            for num_threads in (1, 8):
                before_s = processor_s(daemon.pid), time.process_time()
                p50_us, p99_us, calls_a_s = pings(num_threads, num_calls)
                used_s = processor_s(daemon.pid) - before_s[0], time.process_time() - before_s[1]
                note = f"p99 {p99_us:.1f} us, {calls_a_s:.0f} calls/s; processor time a call: "
                note += "daemon {:.1f} us, program {:.1f}".format(*(1e6 * each / num_calls for each in used_s))
                what = f"empty call, {load} daemon, {num_threads} threads"
                rows.append(Row(what, "us", [p50_us], note=note))
    return rows


# Branches


def branches(num_calls: int) -> list[Row]:
    """Measure round trips of the calls of a branch, in turns, from one thread to an idle daemon."""
    channel, times_us = process.channel(), dict[str, list[float]]()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began_ns = time.perf_counter_ns()
        yield
        times_us.setdefault(name, []).append((time.perf_counter_ns() - began_ns) / 1000)

    with sym.kv_create() as base:
        base.write(PROMPT)
        for _ in range(num_calls):
            with timed("empty"):
                channel.perform(Call(Op.PING))
            with timed("fork"):
                fork = base.fork()
            with timed("len"):
                fork.len()
            with timed("truncate"):
                fork.truncate(1)
            with timed("close"):
                fork.close()
            for count in (8, 32):
                with timed(f"fork_n({count})"):
                    forks = base.fork_n(count)
                for fork in forks:
                    fork.close()
        num_forks = 200 * num_calls
        began_s = time.perf_counter()
        for _ in range(0, num_forks, 32):
            base.fork_n(32)  # dropped at once: the next call closes the handles
        forks_s = num_forks / (time.perf_counter() - began_s)
    rows = [
        Row(f"round trip of {name}", "us", [statistics.median(each)], note=f"p99 {quantile(each, 0.99):.1f} us")
        for name, each in times_us.items()
    ]
    return [*rows, Row("fork_n(32) and closed", "forks/s", [forks_s])]


# Decoding


def by_pred(num_tokens: int) -> Iterator[int]:
    with sym.kv_create() as kv:
        tokens = PROMPT
        for _ in range(num_tokens):
            tokens = [sym.pred(kv, tokens).argmax()]
            yield tokens[0]


def by_generate(num_tokens: int) -> Iterator[int]:
    with sym.kv_create() as kv:
        yield from sym.generate(kv, PROMPT, stop_at_end=False, max_tokens=num_tokens)


def decoding(args: argparse.Namespace) -> list[Row]:
    """Measure the median time of a token in a loop over the decoder and in programs, in turns."""
    own, texts = PlainLoop(args.model, args.precision, (args.tokens + len(PROMPT)) // 32 + 2), set()

    def median_us(came_s: list[float]) -> float:
        return 1e6 * statistics.median(after - before for before, after in itertools.pairwise(came_s))

    def by_loop() -> float:
        found = own.run([PROMPT], args.tokens)
        texts.add(tuple(found["tokens"][0]))
        return median_us(found["came_s"])

    def by_program(way: Callable[[int], Iterator[int]]) -> float:
        came = [(token, time.perf_counter()) for token in way(args.tokens)]
        texts.add(tuple(token for token, _ in came))
        return median_us([at_s for _, at_s in came])

    ways: dict[str, Callable[[], float]] = {"own loop": by_loop}
    ways |= {"pred": partial(by_program, by_pred), "generate": partial(by_program, by_generate)}
    found = in_turns(ways, args.rounds)
    own.close()
    assert len(texts) == 1, "the three ways decoded different tokens"
    loop_us = found["own loop"]
    return [
        Row(f"a token by {name}", "us", each, *(("own loop", loop_us) if each is not loop_us else ()))
        for name, each in found.items()
    ]


def main() -> None:
    sizes = {"rounds": 40, "tokens": 30, "calls": (40_000, "empty calls for each row")}
    kinds = {"model": "smollm2", "precision": "bf16", "only": "empty,branches,decoding"}
    args = arguments(__doc__, **kinds, **sizes, quick=False, json=False).parse_args()
    if args.quick:
        args.model, args.precision, args.rounds, args.calls = "tiny", "float32", 1, 4_000
    parts, rows = chosen(args.only, kinds["only"].split(",")), list[Row]()
    with connected(args.model, "--precision", args.precision) as daemon:
        if "empty" in parts:
            rows += empty_calls(daemon, args.calls)
        if "branches" in parts:
            rows += branches(args.calls // 20)
        if "decoding" in parts:
            rows += decoding(args)
    show_rows(rows, f"{processor()}; {args.model}, {args.precision}", args)


if __name__ == "__main__":
    main()
