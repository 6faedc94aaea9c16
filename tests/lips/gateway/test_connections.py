"""Connections of one server: each account or address has its part of them, and nobody uses up the files."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from hypercorn.config import Config

from lips.gateway import connections
from lips.gateway.connections import FEWEST, Connections
from lips.gateway.server import listening

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope, _receive, send):
    """Tells the uid that the client has."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(scope["state"]["uid"]).encode()})


def served_by(application):
    """The connections of a server, and a function that opens one and asks on it."""
    config = Config()
    config.accesslog = config.errorlog = None
    (listener,), _ = listening(("127.0.0.1",), 0)
    served, opened = Connections(application, config, 0), []
    served.listen(listener)

    async def ask():
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        opened.append(writer)
        writer.write(REQUEST)
        return reader

    async def close():
        for writer in opened:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    return served, ask, opened, close


async def test_an_account_has_its_part_and_another_one_as_much(monkeypatch, caplog):
    uids = list[int]()
    monkeypatch.setattr(connections, "uid_of", lambda _: uids.pop())

    served, ask, opened, close = served_by(app)
    served.most = 3

    async def status(uid):
        uids.append(uid)
        return (await (await ask()).readline()).split()[1]

    assert [await status(uid) for uid in (7, 7, 7, 8, 8, 7, 7, 8)] == [b"200"] * 5 + [b"429"] * 2 + [b"200"]
    said = ["uid 7 has 3 connections, the most that it may have: more are refused"]
    assert [each.message for each in caplog.records] == said
    opened[0].close()
    for _ in range(1000):
        if await status(7) == b"200":
            break
    else:
        raise AssertionError("a connection that was closed counts")
    await close()
    await served.end(5)


def test_clients_that_have_no_account_count_by_address():
    def party(host):
        connection: Any = SimpleNamespace(getpeername=lambda: (host, 1))
        return connections._party(connection, None)

    assert len({party(host) for host in ("192.0.2.1", "192.0.2.2", "::ffff:192.0.2.1")}) == 3
    assert party("2001:db8::1") == party("2001:db8::2") != party("2001:db8:0:1::1")
    assert party("fe80::1%eth0") == "fe80::/64"


def test_a_party_has_a_quarter_of_the_files_which_are_as_many_as_the_kernel_allows():
    script = "from lips.gateway.connections import raise_limit; print(raise_limit())\n"
    script += "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = ["prlimit", f"--nofile=256:{most}", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(most)] * 3
    assert Connections(app, Config(), 1 << 20).most == 1 << 18
    assert Connections(app, Config(), 256).most == FEWEST


async def test_an_answer_is_told_whose_connection_it_is_and_may_end(caplog):
    begun = asyncio.Event()

    async def slow(scope, receive, send):
        begun.set()
        await asyncio.sleep(0.1)
        await app(scope, receive, send)

    served, ask, _, close = served_by(slow)
    reader = await ask()
    await begun.wait()
    await served.end(20)
    answer = await reader.read()
    assert answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1] == str(os.geteuid()).encode()
    await close()
    assert not caplog.records


async def test_a_client_that_goes_while_other_requests_wait_leaves_no_connection_behind(monkeypatch):
    """The server reads nothing while it answers, and does not see the client's end."""
    monkeypatch.setattr(connections, "GONE_S", 0.05)

    begun = asyncio.Event()

    async def endless(_scope, _receive, _send):
        begun.set()
        await asyncio.Event().wait()

    served, ask, opened, close = served_by(endless)
    await ask()
    opened[0].write(REQUEST)
    await begun.wait()
    opened[0].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    opened[0].transport.abort()
    [task] = served._tasks
    await asyncio.wait([task])
    await close()
    await served.end(5)
