"""The network of a sandbox: a process in namespaces of its own, which hands out its listeners and other sockets.

A socket stays in the namespace that it was made in. So a test connects from inside in its own process.
"""

import asyncio
import ctypes
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from symphony.launcher.common.grants import Grant
from symphony.launcher.common.places import Refused
from symphony.launcher.network.forwarder import Forwarder
from symphony.launcher.sandbox.network import open_grants

_NEWUSER, _NEWNET, _SET_DUMPABLE = 0x10000000, 0x40000000, 4
_MAX_FDS = 200


class Inside:
    """A network namespace with grants. Skips the test where the kernel makes none."""

    def __init__(self, grants: Sequence[Grant], uid: int | None = None) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.dup2(theirs.fileno(), 3)
                os.closerange(4, 4096)
                serve(3)
            finally:
                os._exit(0)
        theirs.close()
        self._connection.send(json.dumps({"grants": grants, "uid": uid}).encode())
        said, fds, _, _ = socket.recv_fds(self._connection, 65536, _MAX_FDS)
        answer = json.loads(said)
        if "error" in answer:
            self.close()
            raise Refused(answer["error"])
        if "missing" in answer:
            self.close()
            pytest.skip(f"the kernel makes no namespaces for uid {uid or os.getuid()}: {answer['missing']}")
        self.hosts: str = answer["hosts"]
        self.listening = [socket.socket(fileno=fd) for fd in fds]

    def address(self, name: str) -> str:
        return next(line.split()[0] for line in self.hosts.splitlines() if line.split()[1] == name)

    def new(self, family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket that is in the namespace."""
        self._connection.send(json.dumps([family, kind]).encode())
        _, (fd,), _, _ = socket.recv_fds(self._connection, 16, 1)
        return socket.socket(fileno=fd)

    async def connected(self, address: str, port: int) -> socket.socket:
        connection = self.new(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (address, port))
        except OSError:
            connection.close()
            raise
        return connection

    async def streams(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(sock=await self.connected(address, port))

    def close(self) -> None:
        self._connection.close()
        os.waitpid(self._pid, 0)


def serve(descriptor: int) -> None:
    """The process inside: says what open_grants gave, then makes sockets."""
    with socket.socket(fileno=descriptor) as connection:
        words = json.loads(connection.recv(65536))
        try:
            _enter(words["uid"])
        except OSError as error:
            connection.send(json.dumps({"missing": str(error)}).encode())
            return
        try:
            hosts, listening = open_grants([(host, port) for host, port in words["grants"]])
        except Refused as error:
            connection.send(json.dumps({"error": str(error)}).encode())
            return
        socket.send_fds(connection, [json.dumps({"hosts": hosts}).encode()], [each.fileno() for each in listening])
        for each in listening:
            each.close()
        while wanted := connection.recv(64):
            with socket.socket(*json.loads(wanted)) as made:
                socket.send_fds(connection, [b"+"], [made.fileno()])


def _enter(uid: int | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self is root's
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
    for name, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


class Granted:
    """A sandbox's network with its forwarder."""

    def __init__(self, grants: Sequence[Grant], found: dict[str, Any] | None, uid: int | None) -> None:
        """`found`: for each name the addresses and ports that it has outside, or an error; None: as the machine has."""
        self.found = found or {}
        self.resolve = self._resolve
        self.troubles: list[str] = []
        self.inside = Inside(grants, uid)
        self.forwarder = Forwarder(grants, self.troubles.append, None if found is None else self._ask)
        self.forwarder.take(self.inside.listening)

    async def _ask(self, host: str, port: int, **how: object) -> list:
        return await self.resolve(host, port, **how)

    async def _resolve(self, host: str, port: int, **_how: object) -> list:
        found = self.found[host]
        if isinstance(found, Exception):
            raise found
        return [
            (socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM, 6, "", where)
            for where in found
        ]


@asynccontextmanager
async def granted(
    *grants: Grant, found: dict[str, Any] | None = None, uid: int | None = None
) -> AsyncIterator[Granted]:
    made = Granted(grants, found, uid)
    try:
        yield made
    finally:
        made.forwarder.close()
        made.inside.close()
