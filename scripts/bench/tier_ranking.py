#!/usr/bin/env python3
"""Whether a replay ranks policies of the tiers as live runs do: one workload, live under each policy, and replayed.

    .venv/bin/python scripts/bench/tier_ranking.py [--model smollm2] [--policies lru,ttl,idle,cost] [--rounds 3]
        [--seconds 20] [--kv-memory 150M] [--json FILE]

Live, each policy has a daemon of its own, in turns, with memory for less than half of the workload:

- agents call a tool of one second again and again, each with a context of its own;
- people pause for some seconds, each time for another while;
- a reader goes round many documents, one after the other, and never comes back soon: what least recently used keeps,
  and nobody needs.

What they do comes from a seed; who is held up does less. The first run under `cost` is recorded, and that trace is
replayed on the cost model which that daemon had fitted. Both rankings are by pages read for each turn: latencies differ
by milliseconds here, less than a shared machine's noise. Two policies within --tie of each other are equal.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import anyio

import libsym as sym
from scheduler.trace.file import read_trace
from symphony.policy.comparing import compare, numbers, policies
from symphony.policy.machine import machine_of
from symphony.policy.workload import workload_of
from tests.symphony.daemons import SYMPHONY, Daemon

AGENTS, PEOPLE, DOCUMENTS = 8, 6, 36
AGENT_TOKENS, PERSON_TOKENS, DOCUMENT_TOKENS = 400, 300, 220
TOOL_S, PAUSE_S, READ_EVERY_S = 1.0, 5.0, 0.12
DRAWN = 4


class Run:
    """The workload, live, until its time is over."""

    def __init__(self, seconds: float, seed: int, size: float) -> None:
        self._until_s = time.monotonic() + seconds
        self._seed, self._size = seed, size
        self.latency_s: list[float] = []

    async def all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(AGENTS):
                tasks.start_soon(self._talks, number, AGENT_TOKENS, self._tool_s)
            for number in range(PEOPLE):
                tasks.start_soon(self._talks, 100 + number, PERSON_TOKENS, self._pause_s)
            tasks.start_soon(self._reads)

    @staticmethod
    def _tool_s(draw: random.Random) -> float:
        return TOOL_S * draw.uniform(0.9, 1.1)

    @staticmethod
    def _pause_s(draw: random.Random) -> float:
        return draw.expovariate(1 / PAUSE_S) + 0.5

    async def _talks(self, number: int, num_tokens: int, pause_s: Any) -> None:
        draw = random.Random(self._seed * 1000 + number)
        async with await sym.aio.kv_create() as kv:
            await self._turn(kv, round(num_tokens * self._size), draw)
            while time.monotonic() < self._until_s:
                await anyio.sleep(pause_s(draw))
                await self._turn(kv, 8, draw)

    async def _reads(self) -> None:
        draw, files = random.Random(self._seed), []
        try:
            for _ in range(DOCUMENTS):
                files.append(await sym.aio.kv_create())
                await self._turn(files[-1], round(DOCUMENT_TOKENS * self._size), draw)
            while time.monotonic() < self._until_s:
                for kv in files:
                    await self._turn(kv, 2, draw)
                    await anyio.sleep(READ_EVERY_S)
        finally:
            for kv in files:
                kv.close()

    async def _turn(self, kv: sym.KV, num_tokens: int, draw: random.Random) -> None:
        began_s = time.monotonic()
        tokens = [draw.randrange(5, 250) for _ in range(num_tokens)]
        generation = await sym.aio.generate(kv, tokens, max_tokens=DRAWN, stop_at_end=False)
        async for _ in generation:
            pass
        self.latency_s.append(time.monotonic() - began_s)


def live(policy: str, options: argparse.Namespace, seed: int, trace: Path | None) -> tuple[dict[str, Any], str]:
    """What became of one run, and the costs that its daemon had fitted."""
    with tempfile.TemporaryDirectory(prefix="tiers") as name:
        words = ("--model", options.model, "--kv-memory", options.kv_memory, "--policy", policy)
        daemon = Daemon(Path(name), *words)
        try:
            sym.connect(str(daemon.socket))
            sym.pred(sym.kv_create(), [1])  # the weights are there
            recorder = None
            if trace is not None:
                command = [*SYMPHONY, "trace", "record", "-o", trace]
                recorder = subprocess.Popen(command, env=daemon.environment, stderr=subprocess.DEVNULL)
                while not (trace.exists() and trace.stat().st_size):
                    time.sleep(0.02)
            run = Run(options.seconds, seed, options.size)
            anyio.run(run.all)
            if recorder is not None:
                recorder.send_signal(signal.SIGINT)
                recorder.wait(30)
            tiers = sym.daemon_stat()["tiers"]
            sym.close()
            assert daemon.stop() == 0, daemon.log.read_text()
            costs = (Path(name) / "state/costs.json").read_text()
        finally:
            daemon.clean_up()
    found = {
        "turns": len(run.latency_s),
        "latency_mean_s": statistics.fmean(run.latency_s),
        "latency_p99_s": sorted(run.latency_s)[int(0.99 * len(run.latency_s))],
        "pages_read": tiers["num_in"],
        "pages_read_a_turn": tiers["num_in"] / len(run.latency_s),
        "frames": tiers["num_frames"],
    }
    return found, costs


def replayed(names: list[str], trace: Path, costs: Path, num_frames: int) -> dict[str, dict[str, Any]]:
    found = read_trace(trace)
    machine, workload = machine_of(str(costs), found.header), workload_of(found)
    compared = compare(workload, machine, policies(names), num_frames * machine.page_bytes, None)
    told = {name: numbers(compared.outcomes[name], machine.page_bytes) for name in names}
    return {name: each | {"pages_read_a_turn": each["pages_read"] / workload.num_turns} for name, each in told.items()}


def ranking(values: Mapping[str, float], tie: float) -> list[list[str]]:
    """The least first. Who is within `tie` of the first of a place shares that place."""
    places: list[list[str]] = []
    for name in sorted(values, key=lambda each: values[each]):
        if places and values[name] <= values[places[-1][0]] * (1 + tie):
            places[-1].append(name)
        else:
            places.append([name])
    return places


def disagreements(first: Mapping[str, float], second: Mapping[str, float], tie: float) -> list[str]:
    """Pairs that the one ranks one way, and the other the other way, both by more than a tie."""

    def order(values: Mapping[str, float], a: str, b: str) -> int:
        if max(values[a], values[b]) <= min(values[a], values[b]) * (1 + tie):
            return 0
        return 1 if values[a] > values[b] else -1

    names = list(first)
    pairs = [(a, b) for number, a in enumerate(names) for b in names[number + 1 :]]
    return [f"{a}, {b}" for a, b in pairs if order(first, a, b) * order(second, a, b) < 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", default="lru,ttl,idle,cost")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kv-memory", default="150M")
    parser.add_argument("--size", type=float, default=1.0, help="of the contexts")
    parser.add_argument("--tie", type=float, default=0.05)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where live.trace and costs.json stay")
    options = parser.parse_args()
    names = options.policies.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="ranking") as directory:
        kept = options.keep or Path(directory)
        trace, costs = kept / "live.trace", kept / "costs.json"
        costs.unlink(missing_ok=True)
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                records = not costs.exists() and name == names[-1]
                found, learnt = live(name, options, number, trace if records else None)
                runs[name].append(found)
                if records:
                    costs.write_text(learnt)
                print(f"live {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
        told = replayed(names, trace, costs, runs[names[0]][0]["frames"])
    lives = {name: statistics.median(each["pages_read_a_turn"] for each in found) for name, found in runs.items()}
    offline = {name: each["pages_read_a_turn"] for name, each in told.items()}
    print("\n| policy | live: pages read a turn | mean latency: ms | replay: pages read a turn | mean latency: ms |")
    print("|---|---|---|---|---|")
    for name in names:
        mean_ms = 1e3 * statistics.median(each["latency_mean_s"] for each in runs[name])
        print(f"| {name} | {lives[name]:.2f} | {mean_ms:.0f} |", end="")
        print(f" {offline[name]:.2f} | {1e3 * told[name]['latency_mean_s']:.0f} |")
    for what, values in (("live", lives), ("replay", offline)):
        print(f"{what}: " + " < ".join(" = ".join(place) for place in ranking(values, options.tie)))
    wrong = disagreements(lives, offline, options.tie)
    print("the rankings agree" if not wrong else f"the rankings differ: {'; '.join(wrong)}")
    if options.json:
        options.json.write_text(json.dumps({"live": runs, "replay": told, "differ": wrong}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
