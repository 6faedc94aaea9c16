"""Calls of Mooncake Store, which a process of its own makes: `symphony.fleet.store_process`."""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

import trio

from libsym.errors import NotSupported

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 16
"""Pages in the room, and in a call of the store."""
LIMIT_S, RETRY_S = 1.0, 5.0
"""Time that a call of the store may take, and time until the daemon tries again after a failure."""
UNREACHABLE = -900
"""First of the store's codes that mean that the master is away. Codes above it are misses."""
MAX_ANSWER_BYTES = 1 << 12


class StoreProcess:
    """The process that calls the store. If it ends, it is started again. One call is under way at a time."""

    def __init__(self, master: str, host: str, memory: int, page_bytes: int) -> None:
        """`memory`: bytes that the store gets for values on this machine, whose address is `host`.

        NotSupported: Mooncake Store is not installed.
        """
        if find_spec("mooncake") is None:
            raise NotSupported("fleet_store needs Mooncake Store: pip install 'symphony-os[fleet]'")
        self._arguments = [host, master, str(memory)]
        self.master = master
        self._room_descriptor = os.memfd_create("symphony-store")
        os.ftruncate(self._room_descriptor, PAGES_AT_ONCE * page_bytes)
        self.room = memoryview(mmap.mmap(self._room_descriptor, PAGES_AT_ONCE * page_bytes))
        """Values that the next call puts, or that the last call got."""
        self._socket: socket.socket | None = None
        self._is_busy = self._is_told = False
        self._answer, self._answered = list[int](), trio.Event()
        self.trouble = "it has not answered yet"
        """Reason why there are only misses now. Empty: the store answers."""

    async def run(self) -> None:
        """Keep the process for ever."""
        while True:
            trouble = "its process has ended"
            try:
                await self._live()
            except OSError as error:
                trouble = f"no process: {error}"
            self.fails(trouble)
            await trio.sleep(RETRY_S)

    async def _live(self) -> None:
        """Start the process, and take its answers until it ends. The first answer says that it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = theirs.fileno(), self._room_descriptor
        command = [sys.executable, "-P", "-m", "symphony.fleet.store_process", *map(str, passed), *self._arguments]
        with trio.socket.from_stdlib_socket(ours) as answers:
            with theirs:
                process = await trio.lowlevel.open_process(
                    command, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            self._socket, self._is_busy = ours, True
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._probe)
                    with suppress(ConnectionResetError):  # the process has ended before it read a request
                        while answer := await answers.recv(MAX_ANSWER_BYTES):
                            self._take(json.loads(answer))
                    nursery.cancel_scope.cancel()
            finally:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()

    async def _probe(self) -> None:
        """After a failure, find out when the store answers again."""
        while True:
            await trio.sleep(RETRY_S)
            if self.trouble and not self._is_busy:
                self._send("get", ["probe"], 1)

    def _send(self, verb: str, names: Sequence[str], size: int) -> None:
        assert self._socket is not None
        self._is_busy, self._answered = True, trio.Event()
        with suppress(BrokenPipeError):  # the process has ended: `_live` notices soon
            self._socket.send(json.dumps([verb, names, size]).encode())

    def _take(self, answer: list[int]) -> None:
        self._answer, self._is_busy = answer, False
        if min(answer, default=0) <= UNREACHABLE:
            self.fails(f"its master does not answer (code {min(answer)})")
        else:
            if self._is_told:
                log.info("fleet: the store of pages at %s answers again", self.master)
            self.trouble, self._is_told = "", False
        self._answered.set()

    def fails(self, trouble: str) -> None:
        """Have only misses from now on. The log says so once, until the store answers."""
        if not self._is_told:
            log.warning("fleet: no store of pages at %s: %s; pages come from peers", self.master, trouble)
        self.trouble, self._is_told = trouble, True

    async def call(self, verb: str, names: Sequence[str], size: int) -> list[int]:
        """Get values into the room, or put values from there. Return a code for each value: its size, or an error.

        If the store does not answer in time, return an error for all. Until it has answered, no other call is made.
        """
        if not self.trouble:
            self._send(verb, names, size)
            with trio.move_on_after(LIMIT_S, shield=True):  # a call that goes on would spoil the room for the next one
                await self._answered.wait()
                return self._answer
            self.fails(f"no answer within {LIMIT_S:g} s")
        return [UNREACHABLE] * len(names)
