"""How a program finds its way in when the daemon has its hands full."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libsym import abi
from libsym.abi import WELCOME_STRUCT
from libsym.channel import handshake
from libsym.channel.handshake import dial, refusal
from libsym.errors import NotConnected, ProtocolError, SymError, WouldBlock


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """A daemon's socket, whose queue is full: it accepts nobody yet."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as found, socket.socket(socket.AF_UNIX) as first:
        found.bind(path)
        found.listen(0)
        found.settimeout(10)
        first.connect(path)
        with socket.socket(socket.AF_UNIX) as second:
            second.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.connect(path)
        yield found


def test_a_full_queue_of_connections_is_waited_for(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    found_it_full = threading.Event()

    def sleep(_seconds: float) -> None:
        found_it_full.set()

    def serve() -> None:
        assert found_it_full.wait(10)
        for _ in range(2):
            with listening.accept()[0] as connection:
                connection.sendall(refusal(SymError("nobody is let in today", errno.EPERM)))

    monkeypatch.setattr(time, "sleep", sleep)
    serving = threading.Thread(target=serve)
    serving.start()
    with pytest.raises(SymError, match="nobody is let in today"):
        dial(listening.getsockname())
    serving.join()


def test_a_queue_that_stays_full_is_a_daemon_that_does_not_answer(listening: socket.socket) -> None:
    with pytest.raises(NotConnected, match="does not answer: is it stopped or overloaded"):
        dial(listening.getsockname(), timeout_s=0.05)


def test_a_refusal_is_read_even_if_the_daemon_hung_up_before_it_was_greeted(listening: socket.socket) -> None:
    listening.accept()[0].close()
    listening.listen(1)

    class Greeted(socket.socket):
        """Sends its greeting when the daemon has hung up."""

        def sendall(self, data: bytes) -> None:  # type: ignore[override]
            with listening.accept()[0] as connection:
                connection.send(refusal(SymError("too many", errno.EAGAIN)))
            super().sendall(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", Greeted)
        with pytest.raises(WouldBlock, match="too many"):
            dial(listening.getsockname())


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (
            -1,
            "older than this program's libsym (ABI version {}, here {}): upgrade the daemon, or install the libsym of",
        ),
        (+2, "newer than this program's libsym (ABI version {}, here {}): install the libsym of the daemon's release"),
    ],
)
def test_a_daemon_of_another_release_is_told_in_one_line_that_says_what_to_do(tmp_path, ahead, words):
    path, version = str(tmp_path / "socket"), abi.ABI_VERSION + ahead
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)

        def serve() -> None:
            with listening.accept()[0] as connection:
                connection.recv(handshake.GREETING_BYTES, socket.MSG_WAITALL)
                connection.sendall(WELCOME_STRUCT.pack(abi.MAGIC, version, errno.EPROTO, 0))

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(ProtocolError) as told:
            dial(path)
        serving.join()
    assert words.format(version, abi.ABI_VERSION) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_daemon_that_is_full_says_so_to_a_client_of_the_version_before() -> None:
    _, version, code, _ = WELCOME_STRUCT.unpack_from(refusal(WouldBlock("too many")))
    assert (version, code) == (abi.ABI_OLDEST, errno.EAGAIN)
