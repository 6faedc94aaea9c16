"""The launcher's link to its zygote, which starts processes and reports their ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from symphony.launcher.common.places import Refused
from symphony.launcher.common.statuses import NOT_READABLE
from symphony.launcher.machine.processes import children
from symphony.launcher.machine.system import READY
from symphony.launcher.supervising.process import ProgramProcess
from symphony.launcher.supervising.streams import Streams
from symphony.launcher.zygote.zygote_start import StartedZygote

log = logging.getLogger(__name__)

LAUNCHES_AT_ONCE = 32
"""Upper bound of concurrent launches, since the kernel limits the descriptors in flight of each user."""
KILLED = 9
"""Wait status that a program gets if its zygote is gone."""
_ENDED = "its process ended before the program ran: `symphony doctor` says whether there can be a sandbox"
_GONE = "the zygote went away while it started the program: try again"


class ZygoteProcess:
    """Link to one zygote."""

    def __init__(self, started: StartedZygote, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.pid, self._connection = started
        self._turns = asyncio.Semaphore(LAUNCHES_AT_ONCE)
        self._last_number = 0
        self._launches: dict[int, asyncio.Future[ProgramProcess]] = {}
        self._processes: dict[int, asyncio.Future[int]] = {}
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._receive)

    async def launch(self, spec: dict[str, Any], streams: Streams, door: socket.socket | None = None) -> ProgramProcess:
        """Start a process. Refused: the process can't be made, or the program does not exist or can't be read.

        `door`: socket to which the sandbox's listeners are sent.
        """
        async with self._turns:
            report, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                process = await self._ask(spec, streams, theirs, door)
                await self._hear(report)
            finally:
                os.close(report)
            if spec["isolation"] == "none":
                return process
            program = next(iter(children(process.pid)), process.pid)  # the sandbox may have ended already
            return dataclasses.replace(process, pid=program, first=process.pid)

    async def _ask(
        self, spec: dict[str, Any], streams: Streams, report: int, door: socket.socket | None
    ) -> ProgramProcess:
        number = self._last_number = self._last_number + 1
        answer = self._launches[number] = asyncio.Future[ProgramProcess]()
        try:
            with os.fdopen(os.memfd_create("symphony-program", os.MFD_CLOEXEC), "wb") as file:
                file.write(json.dumps(spec).encode())
                file.flush()
                fds = [file.fileno(), report, streams.stdin, streams.stdout, streams.stderr]
                if door is not None:
                    fds.append(door.fileno())
                socket.send_fds(
                    self._connection, [json.dumps({"n": number, "sandbox": spec["isolation"] != "none"}).encode()], fds
                )
        except (BrokenPipeError, ConnectionResetError):
            del self._launches[number]
            raise Refused(_GONE) from None
        except OSError as error:
            del self._launches[number]
            raise Refused(f"no process can be made for it: {error.strerror}") from None
        finally:
            os.close(report)
        return await answer

    async def _hear(self, report: int) -> None:
        """Wait until the child runs its program. Refused: the child reports an error, or ends without a report."""
        said = b""
        readable = asyncio.Event()
        self._loop.add_reader(report, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                with suppress(BlockingIOError):
                    more = os.read(report, 65536)
                    if not more:
                        break
                    said += more
        finally:
            self._loop.remove_reader(report)
        if said == b"":
            raise Refused(_ENDED)
        if said != READY:
            words = json.loads(said.removeprefix(READY))
            raise Refused(words["error"], words.get("status", NOT_READABLE))

    def _receive(self) -> None:
        try:
            raw = self._connection.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            raw = b""
        if not raw:
            self._lost()
            return
        message = json.loads(raw)
        if "status" in message:
            self._processes.pop(message["pid"]).set_result(message["status"])
            return
        answer = self._launches.pop(message["n"])
        if "error" in message:
            answer.set_exception(Refused(message["error"]))
            return
        ended = self._processes[message["pid"]] = self._loop.create_future()
        if not answer.done():
            answer.set_result(ProgramProcess(message["pid"], ended))

    def _lost(self) -> None:
        log.error("the zygote %d has gone, and its %d programs with it", self.pid, len(self._processes))
        self.close()
        self._on_lost()
        for answer in self._launches.values():
            answer.set_exception(Refused(_GONE))
        for ended in self._processes.values():
            ended.set_result(KILLED)

    def close(self) -> None:
        """Close the connection. The zygote then ends all its programs, and itself."""
        self._loop.remove_reader(self._connection)
        self._connection.close()
