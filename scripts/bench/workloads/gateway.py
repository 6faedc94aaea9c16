#!/usr/bin/env python3
"""What the gateway costs, beside Symphony without it and beside other servers, in turns on the same prompts.

    .venv/bin/python scripts/bench/workloads/gateway.py [--only load,turns,stalled] [--clients 1,8,32,128] [--rounds 3]
        [--precision bf16] [--server NAME=URL ...] [--group NAME=PGID ...] [--save NAME]

load     so many clients at once, each with a prompt of 64 tokens of its own, 64 tokens streamed back: requests a
         second, time to the first token, time between tokens. `symphony` is a program without HTTP.
turns    ten turns: what each computes, where the client sends its whole history and where it names a conversation.
stalled  8 clients ask, one request after the other, without others, and while 50 read nothing of their answers.

How servers are started is in README.md; `--group` has them stopped while others have their turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "crowds"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import plain
from attacked import ROOT, Attacked, processor
from compare import RESULTS, Sample, measure, pairs, word_tokens
from kinds import Words
from load import wait_for_quiet
from sides import Served, Side, served_side, symphony_side

STALLED, ASKING, ASKED_EACH = 50, 8, 12


@contextmanager
def gateway(daemon: Attacked) -> Iterator[tuple[str, list[int]]]:
    """Its URL, and the processes that work for it."""
    command = [sys.executable, "-m", "lips.gateway", "--port", "0"]
    with subprocess.Popen(command, env=daemon.environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if not line.startswith("gateway: http://"):
            raise SystemExit(line + process.stderr.read())
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a line a request, which nobody wants here
        try:
            yield line.split()[1], [daemon.pid, process.pid]
        finally:
            process.terminate()


class Through:
    """A server whose processes are known, and are not stopped while others have their turn: they wait for requests."""

    def __init__(self, served: Served, pids: list[int]) -> None:
        self.name = served.name
        self.run = served.run
        self._served = served
        self._pids = pids

    def pids(self) -> list[int]:
        return [*self._served.pids(), *self._pids]


def load(sides: list[Side], counts: list[int], rounds: int, tokens: list[int], args: argparse.Namespace) -> Any:
    """By number of clients, by side."""
    found: dict[int, dict[str, list[Sample]]] = {count: {side.name: [] for side in sides} for count in counts}
    for side in sides:
        side.run(plain.jobs(8 / plain.NUM_PROMPTS, Words(tokens, f"warm-{time.time()}")))
    for number in range(rounds):
        for count in counts:
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                wait_for_quiet(args.quiet, args.patience)
                words = Words(tokens, f"{count}-{number}-{side.name}-{time.time()}")
                sample = measure(side, plain.jobs(count / plain.NUM_PROMPTS, words))
                found[count][side.name].append(sample)
                say = f"{number} {count:4} clients {side.name:16}{sample.tokens_per_s:9.1f} tokens/s"
                print(f"  {say}, others {sample.others:.0%}", file=sys.stderr, flush=True)
    return found


def load_table(found: dict[int, dict[str, list[Sample]]]) -> list[str]:
    head = f"{'clients':>7}  {'side':16}{'requests/s':>11}{'tokens/s':>10}{'of ours':>9}{'first p50 ms':>14}{'max':>7}"
    lines = [f"{head}{'gap p50 ms':>12}{'p99':>7}{'others':>8}"]
    for count, by_side in found.items():
        ours = next(iter(by_side.values()))
        for name, runs in by_side.items():
            middle = {key: statistics.median(asdict(run)[key] for run in runs) for key in asdict(runs[0])}
            ratio = statistics.median(run.tokens_per_s / own.tokens_per_s for run, own in zip(runs, ours, strict=True))
            rate = middle["tokens_per_s"]
            lines.append(
                f"{count:>7}  {name:16}{rate / plain.NUM_TOKENS:>11.2f}{rate:>10.1f}"
                f"{ratio:>9.2f}{middle['first_p50_s'] * 1e3:>14.0f}{middle['first_max_s'] * 1e3:>7.0f}"
                f"{middle['gap_p50_ms']:>12.2f}{middle['gap_p99_ms']:>7.1f}{middle['others']:>8.0%}"
            )
    return lines


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def turns(url: str) -> dict[str, list[tuple[int, int]]]:
    """Of ten turns, the tokens of the prompt and those of them that were computed."""
    found: dict[str, list[tuple[int, int]]] = {"whole history": [], "conversation": []}
    messages: list[dict[str, str]] = []
    for number in range(10):
        question = {"role": "user", "content": f"Tell me something of the number {number + 3}, and why it is so."}
        messages.append(question)
        options = {"max_tokens": 48, "temperature": 0, "model": "any"}
        whole = post(url, {"messages": messages, **options})
        messages.append({"role": "assistant", "content": whole["choices"][0]["message"]["content"]})
        named = post(url, {"messages": [question], "conversation": f"turns-{os.getpid()}", **options})
        for name, answer in (("whole history", whole), ("conversation", named)):
            usage = answer["usage"]
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            found[name].append((usage["prompt_tokens"], computed))
    return found


def turns_table(found: dict[str, list[tuple[int, int]]]) -> list[str]:
    return [
        f"{name:16}" + "".join(f"{computed:>5} of {prompt:<5}" for prompt, computed in each)
        for name, each in found.items()
    ]


async def asked(host: str, port: int, body: dict[str, Any]) -> float:
    """Seconds to the first token."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_request(body))
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"data: ")  # the first says whose turn it is
        took_s = time.monotonic() - began_s
        await reader.read()
        return took_s
    finally:
        writer.close()


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def stalled(url: str) -> dict[str, list[float]]:
    """Seconds to the first tokens of those that read, without others and with those that don't."""
    host, port = url.removeprefix("http://").split(":")

    async def ask_all(seed: str) -> list[float]:
        async def one(number: int) -> list[float]:
            found = []
            for turn in range(ASKED_EACH):
                messages = [{"role": "user", "content": f"{seed} {number} {turn}: say something."}]
                found.append(await asked(host, int(port), {"messages": messages, "max_tokens": 16}))
            return found

        return [each for many in await asyncio.gather(*map(one, range(ASKING))) for each in many]

    found = {"alone": asyncio.run(ask_all("alone"))}
    readers = [socket.create_connection((host, int(port))) for _ in range(STALLED)]
    try:
        for number, connection in enumerate(readers):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"messages": [{"role": "user", "content": f"{number}: count."}], "max_tokens": 256, "logprobs": True}
            connection.sendall(_request(body))
        time.sleep(20)  # they have computed what they could, and stall
        found["beside 50 that stall"] = asyncio.run(ask_all("beside"))
    finally:
        for connection in readers:
            connection.close()
    return found


def stalled_table(found: dict[str, list[float]]) -> list[str]:
    lines = [f"{'':24}{'first p50 ms':>14}{'p99':>8}"]
    for name, took in found.items():
        ranked = sorted(took)
        p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
        lines.append(f"{name:24}{p50 * 1e3:>14.0f}{p99 * 1e3:>8.0f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="load,turns,stalled")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--group", action="append", default=[], metavar="NAME=PGID")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores that others may take")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a turn waits for a quiet machine")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and .txt")
    args = parser.parse_args()
    wanted, groups = args.only.split(","), pairs(args.group)
    lines, found = [f"{processor()}; {args.model}, {args.precision}; {time.strftime('%Y-%m-%d')}"], dict[str, Any]()
    with contextlib.ExitStack() as stack:
        side, daemon = stack.enter_context(symphony_side(args.precision, args.model, ROOT, ()))
        tokens = word_tokens(daemon.socket)
        url, pids = stack.enter_context(gateway(daemon))
        if "load" in wanted:
            served = stack.enter_context(served_side("gateway", url, None, ""))
            sides: list[Side] = [side, Through(served, pids)]
            for name, where in pairs(args.server).items():
                group = int(groups[name]) if name in groups else None
                sides.append(stack.enter_context(served_side(name, where, group, "")))
            by_count = load(sides, [int(each) for each in args.clients.split(",")], args.rounds, tokens, args)
            lines += ["", *load_table(by_count)]
            found["load"] = {
                count: {name: [asdict(run) for run in runs] for name, runs in by_side.items()}
                for count, by_side in by_count.items()
            }
        if "turns" in wanted:
            found["turns"] = turns(url)
            lines += ["", "computed of the prompt's tokens, by turn:", *turns_table(found["turns"])]
        if "stalled" in wanted:
            found["stalled"] = stalled(url)
            lines += ["", f"time to the first token of {ASKING} clients:", *stalled_table(found["stalled"])]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.save:
        (RESULTS / f"{args.save}.txt").write_text(text)
        (RESULTS / f"{args.save}.json").write_text(json.dumps({"processor": processor()} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
