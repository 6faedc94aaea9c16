#!/usr/bin/env python3
"""Measure the cost of the gateway, beside Symphony without a gateway and beside other servers, in turns.

    .venv/bin/python scripts/bench/workloads/gateway.py [--only load,shared,steady,turns,cost,stalled]
        [--clients 1,8,32,128] [--prompt 64] [--rates 2,4] [--rounds 3] [--precision bf16] [--server NAME=URL ...]
        [--group NAME=PGID ...] [--save NAME] [--quick]

load     many concurrent clients, each with its own prompt of `--prompt` tokens and a stream of 64 tokens; `symphony` is
         a program without HTTP
shared   the same without `symphony`; each prompt begins with one of four prefixes of 1,024 tokens
steady   a hundred requests that arrive at random, with so many a second as `--rates` says
turns    ten turns: tokens that each turn computes if the client sends its whole history, or names a conversation
cost     processor time for each streamed token (answers of 64 tokens, requests included) of the gateway, of the daemon
         and of the process that reads all streams (streams.py); `program` reads them through libsym
stalled  time to the first token of 8 clients that send one request after the other: alone, and while 50 others do not
         read their answers

README.md says how to start servers. Servers with `--group` are stopped while other sides have their turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import jobs
from harness import Daemon, chosen, connected, processor_s, quantile, read_line, word_tokens, write_line
from sides import Bench, Served, Side, Symphony, options, servers
from work import Job, Words

STALLED, ASKING, ASKED_EACH, STREAMED, PREFIX = 50, 8, 12, 64, 1024


@contextmanager
def gateway(daemon: Daemon) -> Iterator[tuple[str, list[int]]]:
    """Yield the URL of a gateway, and the pids of the processes that work for it."""
    command = [sys.executable, "-m", "lips.gateway", "--port", "0"]
    with subprocess.Popen(command, env=daemon.environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if not line.startswith("gateway: http://"):
            raise SystemExit(line + process.stderr.read())
        threading.Thread(target=process.stderr.read, daemon=True).start()  # drops the log's line for each request
        try:
            yield line.split()[1], [daemon.pid, process.pid]
        finally:
            process.terminate()


def load(bench: Bench, sides: list[Side]) -> None:
    def prompts(count: int, words: Words) -> list[Job]:
        return jobs.prompts(words, count, bench.args.prompt, 64)

    for side in sides:  # warms up
        side.run(prompts(8, bench.words(f"warm-{side.name}")))
    for count in map(int, bench.args.clients.split(",")):
        bench.turns(f"{count} clients", sides, partial(prompts, count))


def shared(bench: Bench, sides: list[Side]) -> None:
    def prompts(count: int, words: Words) -> list[Job]:
        prefixes = [words.take(PREFIX) for _ in range(4)]
        own = [[*prefixes[number % 4], *words.take(bench.args.prompt)] for number in range(count)]
        return [Job("prompts", {"prompts": own, "num_tokens": 64}, count * 64)]

    for count in map(int, bench.args.clients.split(",")):
        bench.turns(f"{count}, 4 prefixes", sides, partial(prompts, count), is_same=True)


def steady(bench: Bench, sides: list[Side]) -> None:
    def arriving(rate: float, words: Words) -> list[Job]:
        rng, found, begin_s = random.Random(words.seed), list[Job](), 0.0
        for _ in range(4 if bench.args.quick else 100):
            begin_s += rng.expovariate(rate)
            work = {"begin_s": begin_s, "prefix": [], "label": "", "num_tokens": 64}
            turns = [{"say": words.take(bench.args.prompt), "pause_s": 0.0}]
            found.append(Job("session", work | {"turns": turns}, 64))
        return found

    for rate in bench.args.rates.split(","):
        bench.turns(f"{rate} requests/s", sides, partial(arriving, float(rate)), is_same=True)


def turns(url: str) -> str:
    """Run ten turns. Return a table with two numbers for each turn: its prompt tokens, and how many were computed."""
    found: dict[str, list[str]] = {"whole history": [], "conversation": []}
    messages: list[dict[str, str]] = []
    for number in range(10):
        question = {"role": "user", "content": f"Tell me something of the number {number + 3}, and why it is so."}
        messages.append(question)
        named = {"messages": [question], "conversation": f"turns-{os.getpid()}"}
        for name, body in (("whole history", {"messages": messages}), ("conversation", named)):
            data = json.dumps(body | {"max_tokens": 48, "temperature": 0, "model": "any"}).encode()
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                told = json.load(answer)
            if name == "whole history":
                said = told["choices"][0]["message"]["content"]
            prompt = told["usage"]["prompt_tokens"]
            computed = prompt - told["usage"]["prompt_tokens_details"]["cached_tokens"]
            found[name].append(f"{computed:>5} of {prompt:<5}")
        messages.append({"role": "assistant", "content": said})
    lines = [f"{name:16}{''.join(each)}" for name, each in found.items()]
    return "\n".join(["computed of the prompt's tokens, by turn:", *lines]) + "\n"


async def asked(host: str, port: str, body: dict[str, Any]) -> float:
    """Send a request, and return the seconds until its first token."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_request(body))
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"data: ")  # the first event has only the role
        took_s = time.monotonic() - began_s
        await reader.read()
        return took_s
    finally:
        writer.close()


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def stalled(url: str, *, is_quick: bool) -> str:
    """Measure the time to the first token for clients that read their answers, with and without stalled clients."""
    host, port = url.removeprefix("http://").split(":")

    async def ask_all(seed: str) -> list[float]:
        async def one(number: int) -> list[float]:
            found = []
            for turn in range(2 if is_quick else ASKED_EACH):
                messages = [{"role": "user", "content": f"{seed} {number} {turn}: say something."}]
                found.append(await asked(host, port, {"messages": messages, "max_tokens": 16}))
            return found

        return [each for many in await asyncio.gather(*map(one, range(ASKING))) for each in many]

    found = {"alone": asyncio.run(ask_all("alone"))}
    with ExitStack() as stack:
        for number in range(STALLED):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"messages": [{"role": "user", "content": f"{number}: count."}], "max_tokens": 256, "logprobs": True}
            connection.sendall(_request(body))
        time.sleep(2 if is_quick else 20)  # until the stalled clients' answers fill all buffers
        found[f"beside {STALLED} that stall"] = asyncio.run(ask_all("beside"))
    lines = [
        f"{name:24}{1e3 * quantile(took_s, 0.5):>14.0f}{1e3 * quantile(took_s, 0.99):>8.0f}"
        for name, took_s in found.items()
    ]
    return "\n".join([f"{f'{ASKING} clients':24}{'first p50 ms':>14}{'p99':>8}", *lines]) + "\n"


def cost(bench: Bench, daemon: Daemon, url: str, gateway_pid: int) -> str:
    """Return a table: the median of each figure over the rounds, in which the sides take turns."""
    head = f"{'clients':>7}  {'side':8}{'tokens/s':>10}{'of program':>12}{'first p50 ms':>14}{'p99':>8}"
    lines = [f"{head}{'gateway us/token':>18}{'daemon':>8}{'reader':>8}"]
    for count in map(int, bench.args.clients.split(",")):
        addresses = {"program": str(daemon.socket), "gateway": url.removeprefix("http://")}
        found: dict[str, list[list[float]]] = {name: [] for name in addresses}
        with ExitStack() as stack:
            readers = {}
            for name, address in addresses.items():
                script = str(Path(__file__).with_name("streams.py"))
                command = [sys.executable, script, address, str(count), str(STREAMED)]
                pipe = subprocess.PIPE
                reader = subprocess.Popen(command, env=daemon.environment, stdin=pipe, stdout=pipe, text=True)
                readers[name] = stack.enter_context(reader)
                stack.callback(reader.kill)
                assert read_line(reader) == "ready"
            for number in range(bench.args.rounds + 1):
                for name, reader in readers.items():
                    pids = gateway_pid, daemon.pid
                    before = [processor_s(pid) for pid in pids]
                    write_line(reader, "go")
                    told, after = json.loads(read_line(reader)), [processor_s(pid) for pid in pids]
                    used_s = [*(after[place] - before[place] for place in range(2)), told["own_s"]]
                    first_ms = [1e3 * quantile(told["first_s"], share) for share in (0.5, 0.99)]
                    per_token = [1e6 * each / count / STREAMED for each in used_s]
                    if number:  # the first round warms up
                        found[name].append([count * STREAMED / told["took_s"], *first_ms, *per_token])
        medians = {name: [statistics.median(each) for each in zip(*rows, strict=True)] for name, rows in found.items()}
        for name, (speed, p50, p99, of_gateway, of_daemon, of_reader) in medians.items():
            own = f"{of_gateway:.0f}" if name == "gateway" else "-"
            lines.append(
                f"{count:>7}  {name:8}{speed:>10.0f}{speed / medians['program'][0]:>12.2f}{p50:>14.0f}{p99:>8.0f}"
                f"{own:>18}{of_daemon:>8.0f}{of_reader:>8.0f}"
            )
    return "\n".join(lines) + "\n"


COMPARED = {"load": load, "shared": shared, "steady": steady}
PARTS = *COMPARED, "turns", "cost", "stalled"


def main() -> None:
    args = options(__doc__, only=",".join(PARTS), clients="1,8,32,128", prompt=64, rates="2,4")
    wanted, parts = chosen(args.only, PARTS), []
    if args.quick:
        args.clients = "2"
    with ExitStack() as stack:
        daemon = stack.enter_context(connected(args.model, "--precision", args.precision))
        bench = Bench(args, word_tokens())
        url, pids = stack.enter_context(gateway(daemon))
        if compared := [name for name in wanted if name in COMPARED]:
            through = Served("gateway", url, None, "", pids)
            stack.callback(through.close)
            ours, beside = Symphony(f"symphony-{args.precision}", daemon), [through, *servers(args, stack)]
            for name in compared:
                COMPARED[name](bench, [ours, *beside] if name == "load" else beside)
            parts.append(bench.table())
        if "turns" in wanted:
            parts.append(turns(url))
        if "cost" in wanted:
            parts.append(cost(bench, daemon, url, pids[1]))
        if "stalled" in wanted:
            parts.append(stalled(url, is_quick=args.quick))
    bench.show("\n".join(parts))


if __name__ == "__main__":
    main()
