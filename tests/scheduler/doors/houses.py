"""The daemon's sockets, for programs and for launchers, and the test's clients of them."""

import array
import json
import os
import socket
from contextlib import ExitStack
from typing import Any

import trio
import trio.testing

from libsym.channel.handshake import welcome
from libsym.errors import error_for
from scheduler.doors.launchers import Launchers
from scheduler.doors.listener import Listener, bind
from scheduler.programs.admission import Admission
from scheduler.programs.link import MAX_MESSAGE_BYTES
from scheduler.programs.registry import Programs
from scheduler.wire.peer_socket import Threads, close_listening

ID = "1f2e3d4c"


class Gate:
    """Knows who was let in, and does nothing."""

    def __init__(self):
        self.saw_one_off = trio.Event()

    def welcome(self, lip):
        pass

    def receive(self, lip, most):
        return lip.channel.receive(most)

    async def see_off(self, lip):
        lip.channel.close()
        self.saw_one_off.set()


class Talk:
    """A launcher's connection."""

    def __init__(self, connection):
        self.connection = trio.socket.from_stdlib_socket(connection)

    async def send(self, data, fds=()):
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await self.connection.sendmsg([raw], ancillary)

    async def receive(self):
        """A message; None: the daemon has hung up."""
        with trio.fail_after(20):
            try:
                data = await self.connection.recv(MAX_MESSAGE_BYTES)
            except ConnectionError:
                return None
        return json.loads(data) if data else None

    async def ask(self, do, fds=(), **fields):
        await self.send({"n": 1, "do": do, **fields}, fds)
        return await self.receive()

    async def start(self, number=ID, fds=(), **fields):
        return await self.ask("start", fds, **{"id": number, "name": "prog", "limits": {}} | fields)


class House:
    """Both sockets of a daemon. What clients leave open is closed in the end."""

    clock: trio.abc.Clock | None = None

    def __init__(self, path, exempt=frozenset()):
        for each in (path, *path.parents):
            if each.stat().st_uid == os.geteuid() and each.stat().st_mode & 0o777 == 0o700:  # pytest's own
                each.chmod(0o755)
        self.calls, self.for_launchers = path / "socket", path / "socket.programs"
        self.gate = Gate()
        self.threads, self.clients = Threads(), ExitStack()
        gate: Any = self.gate
        self.listener = Listener(gate, 16, exempt, threads=self.threads)
        self.programs = Programs(Admission(), path / "programs.json")
        self.launchers = Launchers(self.programs, self.adopt, threads=self.threads, catch_up=self.catch_up)

    def adopt(self, connection, program):
        self.listener.adopt(connection, program)

    def catch_up(self):
        pass

    def run_test(self, scenario):
        async def main():
            calls = trio.socket.from_stdlib_socket(bind(self.calls))
            launchers = trio.socket.from_stdlib_socket(bind(self.for_launchers, socket.SOCK_SEQPACKET))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.listener.run, calls)
                nursery.start_soon(self.launchers.run, launchers)
                with self.clients:
                    await scenario()
                    await self.still_serves()
                await trio.testing.wait_all_tasks_blocked()  # the daemon has seen its clients off
                nursery.cancel_scope.cancel()
            close_listening(calls)
            close_listening(launchers)
            await self.ended()

        trio.run(main, clock=self.clock)

    async def still_serves(self):
        """Require what is true whatever was tried."""

    async def ended(self):
        self.threads.end()

    def client(self, path=None, kind=socket.SOCK_STREAM, greeting=b""):
        connection = self.clients.enter_context(socket.socket(socket.AF_UNIX, kind))
        connection.connect(str(path or self.calls))
        if greeting:  # an empty packet would be one
            connection.send(greeting)
        connection.settimeout(0)
        return connection

    def launcher(self, uid=0):
        """A connection; the kernel says that it is of `uid`."""
        if uid:
            os.seteuid(uid)
        try:
            return Talk(self.client(self.for_launchers, socket.SOCK_SEQPACKET))
        finally:
            if uid:
                os.seteuid(0)

    async def answer(self, connection):
        """The welcome, or the error that a client would raise."""
        await trio.lowlevel.wait_readable(connection)
        raw, fds, _, _ = socket.recv_fds(connection, 4096, 3)
        for fd in fds:
            os.close(fd)
        code = int.from_bytes(raw[8:12], "little")
        return raw if code == 0 else error_for(code, raw[len(welcome()) :].decode())

    @property
    def num_open(self):
        """Open descriptors of this process, but for those of threads that wait for work."""
        return len(os.listdir("/proc/self/fd")) - len(self.threads._idle)  # noqa: PTH208 - links that may be gone
