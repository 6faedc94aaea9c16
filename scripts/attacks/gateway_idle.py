"""Connections without a key: another account opens as many as it can, and sends as little as it can on each."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import sys
import time

from attacked import ATTACKER, Gateway, daemon, gateway, options, verdict

FILES = 2048
"""Limit on the gateway's descriptors."""
UPGRADE = (
    b"GET /health HTTP/1.1",
    b"host: localhost",
    b"connection: upgrade, http2-settings",
    b"upgrade: h2c",
    b"http2-settings: AAQAAAAA",  # a window of 0: no body can be sent
    b"\r\n",
)
BEGINNINGS = (
    b"",
    b"GET / HTTP/1.1\r\nhost:",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
    b"\r\n".join(UPGRADE),
)
IDLE_S = 5
"""Time for which the gateway keeps an idle connection open."""


def opened(served: Gateway, count: int) -> list[socket.socket]:
    """Open connections as the attacker. Return the connections that the gateway accepts."""
    found: list[socket.socket] = []
    os.seteuid(ATTACKER)
    try:
        for number in range(count):
            found.append(connection := socket.socket())
            connection.settimeout(2)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(BEGINNINGS[number % len(BEGINNINGS)])
    except OSError:
        pass  # the backlog is full or the connection was refused: enough are open
    finally:
        os.seteuid(0)
    return found


def answers_s(served: Gateway) -> float | None:
    """Return how long an answer to root takes, in seconds. None: no answer arrives."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=40)
    try:
        connection.request("GET", "/health")
        return time.monotonic() - began_s if connection.getresponse().status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


def attack(served: Gateway, rounds: int) -> list[str]:
    for _ in range(rounds):
        held = opened(served, FILES + 200)
        took_s = answers_s(served) and answers_s(served)  # the first answer waits for the connections before it
        if took_s is None or took_s > 5:
            return [f"{len(held)} connections of one account, and root is not answered ({took_s} s)"]
        end_s = time.monotonic() + 4 * IDLE_S
        while held and time.monotonic() < end_s:
            held = [each for each in held if is_open(each)]
            time.sleep(0.2)
        if held:
            return [f"{len(held)} idle connections are still open after {4 * IDLE_S} s"]
    return []


def main() -> int:
    args = options(__doc__)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    few = ["prlimit", f"--nofile={FILES // 2}:{FILES}"]
    with daemon(tree=args.tree) as machine, gateway(machine, tree=args.tree, wrapper=few) as served:
        got = attack(served, 1 if args.quick else 10)
    return verdict("root is answered while another account holds what it can, and idle connections are closed", got)


if __name__ == "__main__":
    sys.exit(main())
