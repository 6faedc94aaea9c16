"""The launcher's control socket, for the user's commands. Each connection is a client with one request."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from symphony import __version__
from symphony.launcher.common import wire
from symphony.launcher.common.places import Places, Refused
from symphony.launcher.common.spec import checked
from symphony.launcher.common.statuses import FAILED
from symphony.launcher.supervising.program import ACCEPT_AGAIN_S, LaunchedProgram
from symphony.launcher.supervising.supervisor import WINDOW, Supervisor
from symphony.launcher.supervising.viewer import Role, Viewer

log = logging.getLogger(__name__)

BACKLOG = 1024
Message = dict[str, Any]


class Control:
    """Listener of the control socket. `on_idle` is called whenever a client is gone."""

    def __init__(self, places: Places, supervisor: Supervisor, on_idle: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._places = places
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self.num_clients = 0
        places.control.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.setblocking(False)
        self._listening.bind(str(places.control))
        self._listening.listen(BACKLOG)
        self._accept_from_now()

    def close(self) -> None:
        """Close the socket. The next client will start another launcher."""
        self._places.control.unlink(missing_ok=True)
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _accept_from_now(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors or memory: the connection waits in the queue
            log.warning("a client can't be served: %s", error.strerror)
            self._loop.remove_reader(self._listening)
            self._loop.call_later(ACCEPT_AGAIN_S, self._accept_from_now)
            return
        if not _is_beside_us(connection):
            connection.close()
            return
        connection.setblocking(False)
        self.num_clients += 1
        Client(self._supervisor, connection, self._gone)

    def _gone(self) -> None:
        self.num_clients -= 1
        self._on_idle()


def _is_beside_us(connection: socket.socket) -> bool:
    """Return whether the client runs outside of any sandbox.
    A sandboxed program must not be able to start programs without a sandbox.
    """
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user"))  # noqa: PTH116 - shorter
    except OSError:  # the client has ended, or may not be inspected
        return False


class Client:
    """Connection of one client, until either side closes it."""

    def __init__(self, supervisor: Supervisor, connection: socket.socket, on_gone: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._connection = connection
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._viewer: Viewer | None = None
        self._work: asyncio.Task[None] | None = None
        self._waits: asyncio.Task[None] | None = None
        self._loop.add_reader(connection, self._receive)
        self._send({"event": "hello", "release": __version__})

    def _receive(self) -> None:
        try:
            kind, content = wire.receive(self._connection)
        except BlockingIOError:
            return
        except (ValueError, OSError) as error:
            log.warning("a client sent an invalid message: %s", error)
            kind = b""
        if not kind:
            self.close()
        elif self._viewer is not None:
            self._viewer.take(kind, content)
        elif kind == wire.JSON and self._work is None:
            self._work = self._loop.create_task(self._serve(content))

    async def _serve(self, request: Message) -> None:
        try:
            await self._do(request)
        except Refused as error:
            self._send({"error": str(error), "status": error.status, "no_daemon": type(error).__name__ == "NoDaemon"})
            self.close()
        except (KeyError, TypeError, ValueError) as error:
            why = f"the launcher, of release {__version__}, does not understand this request: {error!r}"
            self._send({"error": f"{why} (another launcher starts when its programs have ended)", "status": FAILED})
            self.close()

    async def _do(self, request: Message) -> None:
        supervisor = self._supervisor
        match request["do"]:
            case "run":
                await self._run(request)
            case "attach":
                program = supervisor.find(request["who"])
                if program.record.end is not None:
                    raise Refused(f"{program.record.name} has ended: `symphony logs` shows what it wrote", 1)
                self._send({"event": "started", **program.record.shown()})
                self._view(Viewer(supervisor, program, self._connection, self.close, Role.GUEST))
            case "logs":
                program = supervisor.find(request["who"])
                self._send({"event": "started", **program.record.shown()})
                role = Role.FOLLOWER if request["follow"] else Role.READER
                self._view(Viewer(supervisor, program, self._connection, self.close, role))
            case "ps":
                self._answer({"programs": self._programs(ended=request["all"])})
            case "kill":
                program = supervisor.find(request["who"])
                if program.record.end is not None:
                    raise Refused(f"{program.record.name} has ended already", 1)
                supervisor.kill(program, request["signal"])
                self._answer({"ok": True})
            case "wait":
                program = supervisor.find(request["who"])
                self._waits = self._loop.create_task(self._wait(program))
            case unknown:
                raise ValueError(unknown)

    async def _wait(self, program: LaunchedProgram) -> None:
        await program.over.wait()
        self._waits = None
        self._answer({"program": program.record.shown()})

    async def _run(self, request: Message) -> None:
        spec = checked(request["spec"])
        window = tuple(request.get("window") or WINDOW)
        program = await self._supervisor.start(spec, window=window)
        self._send({"event": "started", **program.record.shown()})
        if request["detach"]:
            self.close()
        elif self._connection.fileno() < 0:
            self._supervisor.hang_up(program)
        else:
            self._view(Viewer(self._supervisor, program, self._connection, self.close, Role.OWNER))

    def _view(self, viewer: Viewer) -> None:
        self._viewer = viewer
        viewer.show()

    def _programs(self, *, ended: bool) -> list[Message]:
        programs = [*self._supervisor.living.values()]
        if ended:
            programs += reversed(list(self._supervisor.history.latest_first()))
        return [program.record.shown() for program in programs]

    def _answer(self, message: Message) -> None:
        self._send(message)
        self.close()

    def _send(self, message: Message) -> None:
        if self._connection.fileno() < 0:
            return
        try:
            wire.send(self._connection, message)
        except OSError as error:  # the client is gone, or does not read: it is closed next
            log.debug("a client does not take its answer: %s", error)

    def close(self) -> None:
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        if self._viewer is not None:
            self._viewer.close()
        self._connection.close()
        if self._waits is not None:
            self._waits.cancel()
        self._on_gone()
