#!/usr/bin/env python3
"""Malformed requests to --metrics-port, which every local user can send: the daemon and its metrics must survive.

    .venv/bin/python scripts/attacks/metrics.py [--quick] [--tree CHECKOUT]

Needs root.
"""

from __future__ import annotations

import json
import random
import sys

from attacked import ATTACKER, Daemon, as_user, daemon, options, verdict

SEND = """
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as connection:
        connection.sendall(bytes.fromhex(sys.argv[2]))
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
"""
HEAD = b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n"
KNOWN = [
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD.replace(b"HEAD", b"CONNECT") + b"Upgrade: x\r\nConnection: upgrade\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    b"\0" * 9000,
]
MUTANTS = 200


def requests(draw: random.Random, count: int) -> list[bytes]:
    """Return the known requests, and `count` copies of them with some random bytes."""
    found = list(KNOWN)
    for _ in range(count):
        text = bytearray(draw.choice(KNOWN))
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.randrange(256)
        found.append(bytes(text))
    return found


def attack(served: Daemon, port: int, count: int) -> list[str]:
    for text in requests(random.Random(50), count):
        sent = as_user(ATTACKER, SEND, port, text.hex())
        if not served.serves():
            return [f"{text[:80]!r} ends the daemon"]
        if sent.returncode:
            return [f"{text[:80]!r} can't be sent: {sent.stderr.strip().splitlines()[-1]}"]
    return []


def main() -> int:
    args = options(__doc__)
    count = 0 if args.quick else MUTANTS
    with daemon("--kv-memory", "64M", "--metrics-port", 0, tree=args.tree) as served:
        stat = as_user(0, [sys.executable, "-m", "symphony", "stat", "--json"], served=served)
        broken = attack(served, json.loads(stat.stdout)["metrics_port"], count)
    return verdict(f"{len(KNOWN) + count} malformed requests to the metrics", broken)


if __name__ == "__main__":
    sys.exit(main())
