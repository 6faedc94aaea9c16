#!/usr/bin/env python3
"""What system calls cost: an empty one, many at once, and what `pred()` and `generate()` add to a decoder's own loop.

    .venv/bin/python scripts/bench/calls.py [--model smollm2] [--precision bf16] [--rounds 40] [--tokens 30] [--json]

A real daemon on a socket of its own. *busy*: another program generates all the time. The three ways to decode take
turns, and each round's differences are from its own three: a machine drifts by more than what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import libsym as sym
from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import load_model
from decoder.model_config import KV_DTYPE
from libsym.abi import Op
from libsym.channel.process import process
from libsym.channel.scripts import Call

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [11, 12, 13, 14]
PEERS = (
    "As others measured elsewhere: Pie 0.4 adds about 320 us a token (its paper: 1,500 to 1,900); calls 10 to 300 us."
)
BUSY = """
import libsym as sym
while True:
    with sym.kv_create() as kv:
        list(sym.generate(kv, [1, 2, 3], stop_at_end=False, max_tokens=2000))
"""


@contextmanager
def daemon(model: str, precision: str) -> Iterator[tuple[str, int]]:
    """Its socket and its pid."""
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        (where / "kv").mkdir()
        socket = str(where / "socket")
        options = ["--model", model, "--precision", precision, "--socket", socket, "--state", str(where / "state")]
        command = [sys.executable, "-m", "symphony.cli", "serve", *options, "--mount", str(where / "kv")]
        served = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        )
        try:
            assert served.stdout is not None
            assert served.stdout.readline().startswith("symphony:"), "the daemon did not start"
            yield socket, served.pid
        finally:
            sym.close()
            served.terminate()
            served.wait()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@contextmanager
def busy_program(socket: str) -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", BUSY], env=environment() | {"SYMPHONY_SOCKET": socket})
    try:
        time.sleep(1.0)
        assert program.poll() is None, "the busy program has ended"
        yield
    finally:
        program.kill()
        program.wait()


# Empty calls


def cpu_s(pid: int) -> float:
    """Time on a CPU, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Of this process and its children that have ended."""
    return sum(os.times()[:4])


def python_pings(num_threads: int, num_calls: int) -> dict[str, float]:
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
    times_us.sort()
    return {
        "p50_us": times_us[len(times_us) // 2],
        "p99_us": times_us[len(times_us) * 99 // 100],
        "calls_per_s": len(times_us) / elapsed_s,
    }


def c_pings(program: Path, socket: str, num_threads: int, num_calls: int) -> dict[str, float]:
    command = [program, socket, str(num_threads), str(num_calls)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(zip(("p50_us", "p99_us", "calls_per_s"), map(float, done.stdout.split()), strict=True))


def build_ping(directory: str) -> Path:
    program = Path(directory) / "ping"
    source = Path(__file__).with_name("ping.c")
    channel = ROOT / "libsym" / "channel"
    units = [channel / "region.c", *sorted(channel.glob("client*.c"))]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", f"-I{ROOT / 'libsym'}", f"-I{channel}"]
    command = ["cc", *flags, "-o", program, source, *units, "-lpthread"]
    subprocess.run(command, check=True)
    return program


def empty_calls(socket: str, pid: int, program: Path, num_calls: int) -> list[dict[str, Any]]:
    sym.connect(socket)
    ways = {"Python": python_pings, "C": partial(c_pings, program, socket)}
    rows: list[dict[str, Any]] = []
    for load in ("idle", "busy"):
        with busy_program(socket) if load == "busy" else nullcontext():
            for num_threads in (1, 8):
                for name, way in ways.items():
                    before = cpu_s(pid), own_cpu_s()
                    numbers = way(num_threads, num_calls)
                    used_us = [(cpu_s(pid) - before[0]) * 1e6, (own_cpu_s() - before[1]) * 1e6]
                    cpu = dict(zip(("daemon_us", "program_us"), (each / num_calls for each in used_us), strict=True))
                    rows.append({"from": name, "daemon": load, "threads": num_threads, **numbers, **cpu})
    return rows


# Decoding


class OwnLoop:
    """What there is without programs: a decoder, and an argmax."""

    def __init__(self, model: str, precision: str, num_tokens: int) -> None:
        loaded = load_model(model)
        num_pages = (num_tokens + len(PROMPT)) // 32 + 2
        arena = Arena(loaded.config, num_pages, KV_DTYPE[precision])
        self._decoder = CpuDecoder(loaded.config, loaded.weights, arena, precision=precision)
        self._row = np.zeros(loaded.config.vocab_size, np.float32)
        self._pages = np.arange(num_pages, dtype=np.int32)

    def tokens(self, num_tokens: int, times_s: list[float]) -> list[int]:
        pending, start, found = PROMPT, 0, []
        for _ in range(num_tokens):
            began_s = time.perf_counter()
            positions = np.arange(start, start + len(pending), dtype=np.int32)
            chunk = Chunk(np.array(pending, np.int32), positions, self._pages, start, (memoryview(self._row),))
            self._decoder.step(StepBatch((chunk,)))
            start += len(pending)
            pending = [int(self._row.argmax())]
            times_s.append(time.perf_counter() - began_s)
            found += pending
        return found

    def close(self) -> None:
        self._decoder.close()


def by_pred(num_tokens: int, times_s: list[float]) -> list[int]:
    found: list[int] = []
    with sym.kv_create() as kv:
        tokens = PROMPT
        for _ in range(num_tokens):
            began_s = time.perf_counter()
            tokens = [sym.pred(kv, tokens).argmax()]
            times_s.append(time.perf_counter() - began_s)
            found += tokens
    return found


def by_generate(num_tokens: int, times_s: list[float]) -> list[int]:
    found: list[int] = []
    with sym.kv_create() as kv:
        generation = sym.generate(kv, PROMPT, stop_at_end=False, max_tokens=num_tokens)
        began_s = time.perf_counter()
        for token in generation:
            found.append(token)
            now_s = time.perf_counter()
            times_s.append(now_s - began_s)
            began_s = now_s
    return found


def decoding(socket: str, model: str, precision: str, rounds: int, num_tokens: int) -> list[dict[str, Any]]:
    sym.connect(socket)
    own = OwnLoop(model, precision, num_tokens)
    ways = {"own loop": own.tokens, "pred": by_pred, "generate": by_generate}
    medians: dict[str, list[float]] = {name: [] for name in ways}
    p99s: dict[str, list[float]] = {name: [] for name in ways}
    texts = set()
    for number in range(rounds + 1):
        for name, way in rotated(list(ways.items()), number):
            times_s: list[float] = []
            texts.add(tuple(way(num_tokens, times_s)))
            if number:  # the first round warms up
                times_us = sorted(each * 1e6 for each in times_s[1:])
                medians[name].append(statistics.median(times_us))
                p99s[name].append(times_us[len(times_us) * 99 // 100])
    own.close()
    assert len(texts) == 1, "the three ways decoded different tokens"
    rows = []
    for name in ways:
        added = [way - own for way, own in zip(medians[name], medians["own loop"], strict=True)]
        low, middle, high = statistics.quantiles(added, n=4) if rounds > 1 else added * 3
        rows.append(
            {
                "way": name,
                "p50_us": statistics.median(medians[name]),
                "p99_us": statistics.median(p99s[name]),
                "added_us": middle,
                "added_low_us": low,
                "added_high_us": high,
            }
        )
    return rows


def rotated(ways: list[Any], number: int) -> list[Any]:
    """Another one goes first each round: what ran before leaves its mark on the caches and the clock."""
    first = number % len(ways)
    return ways[first:] + ways[:first]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what system calls cost.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--calls", type=int, default=40_000, help="empty calls for each row")
    parser.add_argument("--only", choices=("empty", "decoding"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    result: dict[str, Any] = {"model": args.model, "precision": args.precision}
    with tempfile.TemporaryDirectory() as directory, daemon(args.model, args.precision) as (socket, pid):
        if args.only != "decoding":
            result["empty"] = empty_calls(socket, pid, build_ping(directory), args.calls)
        if args.only != "empty":
            result["decoding"] = decoding(socket, args.model, args.precision, args.rounds, args.tokens)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    if "empty" in result:
        print(f"{'':>50}  CPU time a call, us")
        print(f"{'empty call from':16}{'daemon':>7}{'threads':>9}{'p50 us':>9}{'p99 us':>9}", end="")
        print(f"{'daemon':>8}{'program':>9}{'calls/s':>9}")
        for row in result["empty"]:
            start = "{from:16}{daemon:>7}{threads:>9}{p50_us:>9.1f}{p99_us:>9.1f}".format(**row)
            print(start + "{daemon_us:>8.1f}{program_us:>9.1f}{calls_per_s:>9.0f}".format(**row))
    if "decoding" in result:
        print(f"\n{'a token by':12}{'p50 us':>10}{'p99 us':>10}{'added us':>10}   (middle half of the rounds)")
        for row in result["decoding"]:
            times = "{way:12}{p50_us:>10.1f}{p99_us:>10.1f}{added_us:>10.1f}".format(**row)
            print(times + "   ({added_low_us:.1f} to {added_high_us:.1f})".format(**row))
    print(PEERS)


if __name__ == "__main__":
    main()
