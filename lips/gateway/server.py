"""The server: its listening sockets, its tasks, and its end on a signal."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, cast

import anyio
from hypercorn.config import Config

from lips.gateway.app import make_app
from lips.gateway.connections import Connections, raise_limit
from lips.gateway.gateway import Settings, make_gateway
from lips.gateway.keys import Keys, OneKey

log = logging.getLogger(__name__)
LOOPBACKS = ("127.0.0.1", "::1")
"""Addresses that `localhost` may mean. The gateway binds its port on each, so that no other server can."""
GOES_ON_S = 30.0
"""Time for answers in flight when a signal ends the gateway."""
BACKLOG = 1024
_FIRST_PASSED = 3
"""The first descriptor that systemd passes to a service."""
_PORT_TRIES = 16
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""Errors of an address that the machine lacks."""


def listening(hosts: Sequence[str], port: int) -> tuple[list[socket.socket], list[OSError]]:
    """Return the sockets that systemd passed, else a new one for each address; and the errors of absent addresses."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        count = int(os.environ.get("LISTEN_FDS", "0"))
        return [socket.socket(fileno=fd) for fd in range(_FIRST_PASSED, _FIRST_PASSED + count)], []
    addresses = [(host, each) for host in hosts for each in _addresses(host, port)]
    for tries_left in reversed(range(_PORT_TRIES)):
        try:
            return _all_bound(addresses)
        except OSError as error:  # a port that was free for one address can be taken for the next
            if port or error.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return list(dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    except OSError as error:
        raise OSError(error.errno, error.strerror, host) from None


def _all_bound(addresses: list[tuple[str, tuple[Any, ...]]]) -> tuple[list[socket.socket], list[OSError]]:
    """Listen on one port for all hosts; skip addresses that this machine lacks."""
    found: list[socket.socket] = []
    absent: list[OSError] = []
    for host, (family, kind, protocol, _, (name, wanted, *more)) in addresses:
        port = found[0].getsockname()[1] if found else wanted
        try:
            found.append(_bound(family, kind, protocol, (name, port, *more)))
        except OSError as error:
            told = OSError(error.errno, error.strerror, f"{host} port {port}")
            if error.errno not in _ABSENT:
                for each in found:
                    each.close()
                raise told from None
            absent.append(told)
    if not found:
        raise absent[0]
    return found, absent


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(
        family, kind, protocol
    )  # asyncio sets TCP_NODELAY only if the socket was made with the protocol TCP
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)  # from now on the kernel queues connections
    except OSError:
        made.close()
        raise
    return made


def url_of(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(listeners: list[socket.socket], absent: list[OSError], settings: Settings, keys: Keys) -> None:
    """Serve until SIGTERM or Ctrl-C. Answers in flight then have GOES_ON_S to end."""
    gateway = await make_gateway(settings, keys)
    config = Config()
    config.accesslog = config.errorlog = None
    config.backlog = BACKLOG
    config.include_server_header = False
    connections = Connections(cast(Any, make_app(gateway)), config, raise_limit())
    for listener in listeners:
        connections.listen(listener)
    _tell(listeners, absent, keys)
    async with anyio.create_task_group() as tasks:
        gateway.background = tasks
        tasks.start_soon(gateway.sweep)
        tasks.start_soon(gateway.watch)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break
            gateway.ending.set()
            await connections.end(GOES_ON_S)
        tasks.cancel_scope.cancel()


def _tell(listeners: list[socket.socket], absent: list[OSError], keys: Keys) -> None:
    """Print the addresses. The second line has the key after a #: browsers send no fragment, and no server logs it."""
    lines = [url_of(listener) for listener in listeners]
    if isinstance(keys, OneKey):
        lines.insert(1, f"the key is in {keys.where}" if _is_journal() else f"{lines[0]}/#key={keys.text}")
    for line in lines:
        print(f"gateway: {line}", file=sys.stderr, flush=True)
    for error in absent:
        log.warning("%s: %s", error.filename, error.strerror)


def _is_journal() -> bool:
    """Return whether standard error goes to systemd's journal, which other users may read."""
    about = os.fstat(sys.stderr.fileno())
    return os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}"
