"""Attempts of another account, or of a web page, to use a gateway without its key. The gateway has no file of keys."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import sys
from contextlib import suppress

from attacked import ATTACKER, Gateway, as_user, daemon, gateway, options, verdict

LOOPBACKS = ("127.0.0.1", "::1")
PAGES: list[list[tuple[str, str]]] = [
    [("Host", "")],
    [("Host", "localhost:x@evil.com")],
    [("Host", "evil.com")],
    [("Host", "localhost"), ("Sec-Fetch-Site", "cross-site")],
    [("Host", "localhost"), ("Sec-Fetch-Site", "same-site")],
    [("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "http://evil.com")],
    [("Host", "localhost"), ("Origin", "http://localhost:9999")],
]
"""Headers that the user's browser sends for a page of another origin."""


def status(served: Gateway, headers: list[tuple[str, str]], host: str = "127.0.0.1", path: str = "/sessions") -> int:
    """Return the status of a GET. 0: no server listens there."""
    connection = http.client.HTTPConnection(host, served.port, timeout=20)
    try:
        connection.putrequest("GET", path, skip_host=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


def of_attacker(served: Gateway, host: str, port: int = 0) -> socket.socket:
    """Make a connection as the attacker."""
    os.seteuid(ATTACKER)
    try:
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.connect((host, served.port))
        return made
    finally:
        os.seteuid(0)


def question(name: str) -> bytes:
    """Return a request. If the gateway answers it, a conversation of that name exists afterwards."""
    text = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "conversation": name})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
    return f"{head}{text}".encode()


def ask(served: Gateway, host: str) -> bool:
    """Return whether the gateway answers another account."""
    with of_attacker(served, host) as connection:
        connection.sendall(b"GET /sessions HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return b" 200 " in connection.recv(1 << 16).partition(b"\r\n")[0]


def hide(served: Gateway, times: int) -> None:
    """Send requests, and close each connection before the gateway looks up the connection's owner. Root then uses the
    same port.
    """
    for number in range(times):
        host = LOOPBACKS[number % 2]
        with suppress(ConnectionError), of_attacker(served, host) as connection:
            connection.sendall(question(f"closed-{number}"))
        with suppress(ConnectionError, OSError):
            connection = of_attacker(served, host)
            port = connection.getsockname()[1]
            connection.sendall(question(f"reset-{number}"))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            with socket.create_connection((host, served.port), 5, (host, port)):
                pass


def attack(served: Gateway, times: int) -> list[str]:
    got = [
        f"another account is answered at {host}"
        for host in LOOPBACKS
        if status(served, [("Host", "localhost")], host) and ask(served, host)
    ]
    got += [f"a page of another is answered: {each}" for each in PAGES if status(served, each) == 200]
    for host in LOOPBACKS:
        taken = as_user(
            ATTACKER, "import socket; socket.create_server((sys.argv[1], int(sys.argv[2])),"
            " family=socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET)", host, served.port
        )  # fmt: skip
        if taken.returncode == 0:
            got.append(f"another account binds {host} on the gateway's port")
    if status(served, [("Host", "localhost")], path=f"/proof?challenge={'0' * 64}&proof={'0' * 64}") == 200:
        got.append("a stranger is given a proof")
    hide(served, times)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", "/sessions", headers={"Authorization": f"Bearer {served.key or 'none'}"})
    names = [each["name"] for each in json.load(connection.getresponse())["sessions"]]
    connection.close()
    if names:
        got.append(f"{len(names)} questions of closed connections were answered: {', '.join(names[:3])}")
    return got


def main() -> int:
    args = options(__doc__)
    with daemon(tree=args.tree) as machine, gateway(machine, tree=args.tree) as served:
        got = attack(served, 20 if args.quick else 500)
        with open(f"/proc/{served.pid}/cmdline") as line:  # noqa: PTH123 - as any user does
            if served.key and served.key in line.read():
                got.append("the key is an argument")
        if served.key and served.key in as_user(ATTACKER, ["grep", "-r", "sk-sym-", machine.state.parent]).stdout:
            got.append("the key can be read")
    return verdict("another account, and pages of others, are not answered without the key", got)


if __name__ == "__main__":
    sys.exit(main())
