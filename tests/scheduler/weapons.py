"""Descriptors whose last close takes long."""

import os
import select
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from tests.disk.fuse import UNANSWERED, Channel, Opcode, attributes_reply, entry_reply, unmount

LINGER_S = 600
"""Time that a close takes. A test that waits for one is hung: pytest's limit ends it."""
HUNG_S = 60
"""Time without progress after which a daemon counts as hung, on the busiest machine."""
_OPEN = struct.Struct("<QIi")


def kernel_can_refuse():
    """Whether it has SO_PASSRIGHTS."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            return probe.getsockopt(socket.SOL_SOCKET, 83) == 1
        except OSError:
            return False


@contextmanager
def lingering():
    """A function that makes one more socket with data that nobody reads: closing it takes LINGER_S."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)

        def make():
            weapon = socket.socket()
            weapon.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            weapon.connect(listening.getsockname())
            weapon.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            weapon.setblocking(False)
            try:
                while True:
                    weapon.send(bytes(1 << 16))
            except BlockingIOError:
                return weapon.detach()

        yield make


async def eventually(condition):
    """Threads close what has come, soon."""
    with trio.fail_after(HUNG_S):
        while not condition():  # noqa: ASYNC110 - the kernel tells nobody
            await trio.sleep(0.01)


class HungMount:
    """A file system with one file, which answers everything but a close.

    A process serves it: with the end of that all is answered, whatever becomes of the test.
    """

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self._fds: list[int] = []
        command = [sys.executable, "-m", "tests.scheduler.weapons", str(mountpoint)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        self._server.stdout.readline()

    def send_by(self, connection: socket.socket) -> None:
        """Send the file, opened once more."""
        self._fds.append(os.open(self._mountpoint / "file", os.O_RDONLY))  # closed at the end: that hangs, too
        socket.send_fds(connection, [b"x"], self._fds[-1:])

    def num_hung(self) -> int:
        """How many closes are under way."""
        return int(self._say(b"hung?"))

    def _say(self, what: bytes) -> bytes:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(what + b"\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()

    def let_go(self) -> None:
        if self._server.poll() is None:
            self._server.kill()
            self._server.communicate()
            unmount(self._mountpoint)
        while self._fds:
            with suppress(OSError):  # the server is gone
                os.close(self._fds.pop())


def serve_hung(mountpoint: Path) -> None:
    """Serve a mount on which FLUSH hangs, until standard input ends. Other input prints the number of hung requests."""
    channel, num_hung = Channel(mountpoint), 0
    directory, file = Path("/").stat(), Path(__file__).stat()
    print("mounted", flush=True)
    while True:
        ready, _, _ = select.select([channel.descriptor, 0], [], [])
        if 0 in ready:
            if not os.read(0, 100):
                return
            print(num_hung, flush=True)
        for request in channel.requests():
            match request.opcode:
                case Opcode.INIT:
                    channel.answer_init(request)
                case Opcode.LOOKUP:
                    channel.reply(request, entry_reply(file, 2))
                case Opcode.GETATTR:
                    channel.reply(request, attributes_reply(directory if request.node == 1 else file, request.node))
                case Opcode.OPEN:
                    channel.reply(request, _OPEN.pack(1, 0, 0))
                case Opcode.FLUSH:
                    num_hung += 1
                case each if each not in UNANSWERED:
                    channel.reply(request)


if __name__ == "__main__":
    serve_hung(Path(sys.argv[1]))
