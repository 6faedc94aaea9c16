"""Read many streams concurrently in one process, which does nothing else: `streams.py ADDRESS CLIENTS TOKENS`.

ADDRESS is HOST:PORT of a gateway, or the socket of a daemon. Each client asks for one answer of TOKENS tokens. The
process is ready when it has printed a line. A line on standard input begins a run; its result is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import anyio

import libsym as sym

PROMPT = "Count all numbers that there are, client"


class _Reader(asyncio.Protocol):
    """A client of a gateway, which counts the events of its stream."""

    def __init__(self, number: int, num_tokens: int) -> None:
        self._number, self._num_tokens = number, num_tokens
        self.num_events = 0
        self.first_s = 0.0
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        asked = {"prompt": f"{PROMPT} {self._number}", "max_tokens": self._num_tokens, "ignore_eos": True}
        body = json.dumps(asked | {"stream": True, "temperature": 0}).encode()
        transport.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n")
        transport.write(f"content-length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        self.first_s = self.first_s or time.monotonic()
        self.num_events += data.count(b"data: ")

    def connection_lost(self, _error: Exception | None) -> None:
        self.over.set_result(None)


async def through_gateway(address: str, num_clients: int, num_tokens: int) -> list[float]:
    """Return the time of each first event."""
    host, _, port = address.rpartition(":")
    loop, readers = asyncio.get_running_loop(), [_Reader(number, num_tokens) for number in range(num_clients)]
    await asyncio.gather(*(loop.create_connection(iter([each]).__next__, host, int(port)) for each in readers))
    await asyncio.gather(*(each.over for each in readers))
    return [each.first_s for each in readers]


async def as_program(address: str, num_clients: int, num_tokens: int) -> list[float]:
    """Return the time of each first token."""
    await sym.aio.connect(address)
    found = list[float]()

    async def one(number: int) -> None:
        async with await sym.aio.kv_create() as kv:
            tokens = await sym.aio.tokenize(f"{PROMPT} {number}")
            generation = await sym.aio.generate(
                kv, tokens, max_tokens=num_tokens, stop_at_end=False, sampler=sym.Sampler.greedy()
            )
            found.append(time.monotonic())
            async for _ in generation.text():
                pass

    async with anyio.create_task_group() as tasks:
        for number in range(num_clients):
            tasks.start_soon(one, number)
    return found


def main() -> None:
    address, num_clients, num_tokens = sys.argv[1], *map(int, sys.argv[2:])
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s, own_s = time.monotonic(), time.process_time()
        first = asyncio.run((as_program if "/" in address else through_gateway)(address, num_clients, num_tokens))
        took_s = time.monotonic() - began_s
        told = {"took_s": took_s, "own_s": time.process_time() - own_s, "first_s": [each - began_s for each in first]}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
