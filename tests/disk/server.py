"""The process behind a disk: it answers the kernel and takes commands.

    python -m tests.disk.server LOWER MOUNTPOINT CONTROL DATA

CONTROL is the descriptor of a socket that takes commands, DATA that of a file for the bytes that are written. One
thread does everything, so the log's order is the order in which things happened. A request that hangs is put aside.
"""

import errno
import os
import resource
import select
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.disk.faults import Effect, Rule
from tests.disk.fuse import UNANSWERED, Channel, Opcode, Request, unmount
from tests.disk.log import Operation
from tests.disk.passthrough import Hung, PassThrough

_SPIN_S = 100e-6
"""Look again for so long before sleeping: a client that waits for each write gets 18,000 a second instead of 4,000."""

_TURN_S = 2e-3
"""Clients that never stop leave a turn to commands after so long."""


class Server:
    def __init__(self, below: PassThrough, channel: Channel, control: Connection) -> None:
        self._below, self._channel, self._control = below, channel, control
        self._troubles: list[str] = []

    # The loop

    def serve(self) -> None:
        poll = select.epoll()
        poll.register(self._channel.descriptor, select.EPOLLIN)
        poll.register(self._control.fileno(), select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._control.fileno():
                    try:
                        command, arguments = self._control.recv()
                    except (EOFError, ConnectionResetError):
                        return
                    self._obey(command, arguments)
                else:
                    try:
                        self._answer_what_comes()
                    except OSError as error:
                        if error.errno == errno.ENODEV:
                            return
                        raise

    def _answer_what_comes(self) -> None:
        now = time.monotonic()
        until, end = now + _SPIN_S, now + _TURN_S
        while now < until:
            for request in self._channel.requests():
                request.arrived = len(self._below.operations)
                self._answer(request)
                now = time.monotonic()
                if now > end:
                    return
                until = now + _SPIN_S
            now = time.monotonic()

    def _answer(self, request: Request) -> None:
        if request.opcode in UNANSWERED:
            self._below.forget(request)
            return
        if request.opcode == Opcode.INIT:
            self._channel.answer_init(request)
            return
        try:
            self._channel.reply(request, self._below.answer(request))
        except OSError as error:
            self._channel.refuse(request, error.errno or errno.EIO)
        except Hung:
            pass
        except Exception:  # noqa: BLE001  a defect of the disk's own: close() raises it
            self._troubles.append(traceback.format_exc())
            self._channel.refuse(request, errno.EIO)

    # Commands

    def _obey(self, command: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = getattr(self, f"_do_{command}")(*arguments)
        except Exception as error:  # noqa: BLE001  raised in the test, where the command came from
            answer = error
        self._control.send(answer)

    def _do_log(self, start: int) -> tuple[list[Operation], int]:
        return self._below.operations[start:], self._below.data_bytes

    def _do_append(self, operation: Operation) -> None:
        self._below.operations.append(operation)

    def _do_add_rule(self, rule: Rule) -> None:
        self._below.faults.rules.append(rule)

    def _do_heal(self) -> None:
        self._below.faults.rules = [rule for rule in self._below.faults.rules if rule.effect is Effect.HANG]

    def _do_count(self, operation: str, pattern: str) -> int:
        return self._below.faults.count(operation, pattern)

    def _do_resume(self) -> int:
        faults, freed, self._below.hung = self._below.faults, self._below.hung, []
        faults.rules = [rule for rule in faults.rules if rule.effect is not Effect.HANG]
        for request in freed:
            request.released = True
            self._answer(request)
        return len(freed)

    def _do_limit(self, limit_bytes: int | None) -> None:
        self._below.limit_bytes = limit_bytes

    def _do_used(self) -> int:
        return self._below.used_bytes

    def _do_troubles(self) -> list[str]:
        return self._troubles


def main() -> None:
    lower, mountpoint, control, data = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    os.umask(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connection = Connection(control)
    channel = Channel(mountpoint)
    try:
        server = Server(PassThrough(lower, data), channel, connection)
        connection.send(None)
        server.serve()
    finally:
        os.close(channel.descriptor)  # first: whoever still waits gets an error, and unmounting does not wait for us
        unmount(mountpoint)


if __name__ == "__main__":
    main()
