"""The server itself: its sockets, and its end."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any, cast

import anyio
from hypercorn.asyncio import serve as serve_app
from hypercorn.config import Config

from lips.gateway.app import make_app
from lips.gateway.gateway import Settings, make_gateway
from lips.gateway.keys import Keys

GOES_ON_S = 30.0
"""So long answers that have begun may go on when the gateway is asked to end."""
BACKLOG = 1024
_FIRST_PASSED = 3
"""The first descriptor that systemd passes on."""


def listening(host: str, port: int) -> list[socket.socket]:
    """The sockets that systemd has opened, else one of our own for each address of the host."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        count = int(os.environ.get("LISTEN_FDS", "0"))
        return [socket.socket(fileno=fd) for fd in range(_FIRST_PASSED, _FIRST_PASSED + count)]
    found = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, error.strerror, host) from None
    for family, kind, _, _, address in addresses:
        try:
            found.append(_bound(family, kind, address))
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{host} port {port}") from None
        if port == 0:
            break  # any port is one port
    return found


def _bound(family: int, kind: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(address)
    made.listen(BACKLOG)  # now: what comes before Hypercorn accepts is kept
    return made


def url_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(listeners: list[socket.socket], settings: Settings, keys: Keys | None) -> None:
    """Until SIGTERM or Ctrl-C; then answers that have begun may end."""
    gateway = await make_gateway(settings, keys)
    app = make_app(gateway)
    config = Config()
    config.bind = [f"fd://{listener.fileno()}" for listener in listeners]
    config.accesslog = config.errorlog = None
    config.backlog = BACKLOG
    config.graceful_timeout = GOES_ON_S
    config.include_server_header = False
    for listener in listeners:
        print(f"gateway: {url_of(listener)}", file=sys.stderr, flush=True)
    to_end, has_ended = anyio.Event(), anyio.Event()

    async def serve_until_told() -> None:  # in a task of its own: Hypercorn cancels the one that it runs in
        try:
            await serve_app(cast(Any, app), config, shutdown_trigger=to_end.wait)
        finally:
            has_ended.set()

    async with anyio.create_task_group() as tasks:
        gateway.background = tasks
        tasks.start_soon(_end_by_signal, to_end)
        tasks.start_soon(serve_until_told)
        tasks.start_soon(gateway.sweep)
        await has_ended.wait()
        tasks.cancel_scope.cancel()


async def _end_by_signal(ended: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            ended.set()
