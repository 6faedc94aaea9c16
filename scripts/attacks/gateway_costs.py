#!/usr/bin/env python3
"""A client whose key has small limits stalls a gateway for all clients, or computes without charge.

The client sends texts of a megabyte to tokenize, bodies of millions of values, requests that fail, and requests without
their body. Other requests ask only for a prompt's scores, or are dropped before the first token.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from attacked import ROOT, daemon, gateway, options, verdict

sys.path.insert(0, str(ROOT))
from lips.gateway.keys import new_key

SCORED = {"prompt": "word " * 300, "max_tokens": 0, "echo": True, "logprobs": 0}
LARGE = 8 << 20


class Client:
    """Client with one key."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def status(self, path: str, body: object) -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        try:
            with urlopen(Request(self.url + path, data, head), timeout=60) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code

    @contextmanager
    def begun(self, path: str, body: bytes, num_bytes: int | None = None) -> Iterator[socket.socket]:
        """Send the head of a request, and then `body`. The head announces a body of `num_bytes`."""
        where = urlsplit(self.url)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {num_bytes or len(body)}\r\n\r\n"
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            connection.sendall(head.encode() + body)
            yield connection


def status_of(connection: socket.socket) -> int | None:
    """Return the status of the answer. None: there is no answer within half a second."""
    connection.settimeout(0.5)
    try:
        return int(connection.recv(100).split()[1])
    except TimeoutError:
        return None


def slowest_health_s(url: str, attack: Sequence[Thread]) -> float:
    slowest = 0.0
    for thread in attack:
        thread.start()
    while any(thread.is_alive() for thread in attack):
        began_s = time.monotonic()
        urlopen(f"{url}/health", timeout=60).close()
        slowest = max(slowest, time.monotonic() - began_s)
        time.sleep(0.01)
    return slowest


def slowdown(client: Client, body: bytes, rounds: int) -> float:
    """Return the longest wait for an answer of /health during requests with `body`, divided by the time to parse
    999,000 values.

    A parse holds the interpreter's lock.
    """
    parsed = b"[" + b"[]," * 999_000 + b"[]]"
    threads = [Thread(target=client.status, args=("/v1/completions", body)) for _ in range(rounds)]
    took_s = slowest_health_s(client.url, threads)
    began_s = time.monotonic()
    json.loads(parsed)
    return took_s / (time.monotonic() - began_s)


def main() -> int:
    args = options(__doc__)
    rounds = 3 if args.quick else 10
    broken = []
    with ExitStack() as stack:
        served = stack.enter_context(daemon(tree=args.tree))
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "keys")
        lines, keys = [], {}
        for name in ("texts", "fails", "counts", "scores", "drops", "large", "free"):
            limits = {"free": "", "fails": " rate=2", "counts": " rate=2"}.get(name, " rate=1000 tokens=10")
            keys[name], line = new_key(name)
            lines.append(line + limits)
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)
        url = stack.enter_context(gateway(served, "--keys", path, tree=args.tree)).url
        clients = {name: Client(url, key) for name, key in keys.items()}

        found = [clients["texts"].status("/tokenize", {"prompt": "a b " * 50_000}) for _ in range(rounds)]
        broken += [] if found[1:] == [429] * (rounds - 1) else [f"texts to tokenize cost nothing: {found}"]
        found = [clients["fails"].status("/v1/chat/completions", b"no JSON") for _ in range(3)]
        broken += [] if found == [400, 400, 429] else [f"requests that fail are not counted: {found}"]
        counted = {"model": "x", "messages": [{"role": "user", "content": "Hi"}]}
        found = [clients["counts"].status("/v1/messages/count_tokens", counted) for _ in range(3)]
        broken += [] if found == [200, 200, 429] else [f"count_tokens is not counted: {found}"]
        found = [clients["scores"].status("/v1/completions", SCORED) for _ in range(2)]
        broken += [] if found == [200, 429] else [f"scores of a prompt are not charged: {found}"]

        for number in range(10):  # the prompt is being computed at one of these times
            with clients["drops"].begun("/v1/completions", json.dumps({"prompt": f"{number} word" * 500}).encode()):
                time.sleep(0.03 * number)
        time.sleep(1)
        found = [clients["drops"].status("/v1/completions", {"prompt": "x", "max_tokens": 1})]
        broken += [] if found == [429] else [f"prompts that are dropped are not charged: {found}"]

        for num_values in (LARGE // 3 - 8, 999_000):  # more than the gateway parses, and the most that it parses
            many = b'{"prompt": [' + b"[]," * num_values + b"[]]}"
            ratios = (slowdown(clients["free"], many, rounds) for _ in range(2))
            slow = [each for each in ratios if each >= 2 * rounds]
            broken += [] if len(slow) < 2 else [f"{num_values} values stop /health for {min(slow):.1f} parses"]
        clients["large"].status("/v1/completions", SCORED)  # uses up the key's tokens
        with clients["large"].begun("/v1/completions", b"{", LARGE) as connection:
            broken += [] if status_of(connection) == 429 else ["a body is read before its request is admitted"]
        with ExitStack() as bodies:
            begun = [bodies.enter_context(clients["free"].begun("/tokenize", b"{", LARGE)) for _ in range(12)]
            statuses = [status_of(each) for each in begun]
            broken += [] if statuses == [None] * 8 + [429] * 4 else [f"bodies under way have no bound: {statuses}"]
    return verdict("what a key has read, computed or dropped is counted, and bounded before it is read", broken)


if __name__ == "__main__":
    sys.exit(main())
